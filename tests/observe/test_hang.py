from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.observe.activity import Activity, Note
from lightning_3d.observe.device import DeviceProgress
from lightning_3d.observe.hang import HangReport, follow_chain, report_text
from lightning_3d.pipeline.action import Action
from lightning_3d.pipeline.routes import Message, Parcel
from lightning_3d.testing import DistributedError, preload, run_distributed
from tests.observe import hangs

preload("tests.observe.hangs")


# -- real processes
def test_a_stage_that_sleeps_is_named_once_and_in_time() -> None:
    ranks = run_distributed(hangs.run, 3, 1.0, 3.5, timeout=60)
    ((seconds, text),) = [report for reports, _ in ranks for report in reports]
    assert 1.0 <= seconds <= 3.0
    assert "which is in forward of layers.5 (microbatch 2), for" in text
    assert "from stage 2 (rank 0), which" in text
    assert "stage 1 (rank 1) waits for the gradients of microbatch 2 from" in text
    assert "time.sleep(seconds)" in text.split("Stack of stage 2")[1]


def test_without_a_limit_there_is_no_thread_and_no_report() -> None:
    assert all(not reports for reports, _ in run_distributed(hangs.run, 3, None, 0.1, timeout=60))


def reported(function: Any, world: int, folder: Path) -> str:
    with pytest.raises(DistributedError, match="exit code 0 and no result"):
        run_distributed(function, world, str(folder), timeout=60)
    assert [p.name for p in folder.iterdir()] == ["report"], "one report, by one rank"
    return (folder / "report").read_text()


def test_a_collective_the_others_never_come_to_is_a_deadlock(tmp_path: Path) -> None:
    text = reported(hangs.foreign_collective, 3, tmp_path)
    assert "stage 2 (rank 0) waits in all_reduce called outside of lightning_3d for stage" in text
    assert "waits for the gradients of microbatch" in text
    assert "a deadlock" in text
    assert "dist.all_reduce(torch.zeros(1))" in text
    assert "channels.py" in text


def test_two_collectives_that_wait_for_each_other_are_a_deadlock(tmp_path: Path) -> None:
    text = reported(hangs.deadlock, 2, tmp_path)
    assert "replica 0 (rank 0) waits in all_reduce over dp for replica 1 (rank 1)" in text
    assert "replica 1 (rank 1) waits in all_reduce over world for replica 0 (rank 0)" in text
    assert "a deadlock" in text


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="hang_report_after is 0"):
        HangReport(None, None, 2, limit=0)  # type: ignore[arg-type]


# -- the report's words
def stage(rank: int, waits: str | None = None, *on: int, call: str | None = None) -> Note:
    return Note(rank, f"stage {rank}", f"in forward of layers.{rank}", waits, on, call, 61.0, f"stack {rank}")


def notes(*given: Note) -> dict[int, Note]:
    return {note.rank: note for note in given}


def test_the_chain_ends_with_the_rank_that_does_not_wait() -> None:
    found = notes(stage(0, "for A from", 1), stage(1, "for B from", 2), stage(2))
    assert follow_chain(found, 0) == ([0, 1], 2)
    lines = report_text(found, 0, 3).splitlines()
    assert lines[1] == "  stage 0 (rank 0) waits for A from stage 1 (rank 1)"
    assert lines[2] == (
        "  stage 1 (rank 1) waits for B from stage 2 (rank 2), which is in forward of layers.2, for 61 s now"
    )
    assert lines[4] == "stack 2"


def test_ranks_of_one_collective_do_not_wait_for_each_other() -> None:
    ring = [stage(r, "in all_reduce over dp for", *(s for s in range(4) if s != r), call="x") for r in range(3)]
    assert follow_chain(notes(*ring, stage(3)), 0) == ([0], 3)
    assert follow_chain(notes(*ring), 0) == ([0], 3), "one that does not answer is the one"
    assert "rank 3, which does not answer" in report_text(notes(*ring), 0, 4)
    together = stage(3, "in all_reduce over dp for", 0, 1, 2, call="x")
    assert follow_chain(notes(*ring, together), 0) == ([0], None)
    assert "the operation itself does not end" in report_text(notes(*ring, together), 0, 4)


def test_notes_travel_as_text() -> None:
    note = stage(3, "for A from", 1, 2, call="x")
    assert Note.from_text(note.to_text()) == note


# -- the device's side, with a fake of its events
class Event(NamedTuple):
    done: list[bool]

    def record(self) -> None:
        return None

    def query(self) -> bool:
        return self.done[0]


class Ledger:
    traffic: dict[Any, Any] = {}


class Place:
    """What `Activity` needs of a mesh."""

    rank, layout, ledger = 1, Layout(pp=2), Ledger()
    device = torch.device("cpu")

    def __init__(self) -> None:
        from lightning_3d.mesh import coordinate_of

        self.at = coordinate_of(self.layout, 1)


def test_a_device_that_waits_for_a_message_is_seen_though_the_host_runs_ahead() -> None:
    made: list[Event] = []

    def make() -> Event:
        made.append(Event([False]))
        return made[-1]

    activity = Activity(Place(), DeviceProgress(make))  # type: ignore[arg-type]
    activity.begins(Action("B", 3, 0))
    activity.waits(Parcel(Message("G", 3, 1, 0), 1, [], []))
    activity.waits(None)
    activity.begins(Action("F", 4, 0))
    activity.begins(None)
    made[0].done[0] = made[1].done[0] = True
    found: list[Note] = []

    def look() -> None:
        found.append(activity.note())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert (found[0].waits, found[0].on) == ("for the gradients of microbatch 3 from", (0,))
    before = activity.look()[0]
    made[2].done[0] = True
    progress, _, waits = activity.look()
    assert progress != before, "the device has moved"
    assert waits
    assert activity.note().waits == "for its own device to end the backward of microbatch 3"
    for event in made:
        event.done[0] = True
    assert activity.note().waits is None


def test_marks_nobody_looks_at_do_not_pile_up() -> None:
    progress = DeviceProgress(lambda: Event([False]))
    for n in range(5000):
        progress.mark(n)
    assert len(progress._ahead) == 4096
