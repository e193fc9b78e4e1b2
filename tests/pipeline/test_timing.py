"""Schedules take as long as the papers say, and messages and unequal windows cost what they must."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline.check import check
from lightning_3d.pipeline.schedule import NAMES, Action, chain_lists, forward_only, placement, schedule_lists
from lightning_3d.pipeline.timing import Timing, formula_bubble, parts, simulate


def played(
    name: str,
    p: int,
    m: int,
    v: int = 1,
    order: str = "looped",
    split: tuple[float, ...] = (1, 1, 1),
    send: float = 0.0,
) -> Timing:
    return simulate(schedule_lists(name, p, m, v, order), placement(name, p, v, order), parts(*split), send)


def exact() -> Iterator[tuple[str, int, int, int]]:
    """Where a schedule reaches its formula."""
    for p, m in product(range(1, 13), range(1, 33)):
        yield "gpipe", p, m, 1
        yield "1f1b", p, m, 1
        if m >= p:
            yield "zb_h1", p, m, 1
        if m % p == 0:
            yield from (("interleaved_1f1b", p, m, v) for v in (1, 2, 3, 4))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
def test_the_formulas_are_reached_exactly(name: str) -> None:
    for _, p, m, v in (case for case in exact() if case[0] == name):
        timing = played(name, p, m, v)
        assert timing.bubble == pytest.approx(formula_bubble(name, p, m, v), abs=1e-12), (p, m, v)
        assert timing.length * (1 - timing.bubble) == pytest.approx(3 * v * m)


def test_unequal_parts() -> None:
    """The formulas of GPipe and 1F1B do not depend on the parts, ZB-H1's does, as long as W is the shortest."""
    for split, (p, m) in product(((1, 1.2, 0.8), (2, 3, 2), (1, 2, 1), (2, 2, 1)), ((2, 2), (4, 7), (8, 16))):
        for name in ("gpipe", "1f1b", "zb_h1"):
            assert played(name, p, m, split=split).bubble == pytest.approx(formula_bubble(name, p, m, split=split))


def test_zb_h1_has_the_length_of_the_paper() -> None:
    for p, m in product(range(1, 17), range(1, 65)):
        length = played("zb_h1", p, m).length
        assert length == 3 * m + p - 1 if m >= p else length <= 2 * (m + p - 1) + p, (p, m)


def test_zb_v_has_next_to_no_bubble() -> None:
    """No step is shorter than 6m + p - 1 parts: the last rank starts after p - 1 of them, and has 6m to do."""
    beyond = {}
    for p, m in product(range(1, 13), (1, 2, 3)):
        for microbatches in {2 * p, 2 * p + m, m * p + 2 * p}:
            beyond[p, microbatches] = played("zb_v", p, microbatches, 2).length - (6 * microbatches + p - 1)
    assert set(beyond.values()) == {0}


def test_zb_v_leaves_slack() -> None:
    """Results are not handed over at the last moment: parts that differ, and messages, cost little."""
    for p, m in ((4, 8), (4, 32), (8, 16), (8, 32)):
        even = played("zb_v", p, m, 2).bubble
        assert played("zb_v", p, m, 2, split=(1, 1.2, 0.8)).bubble < even + 0.015
        assert played("zb_v", p, m, 2, send=0.05).bubble < even + 0.020
    assert played("zb_v", 8, 8, 2).bubble < 0.13  # few microbatches


def test_zero_bubble_stays_good_if_parts_are_unequal() -> None:
    """A list that needs exact equality would be worse than 1F1B as soon as the parts differ a little."""
    for split, (p, m) in product(((1, 1.1, 0.9), (1, 1.2, 0.8), (2, 3, 2), (1, 1, 2)), ((4, 8), (4, 16), (8, 16))):
        assert played("zb_v", p, m, 2, split=split).bubble <= played("zb_h1", p, m, split=split).bubble + 1e-9
        assert played("zb_h1", p, m, split=split).bubble < played("1f1b", p, m, split=split).bubble


def test_interleaving_needs_loops() -> None:
    for p, m, v in product((2, 4), (8, 16), (2, 3)):
        assert played("interleaved_1f1b", p, m, v, "contiguous").bubble == pytest.approx(formula_bubble("1f1b", p, m))
        assert played("interleaved_1f1b", p, m, v).bubble < formula_bubble("1f1b", p, m)


def test_microbatches_that_do_not_fill_the_last_group() -> None:
    """They cost at most what the full group would."""
    for p, m, v in product((2, 3, 4, 8), range(1, 30), (2, 3)):
        full = -(-m // p) * p
        assert played("interleaved_1f1b", p, m, v).length <= 3 * (v * full + p - 1)


def test_a_chain_that_is_walked_twice_is_about_as_full_as_interleaving() -> None:
    owners = [0, 1, 0, 1]
    assert simulate(chain_lists(owners, 2, 16), owners, parts()).bubble == pytest.approx(
        formula_bubble("interleaved_1f1b", 2, 16, 2)
    )
    for owners, most in (
        ([0, 1, 1, 0], 0.04),
        ([0, 1, 2, 0], 0.37),
        ([0, 0, 1, 2], 0.36),
        ([0, 1, 2, 3, 3, 2, 1, 0], 0.23),
    ):
        ranks = max(owners) + 1
        assert simulate(chain_lists(owners, ranks, 16), owners, parts()).bubble < most, owners


def test_every_action_starts_when_its_rank_and_its_input_are_there() -> None:
    send = 0.25
    for name, v in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)):
        owners = placement(name, 3, v)
        lists = schedule_lists(name, 3, 5, v)
        timing = simulate(lists, owners, lambda kind, w: {"F": 1.0, "B": 2.0, "I": 1.25, "W": 0.5}[kind] + w, send)
        at = {timed.action: timed for timed in timing.actions}
        assert len(at) == sum(map(len, lists))
        for rank, actions in enumerate(lists):
            assert [timed.action for timed in timing.of_rank(rank)] == list(actions)
            before = 0.0
            for action in actions:
                _, _, start, end = at[action]
                inputs = [at[a] for a in needed(action, len(owners)) if a in at]
                ready = [t.end + (send if t.rank != rank else 0) for t in inputs]
                assert start == pytest.approx(max([before, *ready]))
                before = end
        assert timing.length == max(timed.end for timed in timing.actions)


def needed(action: Action, windows: int) -> list[Action]:
    kind, i, w = action
    if kind == "W":
        return [Action("I", i, w)]
    other = w - 1 if kind == "F" else w + 1
    needed = [Action(kind, i, other)] if 0 <= other < windows else []
    return needed if kind == "F" else [*needed, Action("F", i, w)]


def test_unequal_windows_and_messages_by_hand() -> None:
    lists = schedule_lists("1f1b", 2, 2)
    seconds = {("F", 0): 1.0, ("F", 1): 2.0, ("B", 0): 3.0, ("B", 1): 4.0}
    timing = simulate(lists, (0, 1), seconds, send=0.5)  # type: ignore[arg-type]
    assert [(str(t.action), t.start, t.end) for t in timing.of_rank(1)] == [
        ("F0 of stage 1", 1.5, 3.5),
        ("B0 of stage 1", 3.5, 7.5),
        ("F1 of stage 1", 7.5, 9.5),
        ("B1 of stage 1", 9.5, 13.5),
    ]
    assert timing.length == 17
    assert timing.bubbles == pytest.approx((1 - 8 / 17, 1 - 12 / 17))


def test_live_memory_over_time() -> None:
    for name, (p, m) in product(NAMES, ((1, 3), (3, 7), (4, 8))):
        v = 2 if name in ("interleaved_1f1b", "zb_v") else 1
        timing = played(name, p, m, v)
        assert timing.peak_live() == check(schedule_lists(name, p, m, v), p * v, m).peak_live
        assert all(timing.live(rank)[-1][1] == 0 for rank in range(p))
    timing = simulate(schedule_lists("gpipe", 2, 2), (0, 1), parts())
    assert timing.live(1, {0: 5.0, 1: 7.0}) == [(0.0, 0.0), (1.0, 7.0), (2.0, 14.0), (5.0, 7.0), (7.0, 0.0)]


def test_evaluation_is_timed_too() -> None:
    owners = [0, 1, 0, 1]
    timing = simulate([forward_only(owners, 8, rank) for rank in range(2)], owners, parts())
    assert timing.length == 17
    assert timing.bubble == pytest.approx(1 / 17)


def test_lists_that_are_no_schedule_are_refused() -> None:
    lists = schedule_lists("1f1b", 2, 2)
    with pytest.raises(ConfigurationError, match=r"on the ranks \(0, 1\), not on \(1, 0\)"):
        simulate(lists, (1, 0), parts())
    with pytest.raises(ConfigurationError, match="never runs"):
        simulate([lists[0], lists[1][:-1]], (0, 1), parts())
