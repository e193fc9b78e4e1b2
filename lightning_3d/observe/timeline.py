"""HOW full was the pipeline?  Traces of all ranks -> one timeline, its bubble, and a drawing in characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_3d.errors import ConfigurationError
from lightning_3d.observe.tables import ranges_text
from lightning_3d.observe.trace import COMPUTE, RankTrace, Span

_FILL = {"F": "-", "B": "=", "I": "=", "W": "+", "reduce": "~", "optimizer": "~"}
_LETTER = {"reduce": "R", "optimizer": "O"}


@dataclass(frozen=True)
class Lane:
    """The actions of one rank in one step; times count from the start of the step."""

    rank: int
    stage: int
    dp: int
    tp: int
    spans: tuple[Span, ...]

    @property
    def work(self) -> list[Span]:
        """Forwards and backwards, in order of time."""
        return sorted((s for s in self.spans if s.kind in COMPUTE), key=lambda s: s.start)


@dataclass(frozen=True)
class Timeline:
    """One step of a run. The step lasts from the first start to the last end of a forward or backward of any lane."""

    step: int
    lanes: tuple[Lane, ...]
    seconds: float
    layout: str = ""

    @property
    def stages(self) -> int:
        """Pipeline ranks (p in the formula)."""
        return len({lane.stage for lane in self.lanes})

    @property
    def microbatches(self) -> int:
        """Microbatches of the step (m in the formula)."""
        return len({s.microbatch for lane in self.lanes for s in lane.work})

    def replica(self, dp: int = 0, tp: int = 0) -> Timeline:
        """Only the lanes of one pipeline: one rank per stage. Times and length stay those of the whole step."""
        lanes = tuple(lane for lane in self.lanes if (lane.dp, lane.tp) == (dp, tp))
        return Timeline(self.step, lanes, self.seconds, self.layout)


@dataclass(frozen=True)
class Bubble:
    """How much of a step the stages stood idle.

    Attributes:
        per_stage: Idle share of each stage, mean over its ranks.
        mean: Mean over the stages.
        formula: (p-1)/(m+p-1), what GPipe and 1F1B leave idle when all stages take equally long and messages are free.
        stages: p.
        microbatches: m.
    """

    per_stage: tuple[float, ...]
    mean: float
    formula: float
    stages: int
    microbatches: int

    def __str__(self) -> str:
        stages = ", ".join(f"stage {i} {share:.2f}" for i, share in enumerate(self.per_stage))
        return (
            f"bubble measured {self.mean:.3f} ({stages}); "
            f"(p-1)/(m+p-1) = {self.formula:.3f} for p={self.stages}, m={self.microbatches}"
        )


def recorded_steps(traces: Iterable[RankTrace], loop: str = "train") -> list[int]:
    """Numbers of the steps that every rank has recorded."""
    per_rank = [{s.step for s in trace.steps if s.loop == loop} for trace in traces]
    return sorted(set.intersection(*per_rank)) if per_rank else []


def timeline_of(traces: Sequence[RankTrace], step: int | None = None, loop: str = "train") -> Timeline:
    """Merge the traces of all ranks into the timeline of one step (default: the recorded step of median length).

    Raises:
        ConfigurationError: No rank, or not every rank, recorded the step.
    """
    steps = recorded_steps(traces, loop)
    if not steps:
        raise ConfigurationError(f"no {loop!r} step was recorded by all of the {len(traces)} ranks.")
    if step is None:
        by_length = sorted((_merge(traces, s, loop) for s in steps), key=lambda t: t.seconds)
        return by_length[len(by_length) // 2]
    if step not in steps:
        raise ConfigurationError(f"step {step} was not recorded by every rank; recorded are {ranges_text(steps)}.")
    return _merge(traces, step, loop)


def _merge(traces: Sequence[RankTrace], step: int, loop: str) -> Timeline:
    recorded = [(trace, trace.step(step, loop)) for trace in traces]
    work = [s for _, found in recorded if found is not None for s in found.spans if s.kind in COMPUTE]
    if not work:
        raise ConfigurationError(f"step {step} holds no forward or backward.")
    start, end = min(s.start for s in work), max(s.end for s in work)
    lanes = [
        Lane(
            trace.rank,
            trace.stage,
            trace.dp,
            trace.tp,
            tuple(Span(s.kind, s.microbatch, s.stage, s.start - start, s.end - start) for s in found.spans),
        )
        for trace, found in recorded
        if found is not None
    ]
    lanes.sort(key=lambda lane: (lane.dp, lane.tp, lane.stage))
    return Timeline(step, tuple(lanes), end - start, traces[0].layout)


def bubble(timeline: Timeline) -> Bubble:
    """The idle share of every stage between the first start and the last end of the step."""
    p, m = timeline.stages, timeline.microbatches
    shares: dict[int, list[float]] = {}
    for lane in timeline.lanes:
        shares.setdefault(lane.stage, []).append(1 - _covered(lane.work) / timeline.seconds)
    per_stage = tuple(sum(shares[stage]) / len(shares[stage]) for stage in sorted(shares))
    return Bubble(per_stage, sum(per_stage) / p, (p - 1) / (m + p - 1), p, m)


def _covered(spans: Sequence[Span]) -> float:
    """Seconds covered by at least one of the spans (sorted by start)."""
    covered, until = 0.0, float("-inf")
    for span in spans:
        covered += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return covered


def ideal(timeline: Timeline) -> Timeline:
    """The same actions in the same order per rank, if stages were equally fast and messages free.

    Every kind of action takes its mean measured time; an action starts when its rank is free and what it needs is
    there: a forward needs the forward of the stage before, a backward that of the stage behind.
    """
    work = [s for lane in timeline.lanes for s in lane.work]
    kinds = {s.kind for s in work}
    lasts = {k: sum(s.seconds for s in work if s.kind == k) / sum(s.kind == k for s in work) for k in kinds}
    last_stage = max(s.stage for s in work)
    lanes = []
    for key in sorted({(lane.dp, lane.tp) for lane in timeline.lanes}):
        group = [lane for lane in timeline.lanes if (lane.dp, lane.tp) == key]
        lanes += _replay(group, lasts, last_stage)
    return Timeline(timeline.step, tuple(lanes), max(s.end for lane in lanes for s in lane.spans), timeline.layout)


def _replay(lanes: Sequence[Lane], lasts: dict[str, float], last_stage: int) -> list[Lane]:
    queues = {lane.rank: lane.work for lane in lanes}
    done: dict[tuple[str, int, int], float] = {}
    out: dict[int, list[Span]] = {lane.rank: [] for lane in lanes}
    while any(queues.values()):
        before = len(done)
        for rank, queue in queues.items():
            while queue and (ready := _ready(queue[0], done, last_stage)) is not None:
                span = queue.pop(0)
                start = max(ready, out[rank][-1].end if out[rank] else 0.0)
                out[rank].append(Span(span.kind, span.microbatch, span.stage, start, start + lasts[span.kind]))
                done[span.kind, span.microbatch, span.stage] = out[rank][-1].end
        if len(done) == before:
            raise ConfigurationError("the recorded actions wait for each other: the trace is incomplete.")
    return [Lane(lane.rank, lane.stage, lane.dp, lane.tp, tuple(out[lane.rank])) for lane in lanes]


def _ready(span: Span, done: dict[tuple[str, int, int], float], last_stage: int) -> float | None:
    """When the input of an action is there; None: not yet known."""
    if span.kind == "F":
        return 0.0 if span.stage == 0 else done.get(("F", span.microbatch, span.stage - 1))
    if span.kind == "W":
        return done.get(("I", span.microbatch, span.stage))
    if span.stage == last_stage:
        return done.get(("F", span.microbatch, span.stage))
    behind = (done.get((kind, span.microbatch, span.stage + 1)) for kind in ("B", "I"))
    return next((end for end in behind if end is not None), None)


def ascii_timeline(timeline: Timeline, width: int = 100) -> str:
    """Draw a step in characters, one line per rank; it fits `width` columns and needs no colour.

    `F3--` is the forward of microbatch 3, `B3==` its backward (`I`, `W`: the two halves), dots are idle time.
    """
    labels = [f"stage {lane.stage} rank {lane.rank}" for lane in timeline.lanes]
    pad = max(map(len, labels))
    columns = width - pad - 3
    if columns < 20:
        raise ConfigurationError(f"width is {width}; a timeline with labels of {pad} characters needs {pad + 23}.")
    rows = [_row(lane, timeline.seconds, columns) for lane in timeline.lanes]
    lines = [f"{label:<{pad}} |{row}|" for label, row in zip(labels, rows, strict=True)]
    scale = f"0 ms{f'{1000 * timeline.seconds:.0f} ms':>{columns - 4}}"
    legend = "F forward   B backward   digits: microbatch   . idle"
    return "\n".join([*lines, f"{'':<{pad}}  {scale}", f"{'':<{pad}}  {legend}"])


def _row(lane: Lane, seconds: float, columns: int) -> str:
    cells = ["."] * columns
    for span in lane.work:
        first = min(columns - 1, round(span.start / seconds * columns))
        last = min(columns, max(first + 1, round(span.end / seconds * columns)))
        text = f"{_LETTER.get(span.kind, span.kind)}{span.microbatch}"
        fill = _FILL[span.kind]
        cells[first:last] = text.ljust(last - first, fill)[: last - first]
    return "".join(cells)
