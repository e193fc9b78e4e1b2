"""What users do in their modules is right with a pipeline, or is refused or warned of; never silently wrong."""

from __future__ import annotations

import pytest

from lightning_3d.testing import preload
from tests.strategy.habits import changed_buffers, late, step_metrics
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.strategy.cases", "tests.strategy.habits")


def test_a_metric_logged_for_every_step_has_seen_the_whole_batch() -> None:
    (want,) = launch(step_metrics, 1, None)
    assert {"f1_step", "accuracy", "f2", "error"} <= set(want[0])
    for rank in launch(step_metrics, 2, sizes(1, 2)):
        assert len(rank) == len(want)
        for got, expected in zip(rank, want, strict=True):
            assert got == pytest.approx(expected, rel=1e-6)  # float32 states


def test_buffers_that_the_step_changes_are_named() -> None:
    several, one = launch(changed_buffers, 2, [sizes(1, 2), sizes(1, 2, num_microbatches=1)])[0]
    (message,) = several
    for word in ("'ema'", "'calls'", "'first.mean'", "8 times per batch", "num_microbatches=1"):
        assert word in message
    for word in ("constant", "second", "norm"):
        assert word not in message
    assert not one


def test_a_value_of_an_earlier_stage_may_count_later() -> None:
    (want,) = launch(late, 1, None)
    for got in launch(late, 2, sizes(1, 2)):
        assert len(got) == len(want)
        for now, expected in zip(got, want, strict=True):
            assert now == pytest.approx(expected, rel=1e-9)
