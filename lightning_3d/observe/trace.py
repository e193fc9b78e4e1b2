"""WHAT did each rank do, and when?  The recorder of pipeline actions, and its files.

A `TraceRecorder` keeps the last steps of one rank in memory; nothing is communicated and nothing is written until
`save_trace` is called. Every rank writes its own file, `load_traces` reads a folder of them.

    recorder = TraceRecorder(rank=mesh.rank, stage=mesh.at.pp, layout=str(layout))
    recorder.begin_step(step)
    with recorder.span("F", microbatch=0, stage=1):
        ...
    recorder.end_step()

The pipeline's runner calls the recorder itself: `recorder(action, start, end)`, with marks the recorder made.

Without a `DeviceClock` times are those of the host, and on an accelerator an action would end when its kernels are
*queued*. With one, marks are events in the device's stream, and are read when the next step is recorded, or at the end.
Clocks of ranks on one machine are the same clock; between machines they agree as well as the machines' wall clocks do.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lightning_3d.errors import ConfigurationError
from lightning_3d.observe.device import DeviceClock
from lightning_3d.observe.pieces import WindowPieces

FORMAT = "lightning_3d.trace"
VERSION = 1
COMPUTE = ("F", "B", "I", "W")
"""Kinds of action that are work: forward, backward, and its two halves (gradient of the input, of the weights)."""
OTHER = ("wait", "reduce", "optimizer")
"""Kinds that are not: waiting for a message, reducing gradients over dp, the optimizer's step."""


class Action(Protocol):
    """What the pipeline's runner hands over (`pipeline.schedule.Action`)."""

    @property
    def kind(self) -> str: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def stage(self) -> int: ...


@dataclass(frozen=True)
class Span:
    """One action of one rank, from `start` to `end` (seconds of the shared clock); `microbatch` -1: of none.

    `stage` is the number of the window of the chain, as in an action of the pipeline: with one window per rank that is
    the stage; with several, the `Lane` tells the stage.
    """

    kind: str
    microbatch: int
    stage: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class StepTrace:
    """All actions of one rank in one step (`loop` is "train", "validate", ...)."""

    step: int
    loop: str = "train"
    spans: list[Span] = field(default_factory=list)


@dataclass
class RankTrace:
    """The recorded steps of one rank, where the rank stands in the mesh, and what lies in the windows (if known)."""

    rank: int
    stage: int
    dp: int = 0
    tp: int = 0
    layout: str = ""
    steps: list[StepTrace] = field(default_factory=list)
    windows: tuple[WindowPieces, ...] = ()

    def step(self, number: int, loop: str = "train") -> StepTrace | None:
        """The recorded step with this number, or None."""
        return next((s for s in self.steps if s.step == number and s.loop == loop), None)

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON; times are rounded to 0.1 microseconds."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "rank": self.rank,
            "stage": self.stage,
            "dp": self.dp,
            "tp": self.tp,
            "layout": self.layout,
            "windows": [window.to_data() for window in self.windows],
            "steps": [
                {
                    "step": s.step,
                    "loop": s.loop,
                    "spans": [[a.kind, a.microbatch, a.stage, round(a.start, 7), round(a.end, 7)] for a in s.spans],
                }
                for s in self.steps
            ],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RankTrace:
        """The inverse of `to_data`.

        Raises:
            ConfigurationError: The data is something else, or of a version that this code cannot read.
        """
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise ConfigurationError(
                f"this is not a trace of format {FORMAT!r}, version {VERSION}: found format {data.get('format')!r}, "
                f"version {data.get('version')!r}. Record it again with record_timeline=True."
            )
        steps = [StepTrace(s["step"], s["loop"], [Span(*a) for a in s["spans"]]) for s in data["steps"]]
        windows = tuple(WindowPieces.from_data(w) for w in data.get("windows", ()))
        return cls(data["rank"], data["stage"], data["dp"], data["tp"], data["layout"], steps, windows)


class TraceRecorder:
    """Records the actions of one rank, the last `capacity` steps of them.

    Args:
        rank: Global rank.
        stage: The rank's pipeline coordinate.
        dp: The rank's data-parallel coordinate.
        tp: The rank's tensor-parallel coordinate.
        layout: The layout, for titles.
        capacity: Steps to keep; older ones are forgotten.
        clock: Gives the marks on an accelerator; it waits for the device once per recorded step.
        wanted: Which steps to record, by number; None: all.

    Attributes:
        windows: What lies in the pipeline's windows, to be kept with the trace.
    """

    def __init__(
        self,
        rank: int = 0,
        stage: int = 0,
        *,
        dp: int = 0,
        tp: int = 0,
        layout: str = "",
        capacity: int = 64,
        clock: DeviceClock | None = None,
        wanted: Callable[[int], bool] | None = None,
    ) -> None:
        if capacity < 1:
            raise ConfigurationError(f"capacity is {capacity}; a recorder must keep at least 1 step.")
        self.rank, self.stage, self.dp, self.tp, self.layout = rank, stage, dp, tp, layout
        self._steps: deque[StepTrace] = deque(maxlen=capacity)
        self.windows: tuple[WindowPieces, ...] = ()
        self.wanted = wanted
        self._open: StepTrace | None = None
        self._opened = False
        self._clock = clock
        self._unread: list[tuple[StepTrace, str, int, int, Any, Any, Any]] = []
        # monotonic never jumps and is one clock on a machine; wall-clock time is the common zero of several
        self._zero = time.time() - time.monotonic()

    def __call__(self, action: Action, start: Any, end: Any) -> None:
        """Add one finished action of the pipeline's runner; `start` and `end` come from `mark()`."""
        self.add(action.kind, action.microbatch, action.stage, start, end)

    def mark(self) -> Any:
        """This moment: `time.monotonic()`, or an event of the device."""
        return time.monotonic() if self._clock is None or self._open is None else self._clock.mark()

    def add(self, kind: str, microbatch: int, stage: int, start: Any, end: Any) -> None:
        """Add one finished action between two marks. Outside of a step nothing is kept."""
        if self._open is None:
            return
        if self._clock is None:
            self.record(kind, microbatch, stage, start + self._zero, end + self._zero)
        else:
            self._unread.append((self._open, kind, microbatch, stage, start, end, self._clock.zero()))

    def now(self) -> float:
        """Seconds of the shared clock."""
        return time.monotonic() + self._zero

    @property
    def is_recording(self) -> bool:
        """Whether a step is open that is kept."""
        return self._open is not None

    def begin_step(self, step: int, loop: str = "train") -> None:
        """Open a step; actions recorded until `end_step` belong to it. A step that failed half-way is dropped."""
        self._opened = True
        self._open = None
        if self.wanted is not None and not self.wanted(step):
            return
        if self._clock is not None:
            self._clock.begin()
            self._read_marks()  # the device has passed them all
        self._open = StepTrace(step, loop)

    def end_step(self) -> None:
        """Close the step and keep it, if it is wanted."""
        assert self._opened, "end_step without begin_step"
        self._opened = False
        if self._open is not None:
            self._steps.append(self._open)
            self._open = None

    def record(self, kind: str, microbatch: int, stage: int, start: float, end: float) -> None:
        """Add one finished action; `start` and `end` come from `now()`. Outside of a step nothing is kept."""
        if self._open is not None:
            self._open.spans.append(Span(kind, microbatch, stage, start, end))

    @contextmanager
    def span(self, kind: str, microbatch: int = -1, stage: int | None = None) -> Iterator[None]:
        """Record what happens inside as one action, also when it raises."""
        start = self.mark()
        try:
            yield
        finally:
            self.add(kind, microbatch, self.stage if stage is None else stage, start, self.mark())

    def trace(self) -> RankTrace:
        """What is kept so far."""
        self._read_marks()
        return RankTrace(self.rank, self.stage, self.dp, self.tp, self.layout, list(self._steps), self.windows)

    def last(self) -> StepTrace | None:
        """The last step that is kept."""
        self._read_marks()
        return self._steps[-1] if self._steps else None

    def _read_marks(self) -> None:
        unread, self._unread = self._unread, []
        for step, kind, microbatch, stage, start, end, zero in unread:
            begin, stop = (DeviceClock.seconds(mark, zero) + self._zero for mark in (start, end))
            step.spans.append(Span(kind, microbatch, stage, begin, stop))


def trace_path(folder: str | Path, rank: int) -> Path:
    """Where a rank's trace lies in a run's folder."""
    return Path(folder) / f"trace_rank{rank:05d}.json"


def save_trace(trace: RankTrace | TraceRecorder, folder: str | Path) -> Path:
    """Write one rank's trace into `folder` (made if needed). Returns the file."""
    trace = trace.trace() if isinstance(trace, TraceRecorder) else trace
    path = trace_path(folder, trace.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace.to_data()))
    return path


def load_traces(folder: str | Path) -> list[RankTrace]:
    """Read the traces of all ranks of a run, in order of rank.

    Raises:
        ConfigurationError: The folder holds none, or a file is not a trace.
    """
    files = sorted(Path(folder).glob("trace_rank*.json"))
    if not files:
        raise ConfigurationError(
            f"no trace_rank*.json in {str(folder)!r}. Train with Trainer(callbacks=[lightning_3d.PipelineTimeline()]), "
            "which writes them; or with ThreeDStrategy(record_timeline=True), and save each rank's recorder with "
            "lightning_3d.observe.save_trace(strategy.recorder, folder)."
        )
    return [RankTrace.from_data(json.loads(file.read_text())) for file in files]
