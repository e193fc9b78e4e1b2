"""The played step: short cuts give what the whole step gives; memory is read off the lists."""

from __future__ import annotations

import random

import pytest

from lightning_3d.pipeline.check import check
from lightning_3d.pipeline.schedule import schedule_lists
from lightning_3d.planner import Cluster, plan
from lightning_3d.planner.playing import Window, in_flight, play, timing
from lightning_3d.planner.step_time import halved_windows, window_seconds, windows_of

KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zb_h1", 1), ("zb_v", 2)]


@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("microbatches", [4, 24, 64])
def test_fewer_microbatches_tell_the_length_of_all(schedule: str, virtual: int, stages: int, microbatches: int) -> None:
    draw = random.Random(f"{schedule} {virtual} {stages} {microbatches}")
    windows = tuple(
        Window(draw.uniform(1, 1.3), draw.uniform(1, 1.3), draw.uniform(0.6, 0.9)) for _ in range(stages * virtual)
    )
    whole = timing(schedule, stages, microbatches, virtual, windows, 0.05).length
    played = play(schedule, stages, microbatches, virtual, windows, 0.05)
    assert played.length == pytest.approx(whole, rel=0.005 if virtual > 1 else 1e-12)
    assert 0 <= played.bubble < 1


@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 32])
def test_in_flight_is_the_proven_peak(schedule: str, virtual: int, stages: int, microbatches: int) -> None:
    lists = schedule_lists(schedule, stages, microbatches, virtual)
    proven = check(lists, stages * virtual, microbatches).peak_live
    assert [sum(windows) for windows in in_flight(schedule, stages, microbatches, virtual)] == list(proven)


def test_split_backwards_free_a_part_early() -> None:
    whole = in_flight("zb_h1", 4, 16, 1)
    half = in_flight("zb_h1", 4, 16, 1, after_inputs=0.5)
    assert sum(half[3]) < sum(whole[3]) == 4


def test_a_backward_that_computes_again_is_not_split() -> None:
    """As `pipeline/execution.py` runs it: `I` does everything, and frees everything."""
    answer = plan("gpt-7.5b", Cluster.of("a100-80gb", 8), global_batch=32, seq=2048)
    for recompute in ("selective", "full"):
        split, plain = (answer.explain(f"pp8-{schedule}-mbs1-{recompute}") for schedule in ("zb_h1", "1f1b"))
        assert split.seconds == pytest.approx(plain.seconds, rel=1e-6)
        assert split.memory.peak.total == plain.memory.peak.total
        assert halved_windows(split.run, windows_of(split.run)) == (False,) * 8
        assert all(window.weights == 0 for window in window_seconds(split.run))
    assert answer.explain("pp8-zb_h1-mbs1").seconds < 0.95 * answer.explain("pp8-1f1b-mbs1").seconds
    elsewhere = plan("gpt-7.5b", Cluster.of("a100-80gb", 8), global_batch=32, seq=2048, software="megatron")
    assert all(window.weights for window in window_seconds(elsewhere.explain("pp8-zb_h1-mbs1-full").run))


def test_windows_that_are_not_split_are_free_after_their_first_half() -> None:
    none = in_flight("zb_h1", 4, 16, 1, halved=(False,) * 4)
    assert none == in_flight("1f1b", 4, 16, 1)
    last = in_flight("zb_h1", 4, 16, 1, halved=(True, True, True, False))
    whole = in_flight("zb_h1", 4, 16, 1)
    assert last == (*whole[:3], none[3]) != whole
