"""HOW full was the pipeline?  The measured bubble beside the formula of the schedule, and what the order could give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_3d.errors import ConfigurationError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.observe.timeline import Lane, Timeline
from lightning_3d.observe.trace import Span
from lightning_3d.pipeline.schedule import placement, schedule_lists
from lightning_3d.pipeline.timing import formula_bubble, parts, simulate

_PLAYED = "the schedule, played through with equal windows,"


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
    """The idle share the schedule promises, and the formula; of `I` and `W` the measured lengths are used."""
    try:
        layout = Layout.parse(timeline.layout)
    except LayoutError:
        return None, "no formula is known for this schedule"
    name, p, m = layout.schedule, timeline.stages, timeline.microbatches
    virtual = 2 if name == "zb_v" else layout.virtual
    if timeline.windows != p * virtual or layout.pp != p:
        return None, "no formula: the step walks through other windows than the schedule's"
    lasts = mean_seconds(timeline)
    split = (lasts.get("F", 0.0), lasts.get("I", 0.0), lasts.get("W", 0.0))
    if name == "zb_v" or layout.order != "looped":
        lists = schedule_lists(name, p, m, virtual, layout.order)
        durations = parts(split[0], split[1], split[2]) if name == "zb_v" else parts(lasts["F"], lasts.get("B", 0), 0)
        return simulate(lists, placement(name, p, virtual, layout.order), durations).bubble, _PLAYED
    if name == "zb_h1":
        formula = formula_bubble(name, p, m, split=split)
        return max(0.0, formula), "(p-1)(F+I-W)/(m(F+I+W)+(p-1)(F+I-W))"
    return formula_bubble(name, p, m, virtual), "(p-1)/(vm+p-1)" if virtual > 1 else "(p-1)/(m+p-1)"


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
        lanes += _replay(group, lasts, timeline.windows - 1)
    return replace(timeline, lanes=tuple(lanes), seconds=max(s.end for lane in lanes for s in lane.spans))


def _replay(lanes: Sequence[Lane], lasts: dict[str, float], last: int) -> list[Lane]:
    queues = {lane.rank: lane.work for lane in lanes}
    done: dict[tuple[str, int, int], float] = {}
    out: dict[int, list[Span]] = {lane.rank: [] for lane in lanes}
    while any(queues.values()):
        before = len(done)
        for rank, queue in queues.items():
            while queue and (ready := _ready(queue[0], done, last)) is not None:
                span = queue.pop(0)
                start = max(ready, out[rank][-1].end if out[rank] else 0.0)
                out[rank].append(Span(span.kind, span.microbatch, span.stage, start, start + lasts[span.kind]))
                done[span.kind, span.microbatch, span.stage] = out[rank][-1].end
        if len(done) == before:
            raise ConfigurationError("the recorded actions wait for each other: the trace is incomplete.")
    return [Lane(lane.rank, lane.stage, lane.dp, lane.tp, tuple(out[lane.rank])) for lane in lanes]


def _ready(span: Span, done: dict[tuple[str, int, int], float], last: int) -> float | None:
    """When the input of an action is there; None: not yet known."""
    if span.kind == "F":
        return 0.0 if span.stage == 0 else done.get(("F", span.microbatch, span.stage - 1))
    if span.kind == "W":
        return done.get(("I", span.microbatch, span.stage))
    if span.stage == last:
        return done.get(("F", span.microbatch, span.stage))
    behind = (done.get((kind, span.microbatch, span.stage + 1)) for kind in ("B", "I"))
    return next((end for end in behind if end is not None), None)
