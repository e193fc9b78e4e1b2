from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from lightning_3d.errors import ConfigurationError
from lightning_3d.observe import (
    RankTrace,
    Span,
    StepTrace,
    ascii_timeline,
    bubble,
    chrome_trace,
    draw_losses,
    draw_timeline,
    ideal,
    save_chrome_trace,
    timeline_of,
)
from lightning_3d.pipeline.schedule import forward_only, placement
from lightning_3d.pipeline.timing import formula_bubble, parts, simulate
from tests.observe.simulated import played, traces


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (4, 4), (3, 2)])
def test_equal_stages_give_the_bubble_of_the_formula(schedule: str, p: int, m: int) -> None:
    found = bubble(timeline_of(traces(p, m, schedule=schedule)))
    assert (found.stages, found.microbatches) == (p, m)
    assert found.formula == pytest.approx((p - 1) / (m + p - 1))
    assert found.mean == pytest.approx(found.formula, abs=1e-9)
    assert found.per_stage == pytest.approx([found.formula] * p)


ALL = [
    ("gpipe", 1, "looped"),
    ("1f1b", 1, "looped"),
    ("interleaved_1f1b", 2, "looped"),
    ("interleaved_1f1b", 3, "looped"),
    ("interleaved_1f1b", 2, "contiguous"),
    ("zb_h1", 1, "looped"),
    ("zb_v", 2, "looped"),
]


@pytest.mark.parametrize(("name", "virtual", "order"), ALL)
@pytest.mark.parametrize("split", [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5)])
def test_every_schedule_has_its_own_formula(name: str, virtual: int, order: str, split: tuple[float, ...]) -> None:
    timeline = timeline_of(played(name, 4, 8, virtual, order, parts(*split)))
    found = bubble(timeline)
    assert (found.stages, found.microbatches, found.virtual) == (4, 8, virtual)
    assert found.mean == pytest.approx(found.formula, abs=1e-9)
    if order == "looped":
        assert found.formula == pytest.approx(formula_bubble(name, 4, 8, virtual, split))  # type: ignore[arg-type]
    assert ideal(timeline).seconds == pytest.approx(timeline.seconds)


def test_the_formula_in_words() -> None:
    assert bubble(timeline_of(played("1f1b", 2, 4))).beside == "(p-1)/(m+p-1) = 0.200 for p=2, m=4"
    found = bubble(timeline_of(played("interleaved_1f1b", 2, 4, 2)))
    assert found.beside == "(p-1)/(vm+p-1) = 0.111 for p=2, m=4, v=2"
    assert "(F+I-W)" in bubble(timeline_of(played("zb_h1", 2, 4))).beside
    assert "played through" in bubble(timeline_of(played("zb_v", 2, 4, 2))).beside


@pytest.mark.parametrize(
    ("name", "p", "m", "virtual", "split"),
    [
        ("interleaved_1f1b", 4, 6, 2, (1.0, 1.0, 1.0)),
        ("zb_h1", 4, 2, 1, (1.0, 1.0, 1.0)),
        ("zb_h1", 4, 8, 1, (1.0, 1.0, 3.0)),
    ],
)
def test_a_formula_that_does_not_hold_is_not_shown(
    name: str, p: int, m: int, virtual: int, split: tuple[float, float, float]
) -> None:
    """Groups that are not full, fewer microbatches than stages, a long W: what the lists really leave idle."""
    found = bubble(timeline_of(played(name, p, m, virtual, durations=parts(*split))))
    assert found.formula == pytest.approx(found.mean, abs=1e-9)
    assert found.formula != pytest.approx(formula_bubble(name, p, m, virtual, split), abs=1e-3)
    assert "played through" in found.beside


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)])
def test_evaluation_has_its_own_order(name: str, virtual: int) -> None:
    owners = placement(name, 2, virtual)
    timing = simulate([forward_only(owners, 5, rank) for rank in range(2)], owners, parts())
    steps = [[Span(*t.action, t.start, t.end) for t in timing.of_rank(rank)] for rank in range(2)]
    run = [replace(t, steps=[StepTrace(0, spans=s)]) for t, s in zip(played(name, 2, 5, virtual), steps, strict=True)]
    assert bubble(timeline_of(run)).formula == pytest.approx(timing.bubble)


def test_a_step_that_is_not_the_schedules_has_no_formula() -> None:
    own = [replace(trace, layout="pp2-my_schedule.txt") for trace in played("1f1b", 2, 4)]
    assert bubble(timeline_of(own)).formula == pytest.approx(1 / 5)  # its lists are played through
    assert "the schedule's own lists" in str(bubble(timeline_of(own)))
    again = [replace(trace, layout="pp2-1f1b") for trace in played("interleaved_1f1b", 2, 4, 2)]
    assert "other windows than the schedule's" in str(bubble(timeline_of(again)))


def test_ascii_tells_the_windows_of_a_rank_apart() -> None:
    text = ascii_timeline(timeline_of(played("zb_v", 2, 3, 2)), width=100)
    assert {"F0", "f0", "I2", "i2", "W2", "w2"} <= set(re.findall(r"[FIWfiw]\d", text))
    assert "small: second window" in text
    assert "B backward" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_delay_makes_the_bubble_larger_and_ideal_removes_it() -> None:
    slow = traces(2, 4)
    late = [replace(s, start=s.start + 5, end=s.end + 5) for s in slow[0].steps[0].spans[-1:]]
    slow[0].steps[0].spans[-1:] = late
    timeline = timeline_of(slow)
    assert timeline.seconds == pytest.approx(20)
    assert bubble(timeline).per_stage == pytest.approx([8 / 20, 8 / 20])
    assert bubble(ideal(timeline)).mean == pytest.approx(1 / 5)
    assert ideal(timeline).seconds == pytest.approx(15)


def test_overlapping_actions_count_once_and_waiting_is_idle() -> None:
    spans = [Span("F", 0, 0, 0, 2), Span("F", 1, 0, 1, 3), Span("wait", 0, 0, 3, 9), Span("B", 0, 0, 9, 10)]
    found = bubble(timeline_of([RankTrace(0, 0, steps=[StepTrace(0, spans=spans)])]))
    assert found.mean == pytest.approx(0.6)


def test_stages_are_averaged_over_their_ranks() -> None:
    timeline = timeline_of(traces(2, 4, dp=2))
    assert [lane.rank for lane in timeline.lanes] == [0, 1, 2, 3]
    assert bubble(timeline).mean == pytest.approx(1 / 5)
    assert [lane.rank for lane in timeline.replica(dp=1).lanes] == [2, 3]


def test_the_step_of_median_length_is_the_default() -> None:
    trace = RankTrace(0, 0, steps=[StepTrace(n, spans=[Span("F", 0, 0, 0, t)]) for n, t in enumerate([9.0, 1.0, 2.0])])
    assert timeline_of([trace]).step == 2
    assert timeline_of([trace], step=0).seconds == 9.0


def test_a_step_that_was_not_recorded_by_every_rank_is_refused() -> None:
    two = traces(2, 4)
    with pytest.raises(ConfigurationError, match="step 9 was not recorded by every rank; recorded are 3"):
        timeline_of(two, step=9)
    two[1].steps = []
    with pytest.raises(ConfigurationError, match="no 'train' step was recorded by all of the 2 ranks"):
        timeline_of(two)


def test_split_backwards_replay_too() -> None:
    def stage(s: int, spans: list[Span]) -> RankTrace:
        return RankTrace(s, s, steps=[StepTrace(0, spans=spans)])

    first = [Span("F", 0, 0, 0, 1), Span("I", 0, 0, 5, 6), Span("W", 0, 0, 6, 7)]
    last = [Span("F", 0, 1, 1, 2), Span("I", 0, 1, 2, 3), Span("W", 0, 1, 3, 4)]
    assert ideal(timeline_of([stage(0, first), stage(1, last)])).seconds == pytest.approx(5)


def test_an_incomplete_trace_cannot_be_replayed() -> None:
    two = traces(2, 2)
    two[1].steps[0].spans.pop(0)
    with pytest.raises(ConfigurationError, match="incomplete"):
        ideal(timeline_of(two))


def test_ascii_shows_every_action_in_100_columns() -> None:
    text = ascii_timeline(timeline_of(traces(4, 8)), width=100)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert text.isascii()
    for stage in range(4):
        assert lines[stage].startswith(f"stage {stage} rank {stage} |")
        assert len(re.findall(r"[FB]\d", lines[stage])) == 16
    assert lines[0].split("|")[1].startswith("F0")
    assert lines[3].split("|")[1].startswith(".....")
    assert "backward" in lines[-1]


@pytest.mark.parametrize(("terminal", "widest"), [(80, 80), (300, 100), (10, 37)])
def test_ascii_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, terminal: int, widest: int) -> None:
    """A line that is wrapped is no picture; on a very narrow one something is drawn, too."""
    monkeypatch.setenv("COLUMNS", str(terminal))
    lines = ascii_timeline(timeline_of(traces(4, 8))).splitlines()
    assert max(map(len, lines)) == widest


def test_ascii_refuses_a_width_that_shows_nothing() -> None:
    with pytest.raises(ConfigurationError, match="width is 20"):
        ascii_timeline(timeline_of(traces(2, 2)), width=20)


def test_pictures_are_written(tmp_path) -> None:
    png = draw_timeline(timeline_of(traces(2, 4)), tmp_path / "deep" / "pipeline.png", note="simulated")
    svg = draw_timeline(timeline_of(traces(2, 4)), tmp_path / "pipeline.svg", with_ideal=False)
    loss = draw_losses({"a": [(0, 5.0), (1, 4.0)]}, tmp_path / "loss.png", points={"val": [(1, 4.5)]}, title="t")
    several = draw_timeline(timeline_of(played("zb_v", 2, 3, 2)), tmp_path / "several.svg")
    assert "<svg" in several.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    assert loss.stat().st_size > 1000


def test_chrome_trace_has_one_event_per_action(tmp_path) -> None:
    run = traces(2, 4, dp=2)
    document = json.loads(save_chrome_trace(run, tmp_path / "chrome.json").read_text())
    assert document == json.loads(json.dumps(chrome_trace(run)))
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 2 * 2 * 8
    assert min(e["ts"] for e in events) == 0
    assert {e["pid"] for e in events} == {0, 1}
    names = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert names == {f"stage {r % 2} tp 0 rank {r}" for r in range(4)}
