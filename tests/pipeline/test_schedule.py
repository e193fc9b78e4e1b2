"""Every schedule is complete, ordered, free of deadlock, and holds as many microbatches as theory says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline.check import Report, check
from lightning_3d.pipeline.schedule import (
    NAMES,
    SCHEDULES,
    Action,
    canonical_name,
    chain_lists,
    forward_only,
    placement,
    schedule_lists,
    splits_backward,
)

Case = tuple[str, int, str]
Lists = Sequence[Sequence[Action]]

CASES: list[Case] = [
    ("gpipe", 1, "looped"),
    ("1f1b", 1, "looped"),
    ("zb_h1", 1, "looped"),
    ("zb_v", 2, "looped"),
    *(("interleaved_1f1b", v, order) for v, order in product((1, 2, 3, 4), ("looped", "contiguous"))),
]
DENSE = set(product(range(1, 9), range(1, 25)))
BORDER = {(p, m) for p in range(9, 17) for m in (1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p + 2)}
BORDER |= {(p, m) for p in (1, 2, 3, 7, 16) for m in (63, 64)}
EVERYTHING = set(product(range(1, 17), range(1, 65)))
CHAINS = [
    *([0], [0, 1], [0, 1, 2, 3], [0, 2], [2, 0], [3, 1, 2, 0]),
    *([0, 1, 0, 1], [0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2, 0], [1, 0, 1], [0, 1, 0]),
    *([0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 2, 3, 3, 2, 1, 0], [0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 2, 2], [0, 0, 0]),
]


def prove(case: Case, p: int, m: int) -> Report:
    """What every schedule must be, and its peak of live windows."""
    name, v, order = case
    lists = schedule_lists(name, p, m, v, order)
    report = check(lists, p * v, m)
    assert report.owners == placement(name, p, v, order)
    assert len(report.order) == (3 if splits_backward(name) else 2) * p * v * m
    assert_peaks(case, p, m, report.peak_live)
    return report


def assert_peaks(case: Case, p: int, m: int, peaks: tuple[int, ...]) -> None:
    name, v, order = case
    exact = v == 1 or order == "contiguous" or m % p == 0  # else the last group of microbatches is not full
    for s, peak in enumerate(peaks):
        if name == "gpipe":
            assert peak == m, (case, p, m)
        elif name == "zb_h1":
            assert peak == min(p, m), (case, p, m)
        elif name == "zb_v":
            assert peak <= min(2 * p, 2 * m), (case, p, m)
        elif v == 1 or order == "contiguous":
            assert peak == v * min(p - s, m), (case, p, m)
        else:
            megatron = min(2 * (p - s - 1) + (v - 1) * p + 1, v * m)
            assert peak == megatron if exact else peak <= megatron, (case, p, m)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-v{c[1]}-{c[2]}")
def test_many_sizes(case: Case) -> None:
    for p, m in sorted(DENSE | BORDER):
        prove(case, p, m)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-v{c[1]}-{c[2]}")
def test_all_sizes_up_to_16_stages_and_64_microbatches(case: Case) -> None:
    for p, m in sorted(EVERYTHING - DENSE - BORDER):
        prove(case, p, m)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(CASES), st.integers(1, 64), st.integers(1, 256))
def test_large_sizes(case: Case, p: int, m: int) -> None:
    prove(case, p, m)


def test_microbatches_pass_every_window_in_order() -> None:
    """So that gradients are added in the same order on every stage (and bit-equal for shared parameters)."""
    for (name, v, order), p, m in product(CASES, range(1, 7), (1, 2, 5, 6, 12, 13)):
        assert_in_order(schedule_lists(name, p, m, v, order), m)
    for owners, split, m in product(CHAINS, (False, True), (1, 2, 9)):
        assert_in_order(chain_lists(owners, max(owners) + 1, m, split), m)


def assert_in_order(lists: Lists, m: int) -> None:
    for actions in lists:
        found: dict[tuple[str, int], list[int]] = {}
        for kind, i, w in actions:
            found.setdefault((kind, w), []).append(i)
        assert all(order == list(range(m)) for order in found.values())


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("owners", CHAINS, ids=str)
def test_chains_for_training(owners: list[int], split: bool) -> None:
    ranks = max(owners) + 2  # the last one owns nothing
    limits = []
    for m in range(1, 41):
        lists = chain_lists(owners, ranks, m, split)
        report = check(lists, len(owners), m)
        assert report.owners == tuple(owners)
        assert {a.kind for actions in lists for a in actions} == ({"F", "I", "W"} if split else {"F", "B"})
        assert not lists[-1]
        limits.append(report.peak_live)
    assert max(map(max, limits[24:])) <= 3 * len(owners), "memory grows with the number of microbatches"
    assert max(map(max, limits[24:])) == max(map(max, limits[:30]))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(1, 30), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_chain(owners: list[int], m: int, split: bool) -> None:
    report = check(chain_lists(owners, 6, m, split), len(owners), m)
    assert report.owners == tuple(owners)


def test_a_chain_that_a_schedule_has_gets_its_lists() -> None:
    for p, m in product(range(1, 6), range(1, 12)):
        for name, v in (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)):
            assert chain_lists(placement(name, p, v), p, m) == schedule_lists(name, p, m, v)
        assert chain_lists(placement("zb_v", p, 2), p, m, True) == schedule_lists("zb_v", p, m, 2)
        if p > 1:
            turned = [p - 1 - owner for owner in placement("zb_v", p, 2)]
            assert chain_lists(turned, p, m, True) == tuple(reversed(schedule_lists("zb_v", p, m, 2)))
            assert chain_lists(range(p), p, m, True) == schedule_lists("zb_h1", p, m)


@pytest.mark.parametrize("owners", [[0], [0, 1], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 0, 1, 2, 0], [0, 2], [1, 0, 1]])
def test_evaluation_chains(owners: list[int]) -> None:
    ranks = max(owners) + 1
    for m in range(1, 17):
        report = check([forward_only(owners, m, r) for r in range(ranks)], len(owners), m, backward=False)
        assert len(report.order) == m * len(owners)
        assert report.owners == tuple(owners)


def test_lists_are_remembered() -> None:
    assert schedule_lists("zb_v", 4, 8, 2) is schedule_lists("zb_v", 4, 8, 2)
    assert chain_lists([0, 1, 1], 2, 8) is chain_lists((0, 1, 1), 2, 8)


# -- what is refused


def test_wrong_schedules_are_refused() -> None:
    good = [SCHEDULES["1f1b"](2, 3, rank) for rank in range(2)]
    with pytest.raises(ConfigurationError, match="B2 of stage 0 never runs in the list of rank 0"):
        check([good[0][:-1], good[1]], 2, 3)
    with pytest.raises(ConfigurationError, match="B2 of stage 0 runs twice"):
        check([good[0] + good[0][-1:], good[1]], 2, 3)
    with pytest.raises(ConfigurationError, match=r"F9 of stage 0 does not belong.*microbatches 0 to 2"):
        check([[*good[0], Action("F", 9, 0)], good[1]], 2, 3)
    with pytest.raises(ConfigurationError, match="F0 of stage 5 does not belong"):
        check([[*good[0], Action("F", 0, 5)], good[1]], 2, 3)
    with pytest.raises(ConfigurationError, match="window 0 on ranks 0 and 1: B2 of stage 0 is in the list of rank 1"):
        check([good[0][:-1], [*good[1], good[0][-1]]], 2, 3)
    with pytest.raises(ConfigurationError, match="window 1 on ranks 0 and 1: B2 of stage 1 is in the list of rank 0"):
        check([[*good[0], good[1][-1]], good[1][:-1]], 2, 3)
    with pytest.raises(ConfigurationError, match="never runs: no rank runs window 1"):
        check([good[0], []], 2, 3)
    backward_first = [a for a in good[0] if a.kind == "B"] + [a for a in good[0] if a.kind == "F"]
    with pytest.raises(ConfigurationError, match="B0 of stage 0, which needs F0 of stage 0; that runs only later"):
        check([backward_first, good[1]], 2, 3)
    with pytest.raises(ConfigurationError, match="F0 of stage 0; that runs never"):
        check([good[0][1:], good[1]], 2, 3)
    swapped = [
        good[0],
        [good[1][2], good[1][3], good[1][0], good[1][1], *good[1][4:]],
    ]  # F1 B1 F0 B0 against F0 F1 B0 B1
    with pytest.raises(ConfigurationError, match=r"deadlocks: rank 0 waits at B0 of stage 0 .*rank 1 waits at F") as e:
        check([[good[0][0], good[0][2], good[0][1], *good[0][3:]], swapped[1]], 2, 3)
    assert "for its backward in window 1" in str(e.value)
    with pytest.raises(ConfigurationError, match=r"does not belong.*evaluation"):
        check(good, 2, 3, backward=False)


def test_wrong_halves_are_refused() -> None:
    def of(*words: str) -> list[list[Action]]:
        return [[Action(word[0], int(word[1]), 0) for word in words]]  # type: ignore[arg-type]

    assert check(of("F0", "F1", "I0", "W0", "B1"), 1, 2).peak_live == (2,)
    assert check(of("F0", "I0", "F1", "W0", "B1"), 1, 2).peak_live == (2,), "a window is live until W"
    for words, text in (
        (["F0", "W0", "I0"], "runs W0 of stage 0, which needs I0 of stage 0; that runs only later"),
        (["F0", "W0"], "W0 of stage 0, which needs I0 of stage 0; that runs never"),
        (["F0", "I0"], "W0 of stage 0 never runs"),
        (["F0", "B0", "W0"], "W0 of stage 0 is beside another backward"),
        (["F0", "I0", "W0", "B0"], "B0 of stage 0 is beside another backward"),
        (["F0", "I0", "I0", "W0"], "I0 of stage 0 runs twice"),
        (["I0", "F0", "W0"], "I0 of stage 0, which needs F0 of stage 0; that runs only later"),
        (["F0"], "B0 of stage 0 never runs"),
        (["F0", "B0", "wait"], "waita of stage 0 does not belong"),
    ):
        actions = of(*words) if words[-1] != "wait" else [[*of(*words[:-1])[0], Action("wait", 0, 0)]]
        with pytest.raises(ConfigurationError, match=text.replace("waita", "wait0")):
            check(actions, 1, 1)


def runs(lists: Lists, windows: int, m: int) -> bool:
    """Whether lists are a schedule, said in another way than `check` does: by trying, with sets of names."""
    for w in range(windows):
        if sum(any(a.stage == w for a in actions) for actions in lists) != 1:
            return False
    flat = sorted(tuple(a) for actions in lists for a in actions)
    for i, w in product(range(m), range(windows)):
        mine = "".join(sorted(kind for kind, j, x in flat if (j, x) == (i, w)))
        if mine not in ("BF", "FIW"):
            return False
    if any(not (0 <= i < m and 0 <= w < windows) for _, i, w in flat):
        return False
    queues, gone = [list(actions) for actions in lists], set[tuple[str, int, int]]()
    while any(queues):
        able = next((q for q in queues if q and set(needs(q[0], windows)) & gone == set(needs(q[0], windows))), None)
        able = able if able is not None else next((q for q in queues if q and any_need(q[0], windows, gone)), None)
        if able is None:
            return False
        gone.add(tuple(able.pop(0)))
    return True


def needs(action: Action, windows: int) -> Iterator[tuple[str, int, int]]:
    kind, i, w = action
    if kind == "F" and w:
        yield "F", i, w - 1
    if kind in "BI":
        yield "F", i, w
        if w < windows - 1:
            yield "B", i, w + 1
    if kind == "W":
        yield "I", i, w


def any_need(action: Action, windows: int, gone: set[tuple[str, int, int]]) -> bool:
    """The same, where the window behind runs `I` instead of `B`."""
    other = {("I", *need[1:]) if need[0] == "B" else need for need in needs(action, windows)}
    return other <= gone


@st.composite
def broken(draw: st.DrawFn) -> tuple[list[list[Action]], int, int]:
    """A schedule with one or two mistakes (some of which are none)."""
    name, v, order = draw(st.sampled_from(CASES))
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    lists = [list(actions) for actions in schedule_lists(name, p, m, v, order)]
    for _ in range(draw(st.integers(1, 2))):
        full = [r for r in range(p) if len(lists[r]) > 1]
        if not full:
            break
        rank = draw(st.sampled_from(full))
        actions = lists[rank]
        at, to = draw(st.integers(0, len(actions) - 1)), draw(st.integers(0, len(actions) - 1))
        action = actions[at]
        change = draw(st.sampled_from(["drop", "double", "swap", "move", "kind", "number", "split"]))
        if change == "drop":
            del actions[at]
        elif change == "double":
            actions.insert(to, action)
        elif change == "swap":
            actions[at], actions[to] = actions[to], action
        elif change == "move":
            del actions[at]
            other = lists[draw(st.integers(0, p - 1))]
            other.insert(draw(st.integers(0, len(other))), action)
        elif change == "kind":
            actions[at] = action._replace(kind=draw(st.sampled_from(["F", "B", "I", "W"])))
        elif change == "number":
            actions[at] = action._replace(microbatch=draw(st.integers(-1, m)), stage=draw(st.integers(-1, p * v)))
        elif action.kind == "B":  # a good change, if W comes late enough
            actions[at] = action._replace(kind="I")
            actions.insert(to, action._replace(kind="W"))
    return lists, p * v, m


@settings(max_examples=400, deadline=None)
@given(broken())
def test_check_agrees_with_trying(case: tuple[list[list[Action]], int, int]) -> None:
    lists, windows, m = case
    if runs(lists, windows, m):
        assert sorted(check(lists, windows, m).order) == sorted(a for actions in lists for a in actions)
    else:
        with pytest.raises(ConfigurationError, match=r"[FBIW]-?\d+ of stage -?\d+"):
            check(lists, windows, m)


def test_names_and_placements() -> None:
    assert canonical_name("zero_bubble") == "zb_h1"
    assert schedule_lists("zero_bubble", 3, 5) == schedule_lists("zb_h1", 3, 5)
    assert placement("zb_v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert placement("interleaved_1f1b", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert placement("interleaved_1f1b", 2, 3, "contiguous") == (0, 0, 0, 1, 1, 1)
    for name in NAMES:
        assert placement(name, 4, 2 if name == "zb_v" else 1)[:4] == (0, 1, 2, 3)


def test_what_does_not_fit_is_refused() -> None:
    for arguments, text in (
        (("gpip", 2, 2), "'gpip'.*Did you mean 'gpipe'"),
        (("1f1b", 2, 2, 2), r"'1f1b' has one window per rank, but virtual is 2.*interleaved_1f1b"),
        (("zb_v", 2, 2, 1), r"'zb_v' places two windows per rank along a V, but virtual is 1.*zb_h1"),
        (("interleaved_1f1b", 2, 2, 2, "loop"), "order of windows is 'loop'; known are looped, contiguous"),
        (("gpipe", 0, 2), "at least 1, not 0 and 1"),
        (("gpipe", 2, 0), "at least one microbatch, not 0"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            schedule_lists(*arguments)  # type: ignore[arg-type]
    for owners in ([], [0, 2], [-1, 0]):
        with pytest.raises(ConfigurationError, match="at least one window, all on ranks 0 to 1"):
            chain_lists(owners, 2, 2)
