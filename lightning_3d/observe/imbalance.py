"""WHICH stage is the slowest, and what should move?  Measured times per stage, and a better split by them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from lightning_3d.errors import LayoutError
from lightning_3d.layout import Layout
from lightning_3d.observe.pieces import WindowPieces
from lightning_3d.observe.trace import COMPUTE, RankTrace
from lightning_3d.pipeline.partition import smallest_maximum
from lightning_3d.pipeline.schedule import windows_per_rank

UNBALANCED = 0.15
"""The slowest stage is this much longer than the mean: worth a suggestion."""
_WORTH = 0.03
"""A split must be predicted to be this much faster; less is within what costs can predict."""
_TRIES = 50_000
"""Splits to try one by one."""
_NAMES = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}

WindowTimes = dict[tuple[int, str], float]
"""(window, kind) -> seconds of one microbatch."""


@dataclass(frozen=True)
class StageTime:
    """What one microbatch takes in a stage: seconds by kind of action, over all windows of the stage."""

    stage: int
    kinds: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.kinds.values())

    def __str__(self) -> str:
        kinds = ", ".join(f"{_NAMES[kind]} {_ms(self.kinds[kind])}" for kind in COMPUTE if kind in self.kinds)
        return f"stage {self.stage}: {kinds} per microbatch"


@dataclass(frozen=True)
class Balance:
    """How equal the stages are.

    Attributes:
        stages: Their times.
        slowest: Which is the slowest.
        over: How much longer than the mean it takes (0.2: 20 %).
        split: Names for `pipeline_split` that are predicted to be better, or None.
        advice: What to do; empty when the stages are equal enough.
    """

    stages: tuple[StageTime, ...]
    slowest: int
    over: float
    split: tuple[str, ...] | None = None
    advice: str = ""

    def __str__(self) -> str:
        lines = [str(stage) for stage in self.stages]
        if len(self.stages) > 1:
            slow = next(s for s in self.stages if s.stage == self.slowest)
            mean = fmean(s.seconds for s in self.stages)
            lines.append(
                f"slowest: stage {slow.stage}, {_ms(slow.seconds)} per microbatch, {self.over:.0%} over the mean "
                f"of {_ms(mean)}"
            )
        return "\n".join([*lines, *([self.advice] if self.advice else [])])


def balance(traces: Sequence[RankTrace], loop: str = "train") -> Balance:
    """Compare the stages over all recorded steps."""
    windows = window_times(traces, loop)
    owners = {s.stage: t.stage for t in traces for step in t.steps for s in step.spans if s.kind in COMPUTE}
    times: dict[int, dict[str, float]] = {}
    for (window, kind), seconds in windows.items():
        kinds = times.setdefault(owners[window], {})
        kinds[kind] = kinds.get(kind, 0.0) + seconds
    stages = tuple(StageTime(stage, times[stage]) for stage in sorted(times))
    slow = max(stages, key=lambda s: s.seconds)
    mean = fmean(s.seconds for s in stages)
    over = slow.seconds / mean - 1 if mean else 0.0
    if over <= UNBALANCED:
        return Balance(stages, slow.stage, over)
    pieces = traces[0].windows
    if not pieces or not _is_planned(traces[0].layout, pieces):
        return Balance(stages, slow.stage, over, advice=_advice_without_pieces(pieces))
    split, predicted = better_split(pieces, windows)
    if split is None or predicted > slow.seconds * (1 - _WORTH):
        return Balance(stages, slow.stage, over, advice=_no_better(slow, pieces))
    names = ", ".join(map(repr, split))
    advice = (
        f"by these times a better split is pipeline_split=[{names}]: slowest stage {_ms(predicted)} instead of "
        f"{_ms(slow.seconds)}"
    )
    return Balance(stages, slow.stage, over, split, advice)


def window_times(traces: Sequence[RankTrace], loop: str = "train") -> WindowTimes:
    """The mean over all microbatches, ranks and steps, without the shortest and the longest quarter.

    A first step is slow, and a process that lost its core makes one action many times as long.
    """
    found: dict[tuple[int, str], list[float]] = {}
    for trace in traces:
        for step in trace.steps:
            for span in step.spans if step.loop == loop else ():
                if span.kind in COMPUTE:
                    found.setdefault((span.stage, span.kind), []).append(span.seconds)
    return {key: _middle_mean(seconds) for key, seconds in sorted(found.items())}


def _middle_mean(values: list[float]) -> float:
    quarter = len(values) // 4
    return fmean(sorted(values)[quarter : len(values) - quarter])


def better_split(pieces: Sequence[WindowPieces], times: WindowTimes) -> tuple[tuple[str, ...] | None, float]:
    """The split with the smallest largest stage, if a window's time is shared by its pieces as their counted costs.

    Returns:
        Names of the first piece of every window but the first (None: no other split exists), and the predicted seconds
        of the slowest stage.
    """
    seconds: list[float] = []
    names: list[str] = []
    points = [0]
    for number, window in enumerate(pieces):
        total = sum(s for (w, _), s in times.items() if w == number)
        cost = sum(piece.cost for piece in window.pieces)
        for piece in window.pieces:
            if piece.may_begin:
                points.append(len(seconds))
            seconds.append(total * piece.cost / cost if cost else total / len(window.pieces))
            names.append(piece.name)
    points.append(len(seconds))
    if len(points) - 1 < len(pieces):
        return None, float("inf")
    sums = [0.0, *itertools.accumulate(seconds)]
    before = [sums[point] for point in points]
    owners = [window.stage for window in pieces]
    inner = range(1, len(points) - 1)
    several = len(set(owners)) < len(owners)
    if several and comb(len(inner), len(owners) - 1) <= _TRIES:  # a stage may have a long window beside a short one
        chosen = min(
            map(list, itertools.combinations(inner, len(owners) - 1)),
            key=lambda cuts: _largest(before, cuts, owners),
        )
    else:
        chosen = smallest_maximum(before, [0.0] * len(before), len(owners))
    return tuple(names[points[i]] for i in chosen), _largest(before, chosen, owners)[0]


def _largest(before: Sequence[float], cuts: Sequence[int], owners: Sequence[int]) -> tuple[float, float]:
    """(the longest stage, the longest window) of a split at these points."""
    by_stage = dict.fromkeys(owners, 0.0)
    windows = [before[b] - before[a] for a, b in itertools.pairwise([0, *cuts, len(before) - 1])]
    for stage, seconds in zip(owners, windows, strict=True):
        by_stage[stage] += seconds
    return max(by_stage.values()), max(windows)


def _is_planned(layout: str, pieces: Sequence[WindowPieces]) -> bool:
    """Whether the step's windows are those `pipeline_split` names, each with something in it."""
    try:
        known = Layout.parse(layout)
    except LayoutError:
        return True  # a schedule of the user's own
    return len(pieces) == known.pp * windows_per_rank(known.schedule, known.virtual) and all(
        window.pieces for window in pieces
    )


def _advice_without_pieces(pieces: Sequence[WindowPieces]) -> str:
    if pieces:
        return "no split is suggested: the step walks through the model several times, and each piece has one stage"
    return "no split is suggested: the trace does not say which modules are where (record it with PipelineTimeline)"


def _no_better(slow: StageTime, pieces: Sequence[WindowPieces]) -> str:
    mine = [[piece.name for piece in window.pieces] for window in pieces if window.stage == slow.stage]
    if all(len(names) == 1 for names in mine):
        return f"stage {slow.stage} cannot be made smaller: it runs nothing but {', '.join(names[0] for names in mine)}"
    windows = ", ".join(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in mine)
    return (
        f"stage {slow.stage} ({windows}) cannot be made smaller: no other split of the model's pieces is predicted to "
        "be faster. More microbatches, or fewer stages, leave less idle time"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
