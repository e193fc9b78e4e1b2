"""Recorded programs over real processes: gloo, and whole fits of the strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_3d import ThreeDStrategy
from lightning_3d.probe import intercept_functions
from lightning_3d.tensor import function_guard, plan_tensor_parallel
from lightning_3d.testing import run_distributed
from tests import models
from tests.strategy.cases import trainer_for
from tests.tensor.models import NanoGPT, next_token
from tests.tensor.recorded.helpers import check_against_rules, replays, train
from tests.tensor.test_processes import communicator


def steps() -> tuple[int, list[float]]:
    comm = communicator()
    torch.manual_seed(0)
    model = NanoGPT(p=0.3)
    plan = plan_tensor_parallel(model, next_token, comm.size)
    with intercept_functions(function_guard, 1):
        recorded, rules = (train(model, plan, next_token, comm, on) for on in (True, False))
    check_against_rules([recorded], [rules], 1e-4)
    return replays([recorded]), [loss.item() for loss in recorded.losses]


def test_gloo() -> None:
    first, second = run_distributed(steps, 2)
    assert first == second
    assert first[0] == 2 * 3  # the embedding and two blocks, in two steps


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].item())


def fit(sizes: dict[str, Any], record: bool, compiled: str) -> tuple[list[float], int]:
    seen = Losses()
    strategy = ThreeDStrategy(**sizes, record=record)
    torch.manual_seed(0)
    module: Any = models.LitGPT(depth=4, dim=16).double()
    if compiled == "blocks":
        for block in module.blocks:
            block.compile(backend="aot_eager")
    elif compiled == "module":
        module = torch.compile(module, backend="aot_eager")
    trainer = trainer_for(strategy, max_steps=6, max_epochs=-1, callbacks=[seen], use_distributed_sampler=False)
    trainer.fit(module, models.loader("gpt_tied", 48, 8))
    recording = strategy.engine.recording
    return seen.losses, 0 if recording is None else sum(b.replays for b in recording.blocks.values())


def fits(cases: list[tuple[dict[str, Any], str]]) -> Any:
    return [(fit(sizes, True, compiled), fit(sizes, False, "")) for sizes, compiled in cases]


@pytest.mark.parametrize("compiled", ["", "blocks", "module"])
@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ({"tensor_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "sequence_parallel": True}, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 4}, 4),
    ],
)
def test_fits(sizes: dict[str, Any], world: int, compiled: str) -> None:
    for result in run_distributed(fits, world, [(sizes, compiled)], timeout=250):
        (ours, count), (theirs, none) = result[0]
        assert len(ours) == 6
        assert ours == pytest.approx(theirs, rel=1e-9)
        assert count > 0
        assert none == 0
