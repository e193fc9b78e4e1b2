"""Start-up: each rank makes its part of the weights, and they are what one process gets from the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_3d.testing import preload, run_distributed
from tests import models
from tests.deferred.builds import MAKES, built, eager_costs, from_folder, loaded, unseeded

preload("tests.models", "tests.deferred.builds")


def sizes(tp: int = 1, pp: int = 1, zero: int = 1, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "zero_stage": zero, **more}


INTERLEAVED = sizes(1, 2, virtual_pipeline_size=2, pipeline_schedule="interleaved_1f1b")
LAYOUTS = [sizes(2), sizes(2, 2), sizes(1, 4), sizes(zero=3), sizes(2, zero=3), sizes(1, 2, zero=3), INTERLEAVED]


def launch(function: Any, world: int, *args: Any) -> list[Any]:
    return run_distributed(function, world, *args, init_process_group=False, timeout=240)


def check(cases: list[tuple[str, dict[str, Any]]], optimizer: str = "sgd") -> None:
    names = sorted({name for name, _ in cases})
    wanted = dict(zip(names, launch(built, 1, [(name, None, optimizer) for name in names])[0], strict=True))
    ranks = launch(built, 4, [(name, layout, optimizer) for name, layout in cases])
    for index, (name, layout) in enumerate(cases):
        weights, losses, _ = wanted[name]
        for rank in ranks:
            got, _, late = rank[index]
            assert late > 8, (name, layout)
            assert got.keys() == weights.keys()
            wrong = [n for n, p in weights.items() if not torch.equal(got[n], p)]
            assert not wrong, (name, layout)
        mean = [sum(rank[index][1][step] for rank in ranks) / 4 for step in range(2)]
        assert mean == pytest.approx(losses, rel=1e-9), (name, layout)


def test_weights_do_not_depend_on_the_layout() -> None:
    """Bit-equal: an initialisation of the user's own, the meta device, adapters, every axis and ZeRO-3."""
    mixed = [("own", layout) for layout in (sizes(2, 2), sizes(zero=3), sizes(2, zero=3), INTERLEAVED)]
    check([*mixed, ("meta", sizes(2)), ("meta", sizes(1, 2, zero=3)), ("llama", sizes(1, 2)), ("lora", sizes(2))])


@pytest.mark.slow
def test_weights_of_all_models_do_not_depend_on_any_layout() -> None:
    check([(name, layout) for name in MAKES for layout in LAYOUTS if "lora" not in name or layout is not LAYOUTS[2]])


def test_state_that_optimizers_make_before_the_first_step() -> None:
    check([("own", sizes(2)), ("own", sizes(1, 2)), ("own", sizes(zero=3))], "adagrad")


def test_rank_zero_counts_where_nobody_seeds() -> None:
    """Also for models built under `Trainer.init_module`, which every process runs for itself."""
    layouts = [sizes(2), sizes(1, 2, zero=3)]
    ranks = launch(unseeded, 4, layouts)
    want = ranks[0][0]
    for rank in ranks:
        for layout, got in zip([x for x in layouts for _ in range(2)], rank[1:], strict=True):
            assert {n for n, p in got.items() if not torch.equal(p, want[n])} == set(), layout


def test_checkpoints_are_read_into_models_without_values(tmp_path: Path) -> None:
    for rank in launch(loaded, 4, [sizes(2, 2), sizes(zero=3)], tmp_path):
        for found in rank:
            assert [what for what, right in found if not right] == []
            assert len(found) == 2


def test_a_folder_of_weights_is_read_by_parts(tmp_path: Path) -> None:
    """A stage reads no tensor of the others'."""
    torch.manual_seed(3)
    models.llama().model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for rank in launch(from_folder, 4, [sizes(2), sizes(1, 4), sizes(zero=3)], str(tmp_path)):
        (right, late, read), (right_pp, _, read_pp), (right_zero, _, _) = rank
        assert right
        assert right_pp
        assert right_zero
        assert read >= late > 20
        assert read_pp < late / 2


def test_what_a_model_built_whole_costs_is_said_once() -> None:
    said = launch(eager_costs, 2, sizes(2))[0]
    assert len([text for text in said if "built before the Trainer could divide it" in text]) == 1
