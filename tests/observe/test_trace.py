from __future__ import annotations

import json
import time
from typing import NamedTuple

import pytest

from lightning_3d.errors import ConfigurationError
from lightning_3d.observe import RankTrace, TraceRecorder, load_traces, save_trace
from lightning_3d.observe.device import DeviceClock
from lightning_3d.observe.pieces import Piece, WindowPieces


class Action(NamedTuple):
    kind: str
    microbatch: int
    stage: int


def test_records_actions_of_a_step_in_order() -> None:
    recorder = TraceRecorder(rank=5, stage=1, dp=1, tp=1, layout="tp2-pp2-dp2")
    recorder.begin_step(7)
    with recorder.span("F", 0):
        time.sleep(0.01)
    with recorder.span("B", 0, stage=3):
        pass
    recorder.record("reduce", -1, 1, 2.0, 3.5)
    recorder.end_step()
    step = recorder.trace().step(7)
    assert step is not None
    assert [(s.kind, s.microbatch, s.stage) for s in step.spans] == [("F", 0, 1), ("B", 0, 3), ("reduce", -1, 1)]
    forward, backward, reduce = step.spans
    assert 0.01 <= forward.seconds < 1
    assert backward.start >= forward.end
    assert reduce.seconds == 1.5
    assert abs(forward.start - time.time()) < 60, "times are wall-clock times, so that machines can be merged"


def test_the_runner_calls_it_with_monotonic_times() -> None:
    recorder = TraceRecorder()
    recorder.begin_step(0)
    start = time.monotonic()
    recorder(Action("B", 3, 1), start, start + 0.5)
    recorder.end_step()
    (span,) = recorder.trace().steps[0].spans
    assert (span.kind, span.microbatch, span.stage) == ("B", 3, 1)
    assert span.seconds == pytest.approx(0.5)
    assert abs(span.start - time.time()) < 5


def test_an_action_that_raises_is_recorded_and_a_failed_step_is_dropped() -> None:
    recorder = TraceRecorder()
    recorder.begin_step(0)
    with pytest.raises(RuntimeError), recorder.span("F", 0):
        raise RuntimeError
    recorder.begin_step(1)
    recorder.end_step()
    assert [s.step for s in recorder.trace().steps] == [1]


def test_nothing_is_kept_outside_of_a_step_and_only_the_last_steps_inside() -> None:
    recorder = TraceRecorder(capacity=2)
    recorder.record("F", 0, 0, 0.0, 1.0)
    for step in range(5):
        recorder.begin_step(step)
        recorder.record("F", 0, 0, step, step + 1.0)
        recorder.end_step()
    assert [(s.step, len(s.spans)) for s in recorder.trace().steps] == [(3, 1), (4, 1)]


def test_loops_are_told_apart() -> None:
    recorder = TraceRecorder()
    for loop in ("validate", "train"):
        recorder.begin_step(0, loop)
        recorder.record("F", 0, 0, 0.0, 1.0 if loop == "train" else 2.0)
        recorder.end_step()
    step = recorder.trace().step(0)
    assert step is not None
    assert step.spans[0].seconds == 1.0


def test_files_of_all_ranks_round_trip_in_order_of_rank(tmp_path) -> None:
    for rank in (10, 9):
        recorder = TraceRecorder(rank, rank % 2, dp=1, tp=1, layout="tp2")
        recorder.begin_step(2)
        recorder.record("F", 0, 0, 1.25, 1.5)
        recorder.end_step()
        save_trace(recorder, tmp_path / "run")
    read = load_traces(tmp_path / "run")
    assert [t.rank for t in read] == [9, 10]
    assert read[1] == RankTrace(10, 0, 1, 1, "tp2", read[1].steps)
    assert read[1].steps[0].spans[0].seconds == 0.25


def test_missing_and_foreign_files_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="PipelineTimeline"):
        load_traces(tmp_path)
    (tmp_path / "trace_rank00000.json").write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ConfigurationError, match="version 1: found format None"):
        load_traces(tmp_path)


def test_a_recorder_keeps_at_least_one_step() -> None:
    with pytest.raises(ConfigurationError, match="capacity is 0"):
        TraceRecorder(capacity=0)


class Clock:
    """Events of a device that is half a second behind the host; `now` is the device's time."""

    now = 0.0

    class Event:
        def record(self) -> None:
            self.at = Clock.now

        def synchronize(self) -> None:
            return None

        def elapsed_time(self, later: Clock.Event) -> float:
            return 1000 * (later.at - self.at)


def test_times_on_an_accelerator_are_those_of_its_events() -> None:
    recorder = TraceRecorder(clock=DeviceClock(Clock.Event))
    for step in (0, 1):
        recorder.begin_step(step)
        Clock.now += 0.5
        start = recorder.mark()
        Clock.now += 2.0  # the device computes; the host has long gone on
        recorder(Action("F", 0, 0), start, recorder.mark())
        with recorder.span("B", 0):
            Clock.now += 3.0
        recorder.end_step()
    first, second = recorder.trace().steps
    assert [(s.kind, s.seconds) for s in first.spans] == [("F", pytest.approx(2.0)), ("B", pytest.approx(3.0))]
    assert second.spans[0].seconds == pytest.approx(2.0)
    assert abs(first.spans[0].start - time.time()) < 5
    assert recorder.last() == second


def test_only_wanted_steps_are_kept_and_cost_no_events() -> None:
    made: list[int] = []

    def make() -> Clock.Event:
        made.append(1)
        return Clock.Event()

    recorder = TraceRecorder(clock=DeviceClock(make), wanted=lambda step: step == 2)
    for step in range(4):
        recorder.begin_step(step)
        before = len(made)
        recorder(Action("F", 0, 0), recorder.mark(), recorder.mark())
        assert (len(made) > before) == (step == 2) == recorder.is_recording
        recorder.end_step()
    assert [(s.step, len(s.spans)) for s in recorder.trace().steps] == [(2, 1)]


def test_windows_travel_with_the_trace(tmp_path) -> None:
    recorder = TraceRecorder()
    recorder.windows = (WindowPieces(0, (Piece("layers.0", 3.0, False), Piece("layers.1", 2.0, True))),)
    save_trace(recorder, tmp_path)
    assert load_traces(tmp_path)[0].windows == recorder.windows
