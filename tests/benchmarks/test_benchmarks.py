"""Do the benchmarks still run, and do both sides of each compute the same?  No time is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    activation_memory,
    data_parallel,
    pipeline_bubble,
    pipeline_glue,
    run_all,
    setup_time,
    start_up_memory,
    tensor_overhead,
    tensor_parallel,
)
from benchmarks.common import Result, Spread, Table
from lightning_3d.tensor import plan_tensor_parallel


def smoke(benchmark: Any) -> Result:
    said: list[str] = []
    result: Result = benchmark.run(True, said.append)
    assert len(said) == benchmark.PARTS
    for table in result.tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
    return result


def agree(losses: dict[str, Any], tolerance: float) -> None:
    """Every variant has every rank's losses; all equal those of the first variant, and training changed them."""
    first = next(iter(losses.values()))["losses"]
    for variant in losses.values():
        for got, want in zip(variant["losses"], first, strict=True):
            assert len(got) == 2
            assert got[0] != got[1]
            assert got == pytest.approx(want, rel=tolerance)


def test_data_parallel() -> None:
    data = smoke(data_parallel).data
    agree(data["gpt"], 1e-5)
    agree(data["one_process"], 0.0)


def test_tensor_parallel() -> None:
    data = smoke(tensor_parallel).data
    assert list(data) == ["64", "128", "192"]
    for width in data.values():
        agree({name: v for name, v in width.items() if name != "sizes"}, 1e-5)


def test_both_systems_cut_the_same_matrices() -> None:
    module = tensor_parallel.Blocks(64, 1)
    batch = [torch.randn(2, 4, 64), torch.randn(2, 4, 64)]
    plan = plan_tensor_parallel(module, lambda m: m.training_step(batch, 0), 2)
    kinds = {name: plan.decisions[f"blocks.0.{name}.weight"].kind for name in tensor_parallel.PLAN}
    assert kinds == {"qkv": "column", "out": "row", "fc": "column", "projection": "row"}
    styles = {name: type(style()).__name__ for name, style in tensor_parallel.PLAN.items()}
    assert styles == {n: {"column": "ColwiseParallel", "row": "RowwiseParallel"}[k] for n, k in kinds.items()}


def test_tensor_overhead() -> None:
    data = smoke(tensor_overhead).data
    assert all(all(found["programs"].values()) for found in data.values()), "something was not recorded"


def test_pipeline_bubble() -> None:
    data = smoke(pipeline_bubble).data
    schedules = ["gpipe/v1", "1f1b/v1", "interleaved_1f1b/v2", "zb_h1/v1", "zb_v/v2"]
    assert list(data) == [f"2ms/p4/{schedule}/8" for schedule in schedules]
    assert all(found["gradient_error"] < 1e-5 for found in data.values())


def test_pipeline_glue() -> None:
    data = smoke(pipeline_glue).data
    assert set(data["recording"]) == {"GPT", "Hugging Face Llama"}


def test_activation_memory() -> None:
    data = smoke(activation_memory).data
    assert data["full"]["kept"] < data["selective"]["kept"] < data["nothing recomputed"]["kept"]


def test_setup_time() -> None:
    data = smoke(setup_time).data
    assert all(found["median"]["cut fraction"] > 0.9 for found in data.values())


def test_start_up_memory() -> None:
    data = smoke(start_up_memory).data
    assert 0 < data["pp4/in configure_model"]["part"] < data["whole"]


def test_the_page_has_a_place_for_every_benchmark(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    page = tmp_path / run_all.PAGE
    page.write_text((run_all.ROOT / run_all.PAGE).read_text())
    info = {**run_all.machine(), "date": "today"}
    results = {
        name: Result(name, "how", [Table("what", ["a", "b"], [["1", r"\2"]])], {"load_before": 1.0, "x": name})
        for name in run_all.BENCHMARKS
    }
    run_all.write(results, info, tmp_path)
    run_all.write({"setup_time": results["setup_time"]}, info, tmp_path)
    text = page.read_text()
    assert text.count(r"| 1 | \2 |") == len(results)
    with pytest.raises(ValueError, match="markers"):
        run_all.replace_section(text, "unknown", "")


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([0.5]).text(1e3, 0) == "500 (500 to 500)"
