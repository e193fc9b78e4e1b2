"""HOW full was the pipeline?  The measured bubble beside the formula of the schedule, and what the order could give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from lightning_3d.errors import ConfigurationError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.observe.timeline import Lane, Timeline
from lightning_3d.observe.trace import Span
from lightning_3d.pipeline.action import Action, Kind
from lightning_3d.pipeline.check import ScheduleError
from lightning_3d.pipeline.schedule import forward_only, placement, schedule_lists, windows_per_rank
from lightning_3d.pipeline.timing import formula_bubble, parts, simulate

_WORDS = {"interleaved_1f1b": "(p-1)/(vm+p-1)", "zb_h1": "(p-1)(F+I-W)/(m(F+I+W)+(p-1)(F+I-W))"}
"""The formulas that are not GPipe's."""


@dataclass(frozen=True)
class Bubble:
    """How much of a step the stages stood idle.

    Attributes:
        per_stage: Idle share of each stage, mean over its ranks.
        mean: Mean over the stages.
        formula: What the schedule leaves idle when all windows take equally long and messages are free; None: not
            known (a schedule of the user's own, or a step that walks through other windows than the schedule's).
        says: The formula in words.
        stages: p.
        microbatches: m.
        virtual: v, windows per stage.
    """

    per_stage: tuple[float, ...]
    mean: float
    formula: float | None
    says: str
    stages: int
    microbatches: int
    virtual: int = 1

    @property
    def beside(self) -> str:
        """The formula with its numbers."""
        if self.formula is None:
            return self.says
        sizes = f"p={self.stages}, m={self.microbatches}" + (f", v={self.virtual}" if self.virtual > 1 else "")
        return f"{self.says} = {self.formula:.3f} for {sizes}"

    def __str__(self) -> str:
        stages = ", ".join(f"stage {i} {share:.2f}" for i, share in enumerate(self.per_stage))
        return f"bubble measured {self.mean:.3f} ({stages}); {self.beside}"


def bubble(timeline: Timeline) -> Bubble:
    """The idle share of every stage between the first start and the last end of the step."""
    shares: dict[int, list[float]] = {}
    for lane in timeline.lanes:
        shares.setdefault(lane.stage, []).append(1 - covered(lane.work) / timeline.seconds)
    per_stage = tuple(sum(shares[stage]) / len(shares[stage]) for stage in sorted(shares))
    formula, says = _formula(timeline)
    p, virtual = timeline.stages, max(len(lane.windows) for lane in timeline.lanes)
    return Bubble(per_stage, sum(per_stage) / p, formula, says, p, timeline.microbatches, virtual)


def covered(spans: Sequence[Span]) -> float:
    """Seconds covered by at least one of the spans (sorted by start)."""
    total, until = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def _formula(timeline: Timeline) -> tuple[float | None, str]:
    """The idle share the schedule promises, with each kind of action's mean length, and the formula that says it."""
    try:
        layout = Layout.parse(timeline.layout)
    except LayoutError:
        return _own_lists(timeline)
    name, p, m, order = layout.schedule, timeline.stages, timeline.microbatches, layout.order
    virtual = windows_per_rank(name, layout.virtual)
    if timeline.windows != p * virtual or layout.pp != p:
        return None, "no formula: the step walks through other windows than the schedule's"
    owners = placement(name, p, virtual, order)
    lists = schedule_lists(name, p, m, virtual, order)
    if timeline.kinds == ["F"]:
        lists = [forward_only(owners, m, rank) for rank in range(p)]
    lasts = mean_seconds(timeline)
    forward, inputs, weights = (lasts.get(kind, 0.0) for kind in ("F", "I", "W"))
    played = simulate(lists, owners, parts(forward, lasts.get("B", inputs), weights)).bubble
    # a formula holds for some sizes and lengths only
    if name != "zb_v" and abs(formula_bubble(name, p, m, virtual, (forward, inputs, weights)) - played) < 1e-9:
        return played, _WORDS.get(name, "(p-1)/(m+p-1)")
    return played, "the schedule, played through with equal windows,"


def _own_lists(timeline: Timeline) -> tuple[float | None, str]:
    """A schedule from a file has no formula; its recorded lists are played through."""
    try:
        played = ideal(timeline)
    except ConfigurationError:
        return None, "no formula is known for this schedule"
    idle = [1 - covered(lane.work) / played.seconds for lane in played.lanes]
    return sum(idle) / len(idle), "the schedule's own lists, played through with equal windows,"


def mean_seconds(timeline: Timeline) -> dict[str, float]:
    """Kind of action -> its mean length over all windows and microbatches."""
    work = [s for lane in timeline.lanes for s in lane.work]
    of_kind = {kind: [s.seconds for s in work if s.kind == kind] for kind in timeline.kinds}
    return {kind: sum(seconds) / len(seconds) for kind, seconds in of_kind.items()}


def ideal(timeline: Timeline) -> Timeline:
    """The same actions in the same order per rank, if windows were equally long and messages free.

    Every kind of action takes its mean measured time; an action starts when its rank is free and what it needs is
    there: a forward needs the forward in the window before, a backward that in the window behind.
    """
    lasts = mean_seconds(timeline)
    lanes = []
    for key in sorted({(lane.dp, lane.tp) for lane in timeline.lanes}):
        group = [lane for lane in timeline.lanes if (lane.dp, lane.tp) == key]
        lanes += _replay(group, timeline.windows, lasts)
    return replace(timeline, lanes=tuple(lanes), seconds=max(s.end for lane in lanes for s in lane.spans))


def _replay(lanes: Sequence[Lane], windows: int, lasts: Mapping[str, float]) -> list[Lane]:
    lists = [[Action(cast(Kind, s.kind), s.microbatch, s.stage) for s in lane.work] for lane in lanes]
    owners = [next((k for k, lane in enumerate(lanes) if w in lane.windows), -1) for w in range(windows)]
    try:
        timing = simulate(lists, owners, lambda kind, _: lasts[kind])
    except ScheduleError as error:
        raise ConfigurationError(f"the recorded actions are no whole step, the trace is incomplete: {error}") from error
    spans = [tuple(Span(*t.action, t.start, t.end) for t in timing.of_rank(k)) for k in range(len(lanes))]
    return [replace(lane, spans=mine) for lane, mine in zip(lanes, spans, strict=True)]
