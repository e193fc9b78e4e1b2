"""Float32 masters of bfloat16 parameters, float32 gradients, and a gradient scaler whose ranks decide together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_3d.testing import preload, relative_error
from tests.strategy import precisions
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.strategy.precisions")


def check(world: int, cases: list[tuple[dict[str, Any], int]], tolerance: float = 0.0) -> None:
    for result in launch(precisions.masters_of, world, cases):
        for case, (error, difference) in zip(cases, result, strict=True):
            assert error <= tolerance, case
            assert difference == 0.0, case


def test_masters_of_one_process_are_those_of_a_loop_by_hand() -> None:
    """Bit by bit; bfloat16 alone would lose most steps."""
    check(1, [(sizes(float32_gradients=f), accumulate) for f in (False, True) for accumulate in (1, 2)])
    start, masters = precisions.build().bfloat16(), precisions.by_hand()
    kept = [(masters[n].bfloat16() == p).float().mean() for n, p in start.named_parameters() if p.ndim > 1]
    assert max(kept) > 0.5


def test_masters_with_every_stage() -> None:
    """Bit by bit; with gradients in float32, also over accumulated batches."""
    check(2, [(sizes(zero_stage=s, float32_gradients=f), 3 if f else 1) for s in range(4) for f in (False, True)])


def test_masters_with_tensor_and_pipeline_parallelism() -> None:
    """Sums over tp and microbatches in bfloat16 round otherwise."""
    check(4, [(sizes(2, 2, num_microbatches=2), 3), (sizes(1, 2, num_microbatches=2, zero_stage=3), 1)], 5e-2)


def test_masters_with_a_pipeline_that_accumulates_batches() -> None:
    """The loss comes back divided by three, rounded to bfloat16: gradients are not rescaled by that rounding."""
    check(2, [(sizes(1, 2, num_microbatches=1, zero_stage=stage), 3) for stage in (0, 1)])


def test_what_a_step_writes_into_parameters_counts() -> None:
    """Also for their masters; of the optimizer's step a few thousandths are left."""
    for rank in launch(precisions.edited, 2, [0, 1, 2, 3]):
        for weight, bias in rank:
            assert 0 < weight < 0.05
            assert 0 < bias < 0.05


@pytest.mark.parametrize("distributed", [True, False], ids=["directory", "file"])
def test_masters_survive_a_checkpoint_and_another_layout(distributed: bool, tmp_path: Path) -> None:
    results = launch(precisions.resumed, 2, tmp_path, sizes(zero_stage=1), sizes(zero_stage=3), distributed)
    assert results[0][0] > 10
    assert results[0][1] == []


def test_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    layouts = [sizes(), sizes(zero_stage=3), sizes(1, 2, num_microbatches=2), sizes(2), sizes(offload_optimizer=True)]
    plain = launch(precisions.overflow, 1, [sizes()])[0][0][1]
    results = launch(precisions.overflow, 2, layouts)
    for index, layout in enumerate(layouts):
        for scales, loss, difference, moved in (result[index] for result in results):
            assert scales == [1024.0, 512.0, 512.0, 1024.0], layout  # halved for all, grown after two good steps
            assert difference == moved == 0.0, layout
            one_replica = layout["tensor_parallel_size"] * layout["pipeline_parallel_size"] == 2
            assert not one_replica or abs(loss - plain) < 0.02


def test_hooks_see_gradients_without_the_scale() -> None:
    """Whole ones, on every rank, although the optimizer's part alone is unscaled by Lightning."""
    (norms, parameters), *_ = launch(precisions.clipped_in_a_hook, 1, [None])[0]
    layouts = [sizes(zero_stage=0), sizes(), sizes(zero_stage=3), sizes(offload_optimizer=True), sizes(2)]
    for rank in launch(precisions.clipped_in_a_hook, 2, layouts):
        for layout, (got, after) in zip(layouts, rank, strict=True):
            assert got == pytest.approx(norms, rel=5e-3), layout
            for name, want in parameters.items():
                assert relative_error(after[name], want) <= 5e-3, (layout, name)
