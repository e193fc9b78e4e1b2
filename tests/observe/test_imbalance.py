from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_3d.observe import RankTrace, balance
from lightning_3d.observe.pieces import Piece, WindowPieces
from tests.observe.simulated import played


def pieces(*windows: tuple[int, list[tuple[str, float]]]) -> tuple[WindowPieces, ...]:
    out, first = [], True
    for stage, given in windows:
        made = []
        for name, cost in given:
            made.append(Piece(name, cost, not first))
            first = False
        out.append(WindowPieces(stage, tuple(made)))
    return tuple(out)


def run(found: tuple[WindowPieces, ...], name: str = "1f1b", virtual: int = 1) -> list[RankTrace]:
    """A run in which every piece takes as many seconds as it costs, a backward twice as many."""
    cost = [sum(piece.cost for piece in window.pieces) for window in found]
    lasts = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    traces = played(name, len(found) // virtual, 4, virtual, durations=lambda kind, w: lasts[kind] * cost[w])
    return [replace(trace, windows=found) for trace in traces]


def test_a_better_split_is_named_and_its_gain_predicted() -> None:
    found = balance(run(pieces((0, [("a", 1), ("b", 1), ("c", 1), ("d", 1)]), (1, [("e", 1), ("f", 1)]))))
    assert [s.seconds for s in found.stages] == pytest.approx([12, 6])
    assert found.stages[0].kinds == pytest.approx({"F": 4, "B": 8})
    assert found.slowest == 0
    assert found.over == pytest.approx(12 / 9 - 1)
    assert found.split == ("d",)
    text = str(found)
    assert "stage 0: forward 4e+03 ms, backward 8e+03 ms per microbatch" in text
    assert "slowest: stage 0, 1.2e+04 ms per microbatch, 33% over the mean of 9e+03 ms" in text
    assert "pipeline_split=['d']: slowest stage 9e+03 ms instead of 1.2e+04 ms" in text


def test_equal_stages_get_no_advice() -> None:
    found = balance(run(pieces((0, [("a", 1.0), ("b", 1.1)]), (1, [("c", 2.0)]))))
    assert found.advice == ""
    assert found.split is None


def test_a_stage_of_one_piece_cannot_be_made_smaller() -> None:
    found = balance(run(pieces((0, [("a", 1.0)]), (1, [("head", 3.0)]))))
    assert (found.slowest, found.split) == (1, None)
    assert "stage 1 cannot be made smaller: it runs nothing but head" in found.advice


def test_a_piece_nothing_may_begin_at_is_not_named() -> None:
    tied = pieces((0, [("a", 1.0), ("b", 1.0), ("c", 2.0)]), (1, [("d", 1.0)]))
    stuck = (tied[0]._replace(pieces=(*tied[0].pieces[:2], Piece("c", 2.0, False))), tied[1])
    assert balance(run(tied)).split == ("c",)
    assert balance(run(stuck)).split is None, "1 and 4 is no better than 4 and 1"
    assert "stage 0 (a to c) cannot be made smaller: no other split" in balance(run(stuck)).advice


def test_interleaved_windows_are_compared_by_stage() -> None:
    unequal = pieces((0, [("a", 1), ("b", 3)]), (1, [("c", 1)]), (0, [("d", 3)]), (1, [("e", 1)]))
    found = balance(run(unequal, "interleaved_1f1b", 2))
    assert [s.seconds for s in found.stages] == pytest.approx([21, 6])
    assert found.split in [("b", "d", "e"), ("b", "c", "e")], "a+d and b+c+e, or a+c+d and b+e"
    assert "slowest stage 1.5e+04 ms" in found.advice
    halves = balance(run(pieces((0, [("a", 1)]), (1, [("b", 3)]), (1, [("c", 1)]), (0, [("d", 1)])), "zb_v", 2))
    assert set(halves.stages[0].kinds) == {"F", "I", "W"}


def test_without_names_there_is_a_reason_and_no_split() -> None:
    traces = [replace(trace, windows=()) for trace in run(pieces((0, [("a", 1.0)]), (1, [("b", 3.0)])))]
    assert "record it with PipelineTimeline" in balance(traces).advice
    again = [replace(trace, layout="pp1") for trace in run(pieces((0, [("a", 1.0)]), (1, [("b", 3.0)])))]
    assert "walks through the model several times" in balance(again).advice
