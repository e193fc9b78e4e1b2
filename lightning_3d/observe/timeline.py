"""WHAT ran when, on all ranks?  Traces -> one timeline of a step, and a drawing in characters."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_3d.errors import ConfigurationError
from lightning_3d.observe.pieces import WindowPieces
from lightning_3d.observe.tables import ranges_text
from lightning_3d.observe.trace import COMPUTE, RankTrace, Span

_WIDTH, _NARROWEST = 100, 20

_FILL = {"F": "-", "B": "=", "I": "=", "W": "+"}
_SAYS = {"F": "F forward", "B": "B backward", "I": "I gradient of inputs", "W": "W gradient of weights"}


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

    @property
    def windows(self) -> list[int]:
        """The windows of the chain this rank runs."""
        return sorted({s.stage for s in self.spans if s.kind in COMPUTE})


@dataclass(frozen=True)
class Timeline:
    """One step of a run. The step lasts from the first start to the last end of a forward or backward of any lane."""

    step: int
    lanes: tuple[Lane, ...]
    seconds: float
    layout: str = ""
    pieces: tuple[WindowPieces, ...] = ()

    @property
    def stages(self) -> int:
        """Pipeline ranks (p in the formula)."""
        return len({lane.stage for lane in self.lanes})

    @property
    def microbatches(self) -> int:
        """Microbatches of the step (m in the formula)."""
        return len({s.microbatch for lane in self.lanes for s in lane.work})

    @property
    def windows(self) -> int:
        """Windows of the chain."""
        return 1 + max((s.stage for lane in self.lanes for s in lane.work), default=0)

    @property
    def kinds(self) -> list[str]:
        """Kinds of work there are, in the order of `COMPUTE`."""
        found = {s.kind for lane in self.lanes for s in lane.work}
        return [kind for kind in COMPUTE if kind in found]

    def replica(self, dp: int = 0, tp: int = 0) -> Timeline:
        """Only the lanes of one pipeline: one rank per stage. Times and length stay those of the whole step."""
        lanes = tuple(lane for lane in self.lanes if (lane.dp, lane.tp) == (dp, tp))
        return replace(self, lanes=lanes)


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
        raise ConfigurationError(
            f"no {loop!r} step was recorded by all of the {len(traces)} ranks. Was the run shorter than every_n_steps?"
        )
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
    return Timeline(step, tuple(lanes), end - start, traces[0].layout, traces[0].windows)


def ascii_timeline(timeline: Timeline, width: int | None = None) -> str:
    """Draw a step in characters, one line per rank; it fits `width` columns and needs no colour.

    Default: 100 columns, which show the numbers of 8 microbatches on 4 stages, or those of a narrower terminal.

    `F3--` is the forward of microbatch 3, `B3==` its backward (`I`, `W`: the two halves), dots are idle time. Small
    letters are every second window of a rank.
    """
    labels = [f"stage {lane.stage} rank {lane.rank}" for lane in timeline.lanes]
    pad = max(map(len, labels))
    if width is None:
        width = max(min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns), pad + 3 + _NARROWEST)
    columns = width - pad - 3
    if columns < _NARROWEST:
        raise ConfigurationError(
            f"width is {width}; a timeline with labels of {pad} characters needs {pad + 3 + _NARROWEST}."
        )
    rows = [_row(lane, timeline.seconds, columns) for lane in timeline.lanes]
    lines = [f"{label:<{pad}} |{row}|" for label, row in zip(labels, rows, strict=True)]
    scale = f"0 ms{f'{1000 * timeline.seconds:.0f} ms':>{columns - 4}}"
    legend = "   ".join([*(_SAYS[kind] for kind in timeline.kinds), "digits: microbatch", "dots: idle"])
    if any(len(lane.windows) > 1 for lane in timeline.lanes):
        legend += "   small: second window"
    below = [scale, *textwrap.wrap(legend, columns)]
    return "\n".join([*lines, *(f"{'':<{pad}}  {line}" for line in below)])


def _row(lane: Lane, seconds: float, columns: int) -> str:
    cells, windows = ["."] * columns, lane.windows
    for span in lane.work:
        first = min(columns - 1, round(span.start / seconds * columns))
        last = min(columns, max(first + 1, round(span.end / seconds * columns)))
        letter = span.kind.lower() if windows.index(span.stage) % 2 else span.kind
        text = f"{letter}{span.microbatch}"
        fill = _FILL[span.kind]
        cells[first:last] = text.ljust(last - first, fill)[: last - first]
    return "".join(cells)
