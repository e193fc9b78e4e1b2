"""The played step: short cuts give what the whole step gives; memory is read off the lists."""

from __future__ import annotations

import random

import pytest

from lightning_3d.pipeline.check import check
from lightning_3d.pipeline.schedule import schedule_lists
from lightning_3d.planner.playing import Window, in_flight, play, timing

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
