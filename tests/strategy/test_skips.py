"""A training_step that returns None is skipped, as on one process, and replicas stay in step."""

from __future__ import annotations

from typing import Any

from lightning_3d.testing import preload, relative_error
from tests.strategy.skips import skipping
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.strategy.cases", "tests.strategy.skips")

BOTH, ONE = {(1, 0), (1, 1)}, {(1, 1), (2, 0)}


def test_a_step_that_returns_none_is_skipped() -> None:
    """AdamW would move parameters that get zeros; accumulated with others, it counts as nothing."""
    pp2: list[Any] = [sizes(1, 2), sizes(1, 2, pipeline_schedule="zb_v"), sizes(2)]
    cases = [(s, {(0, 0), (2, 0)}, accumulate, 1) for accumulate in (1, 2) for s in pp2]
    _check(2, cases)


def test_replicas_that_skip_other_batches_stay_in_step() -> None:
    layouts: list[Any] = [sizes(1, 2), sizes(1, 2, zero_stage=0)]
    skips = [(BOTH, 1), (ONE, 1), (ONE, 2), ({(0, 0), (0, 1), (1, 0), (1, 1)}, 2)]
    _check(4, [(s, skipped, accumulate, 2) for s in layouts for skipped, accumulate in skips])


def _check(world: int, cases: list[Any]) -> None:
    wanted = launch(skipping, 1, [(None, *case[1:]) for case in cases])[0]
    for rank in launch(skipping, world, cases):
        for case, (apart, got), (_, want) in zip(cases, rank, wanted, strict=True):
            assert apart == 0.0, case
            wrong = {n: e for n, p in want.items() if not (e := relative_error(got[n], p)) <= 1e-9}
            assert not wrong, case
