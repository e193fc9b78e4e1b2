"""ZeRO-2 and 3 in whole fits, with every axis, schedule and accumulation, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_3d.testing import preload, relative_error
from tests.strategy import zeros
from tests.strategy.fits import Case
from tests.strategy.test_cases import launch, sizes
from tests.strategy.test_parity import check

preload("tests.models", "tests.strategy.fits", "tests.strategy.zeros")

INTERLEAVED = {"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_size": 2}
PIPELINES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"pipeline_schedule": "gpipe"},
    "interleaved": INTERLEAVED,
    "zb_h1": {"pipeline_schedule": "zb_h1"},
    "zb_v": {"pipeline_schedule": "zb_v"},
}


def cases(stages: tuple[int, ...] = (2,), **strategy: Any) -> list[Case]:
    parts = (2, strategy.get("num_microbatches", 1))
    return [
        Case(model, accumulate=accumulate, clip=clip, optimizer=optimizer, steps=3, samples=16, parts=parts,
             strategy={"zero_stage": stage, "bucket_size_mb": 0.002, **strategy})
        for stage in stages
        for model, accumulate, clip, optimizer in (
            ("gpt_tied", 1, None, "sgd"), ("gpt_tied", 3, 0.3, "adamw"), ("mlp", 2, None, "adamw")
        )
    ]  # fmt: skip


@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 1, 2)], ids=["dp2", "tp2 x dp2"])
def test_without_pipeline(layout: tuple[int, int, int]) -> None:
    check(layout, cases((2, 3)))


SLOW = {"gpipe", "interleaved"}
"""The others have what these have: all forwards first, several windows on a rank."""


@pytest.mark.parametrize("schedule", [pytest.param(s, marks=pytest.mark.slow if s in SLOW else ()) for s in PIPELINES])
def test_with_pipeline(schedule: str) -> None:
    stages = (2, 3) if schedule in ("1f1b", "zb_v") else (2,)
    check((1, 2, 2), cases(stages, num_microbatches=4, **PIPELINES[schedule]))


def test_with_tensor_and_pipeline() -> None:
    check((2, 2, 2), cases((2, 3), num_microbatches=2))


@pytest.mark.parametrize("layout", [sizes(), sizes(1, 2, num_microbatches=4)], ids=["dp2", "pp2 x dp2"])
def test_gradients_of_one_rank_are_its_part(layout: dict[str, Any]) -> None:
    """Between the batches of an accumulation, and at the peak: 1/N, some buckets, and nothing more."""
    world = 2 * layout["pipeline_parallel_size"]
    whole = launch(zeros.gradient_bytes, world, {**layout, "zero_stage": 1})
    parts = launch(zeros.gradient_bytes, world, {**layout, "zero_stage": 2})
    for (model, kept, _), (_, kept_part, peak_part) in zip(whole, parts, strict=True):
        assert kept >= model
        assert kept_part <= model / 2 * 1.01 + zeros.BUCKET
        assert peak_part <= model / 2 * 1.01 + 6 * zeros.BUCKET


def test_replicas_with_other_numbers_of_microbatches() -> None:
    """One replica's last batch is smaller: both reduce after the last backward of that step."""
    for difference, error in launch(zeros.uneven_last_batch, 4, sizes(1, 2, num_microbatches=4, zero_stage=2)):
        assert difference == 0.0
        assert error <= 1e-9


FORMULA = {"32-true": (4, 4, 8), "bf16-mixed": (4, 4, 8), "bf16-true": (2, 2, 12)}
"""Bytes per parameter: the parameter, its gradient, what Adam has of it."""


def check_formula(world: int, layouts: list[dict[str, Any]], precision: str) -> None:
    replicas = 2
    for rank in launch(zeros.memories, world, layouts, precision):
        for layout, (count, found) in zip(layouts, rank, strict=True):
            stage = layout["zero_stage"]
            shared = (stage > 2, stage > 1, stage > 0)
            for kind, each, divided in zip(
                ("parameters", "gradients", "optimizer"), FORMULA[precision], shared, strict=True
            ):
                formula = count * each / (replicas if divided else 1)
                assert formula * 0.99 <= found[kind] <= formula * 1.01 + zeros.BUCKET, (layout, kind)


@pytest.mark.parametrize("precision", FORMULA)
def test_memory_is_the_formula(precision: str) -> None:
    """Parameters, gradients (while batches are accumulated) and optimizer state of one of two replicas."""
    check_formula(2, [sizes(zero_stage=stage) for stage in range(4)], precision)


def test_memory_is_the_formula_of_a_part_of_the_model() -> None:
    """Of what tensor and pipeline parallelism leave to a rank."""
    parts: list[dict[str, Any]] = [sizes(2), sizes(1, 2, num_microbatches=4)]
    check_formula(4, [{**part, "zero_stage": stage} for part in parts for stage in (1, 2, 3)], "bf16-true")


def test_memory_of_an_optimizer_on_the_host() -> None:
    """Nothing of it is on the device; on the host values and moments, and the gradients of a step."""
    for precision, each in (("32-true", 12), ("bf16-true", 12)):
        layouts = [sizes(zero_stage=stage, offload_optimizer=True) for stage in (0, 1, 3)]
        for rank in launch(zeros.memories, 2, layouts, precision):
            for layout, (count, found) in zip(layouts, rank, strict=True):
                assert found["optimizer"] == 0
                part = count * each / (2 if layout["zero_stage"] else 1)
                assert part * 0.99 <= found["offloaded"] <= part * (4 / 3) * 1.01 + zeros.BUCKET, layout


def test_another_strategy_takes_the_parameters_over() -> None:
    want = launch(zeros.two_trainers, 1, None, None)[0][0]
    for first, second in ((3, 1), (1, 3), (3, 3), (1, 1)):
        for seen in launch(zeros.two_trainers, 2, sizes(zero_stage=first), sizes(zero_stage=second)):
            for got in seen:  # also by the strategy that had them
                assert max(relative_error(got[n], p) for n, p in want.items()) <= 1e-9
