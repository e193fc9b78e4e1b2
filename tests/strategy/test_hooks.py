"""Hooks that read, change, replace or clip gradients do what they do in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_3d.surrogate import surrogate_loss
from lightning_3d.testing import preload, relative_error, run_distributed
from tests.strategy.hooks import CASES, FINETUNING, MANUAL, parameters_after

preload("tests.models", "tests.strategy.hooks")


def launch(world: int, names: list[str], sizes: dict[str, Any] | None) -> Any:
    return run_distributed(parameters_after, world, names, sizes, init_process_group=False, timeout=120)


def compare(names: list[str], world: int, sizes: dict[str, Any]) -> None:
    want = launch(1, names, None)[0]
    for rank in launch(world, names, sizes):
        for name, (reference, _), (parameters, apart) in zip(names, want, rank, strict=True):
            errors = {n: relative_error(parameters[n], p) for n, p in reference.items()}
            assert max(errors.values()) <= 1e-9, (name, {n: e for n, e in errors.items() if not e <= 1e-9})
            assert apart == 0.0, name


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"zero_stage": 1}),
        (2, {"zero_stage": 0}),
        (2, {"zero_stage": 2, "bucket_size_mb": 0.002}),
        (2, {"zero_stage": 3, "bucket_size_mb": 0.002}),
        (2, {"zero_stage": 1, "bucket_size_mb": 0.002, "offload_optimizer": True}),
        (2, {"tensor_parallel_size": 2}),
        (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
        (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
        (4, {"tensor_parallel_size": 2}),
    ],
    ids=["zero1", "zero0", "zero2", "zero3", "offload", "tp2", "pp2", "dp2-pp2", "dp2-tp2"],
)
def test_hooks_on_gradients(world: int, sizes: dict[str, Any]) -> None:
    """C5, C6: among them clipping that is overridden, torch's and Lightning's norms."""
    compare([*CASES, *FINETUNING], world, sizes)


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"zero_stage": 1}),
        (2, {"zero_stage": 0}),
        (2, {"zero_stage": 3, "bucket_size_mb": 0.002}),
        (2, {"zero_stage": 1, "bucket_size_mb": 0.002, "offload_optimizer": True}),
        (2, {"tensor_parallel_size": 2}),
        (4, {"tensor_parallel_size": 2}),
    ],
    ids=["zero1", "zero0", "zero3", "offload", "tp2", "dp2-tp2"],
)
def test_manual_optimization(world: int, sizes: dict[str, Any]) -> None:
    compare([*MANUAL], world, sizes)


def test_one_factor_holds_for_all_batches_that_are_accumulated() -> None:
    published: list[Any] = []
    zero: Any = SimpleNamespace(rescaled=None, publish=published.append)
    for factor, last in ((2.0, False), (2.0, False), (2.0, True), (1.0, False), (1.0, True)):
        (factor * surrogate_loss(torch.ones(()), zero, 0.5, last) * 0.5).backward()
    assert [float(each) for each in published] == [2.0, 1.0]
    surrogate_loss(torch.ones(()), zero, 1.0, last=False).backward()
    with pytest.raises(RuntimeError, match=r"another factor than .*scale the loss in training_step \(found 3, .* 1\)"):
        (3 * surrogate_loss(torch.ones(()), zero, 1.0, last=True)).backward()
