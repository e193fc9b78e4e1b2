"""What a step remembers: as in one process, on every stage, whatever the schedule."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_3d.testing import DistributedError, preload, relative_error
from tests.pipeline import glue_states
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.pipeline.glue_states")
INTERLEAVED = {"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_size": 2}
FROM_END_TO_START = ("counted at the end", "branch on what was counted", "the loss before", "stateful", "memory bank")
"""What a step writes at its end and reads at its start cannot reach the next microbatch, which has begun before."""
OF_ONE_SIZE = ("hidden of the batch before", "list of hidden", "what a block left")
"""Hidden states of a batch in validation, which is not cut, do not fit to microbatches."""
SCHEDULES: dict[str, dict[str, Any]] = {"1f1b": {}, "interleaved": INTERLEAVED, "zb_v": {"pipeline_schedule": "zb_v"}}


def compare(got: Any, want: Any) -> dict[str, float]:
    """Kind -> largest error, where it is not zero."""
    worst = {
        kind: max(relative_error(value, want[kind][name]) for name, value in values.items())
        for kind, values in got.items()
        if kind != "calls"
    }
    return {kind: error for kind, error in worst.items() if error > 1e-9}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_microbatch_is_one_process(schedule: str) -> None:
    """Broken before: the plan left traces, stages forgot or counted twice, and some steps hung."""
    (want,) = launch(glue_states.train, 1, None)
    ranks = launch(glue_states.train, 2, sizes(1, 2, num_microbatches=1, **SCHEDULES[schedule]))
    for got in ranks:
        assert compare(got, want) == {}
    assert sum(int(got["calls"][""]) for got in ranks) == int(want["calls"][""]), "every block notes its calls, once"


def test_microbatches_do_not_depend_on_the_schedule() -> None:
    """Several parts on a rank change state once per microbatch, not once per part."""
    without = (*FROM_END_TO_START, *OF_ONE_SIZE)
    (want, _) = launch(glue_states.train, 2, sizes(1, 2, num_microbatches=4), without)
    for name in ("interleaved", "zb_v"):
        for got in launch(glue_states.train, 2, sizes(1, 2, num_microbatches=4, **SCHEDULES[name]), without):
            assert compare(got, want) == {}


def test_state_that_two_parts_of_a_rank_change_is_refused() -> None:
    launch(glue_states.changes_twice, 2, sizes(1, 2, num_microbatches=4))
    with pytest.raises(DistributedError, match="training_step changes count at two places that lie in two parts"):
        launch(glue_states.changes_twice, 2, sizes(1, 2, num_microbatches=4, **INTERLEAVED))


def test_what_the_step_changes_and_reads_is_named() -> None:
    want = {
        "attribute": ["count"],
        "buffers in place": ["steps", "mean"],
        "counted at the end": ["steps", "count"],
        "the loss before": ["previous"],
        "memory bank": ["bank", "place"],
    }
    got = launch(glue_states.warned_of, 2, sizes(1, 2, num_microbatches=2), list(want))[0]  # rank zero warns
    assert {kind: sorted(names) for kind, names in got.items()} == {k: sorted(v) for k, v in want.items()}
    assert not any(launch(glue_states.warned_of, 2, sizes(1, 2, num_microbatches=1), list(want))[0].values())
