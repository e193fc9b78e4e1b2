"""What the demo does around its two trainings. The trainings themselves: tests/examples/test_examples.py."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_3d import demo, demo_run
from lightning_3d.errors import ConfigurationError
from lightning_3d.mesh import coordinate_of
from lightning_3d.observe import RankTrace, Span, StepTrace, save_trace
from tests.observe.simulated import traces


def fake_run(difference: float) -> Any:
    """A stand-in for the training processes: smooth losses, one simulated step of 1F1B."""

    def run(mode: str, folder: Path, steps: int, fast: bool) -> list[dict[str, Any]]:
        noise = random.Random(0)
        factor = 1 + (difference if mode == "layout" else 0)
        common = {
            "train": [(s + 1, (5 - s / steps) * factor) for s in range(steps)],
            "validation": [(steps, 4.1 * factor)],
            "seconds": [0.2 + 0.01 * noise.random() for _ in range(steps)],
            "tokens_per_step": 2048,
            "memory": {"parameters": 4000, "gradients": 4000, "optimizer": 8000},
            "ledger": [],
        }
        if mode == "one":
            return [{**common, "rank": 0, "stage": 0, "dp": 0, "tp": 0, "layout": "one process"}]
        simulated = {t.stage: t.steps[0].spans for t in traces(2, 8)}
        results = []
        for rank in range(demo.LAYOUT.world_size):
            at = coordinate_of(demo.LAYOUT, rank)
            shifted = [Span(s.kind, s.microbatch, s.stage, s.start / 50, s.end / 50 - 0.002) for s in simulated[at.pp]]
            save_trace(RankTrace(rank, at.pp, at.dp, at.tp, str(demo.LAYOUT), [StepTrace(5, "train", shifted)]), folder)
            row = {"phase": "forward", "axis": "tp", "op": "all_reduce", "calls": 4.0, "elements": 1024.0}
            ledger = [{**row, "payload": 4096.0, "wire": 4096.0}]
            place = {"rank": rank, "stage": at.pp, "dp": at.dp, "tp": at.tp, "layout": str(demo.LAYOUT)}
            results.append({**common, **place, "ledger": ledger})
        return results

    return run


def test_the_demo_shows_the_comparison_and_writes_its_pictures(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "_run", fake_run(1e-6))
    assert demo.run_demo(tmp_path, steps=20)
    for name in ("loss.png", "pipeline.png", "pipeline_trace.json"):
        assert (tmp_path / name).stat().st_size > 1000
    out = capsys.readouterr().out
    assert "largest relative difference of the losses: 1.0e-06 (float32 rounding)" in out
    assert "(p-1)/(m+p-1) = 0.111 for p=2, m=8" in out
    assert out.count("F0-") == 2, "one lane per stage of one replica"
    assert max(map(len, out.splitlines())) <= 220
    assert "rank 7: replica 1 stage 0 tp 1" in out


def test_a_difference_larger_than_rounding_fails_the_demo(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "_run", fake_run(1e-3))
    assert not demo.run_demo(tmp_path, steps=20)
    assert "MORE THAN ROUNDING" in capsys.readouterr().out


def test_a_run_that_fails_says_how_to_repeat_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "LAYOUT", "tp0")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigurationError, match=r"exit code 1 and 0 of 1 results.*--mode one"):
        demo._run("one", tmp_path / "one", 3, True)


def test_no_process_of_a_run_outlives_it(monkeypatch) -> None:
    monkeypatch.setattr(demo, "RUN_TIMEOUT", 0.5)
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert demo._wait(process) == -1
    process.stdout.close()
    for _ in range(50):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the grandchild is still alive")


def test_one_process_sees_the_samples_of_all_replicas_in_each_batch() -> None:
    example = demo_run.load_example()
    data = example.StandardLibraryText(batch_size=3, sequence=16, max_bytes=4000)
    train, validation = demo_run.one_process_loaders(data, replicas=2)
    replicas = [
        torch.utils.data.DataLoader(
            data.train,
            batch_size=3,
            drop_last=True,
            sampler=torch.utils.data.DistributedSampler(data.train, 2, rank, shuffle=True, seed=demo_run.SEED),
        )
        for rank in range(2)
    ]
    for whole, *parts in zip(train, *replicas, strict=True):
        rows = sorted(whole[0].tolist())
        assert rows == sorted(row for part in parts for row in part[0].tolist())
    assert len(next(iter(validation))[0]) == 6


def test_without_a_checkout_the_demo_says_what_is_missing(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(demo_run, "__file__", str(tmp_path / "lightning_3d" / "demo_run.py"))
    with pytest.raises(ConfigurationError, match="from a clone of the repository"):
        demo_run.load_example()


def test_the_example_module_has_no_word_about_parallelism() -> None:
    path = Path(demo_run.__file__).resolve().parents[1] / "examples" / "train_gpt.py"
    source = path.read_text()
    module_and_data = source[source.index("class Attention") : source.index("def sample")].lower()
    for word in ("lightning_3d", "parallel", "rank", "distributed", "sync_dist", "world"):
        assert word not in module_and_data
