"""WHAT did each rank do, and when?  The recorder of pipeline actions, and its files.

A `TraceRecorder` keeps the last steps of one rank in memory; nothing is communicated and nothing is written until
`save_trace` is called. Every rank writes its own file, `load_traces` reads a folder of them.

    recorder = TraceRecorder(rank=mesh.rank, stage=mesh.at.pp, layout=str(layout))
    recorder.begin_step(step)
    with recorder.span("F", microbatch=0, stage=1):
        ...
    recorder.end_step()

The pipeline's runner calls the recorder itself: `recorder(action, start, end)`.

Times are those of the host's clock: on an accelerator an action ends when its kernels are *queued*, unless the recorder
is given a `synchronize` function. Clocks of ranks on one machine are the same clock; between machines they agree as
well as the machines' wall clocks do.
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
    """One action of one rank, from `start` to `end` (seconds of the shared clock); `microbatch` -1: of none."""

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
    """The recorded steps of one rank, and where the rank stands in the mesh."""

    rank: int
    stage: int
    dp: int = 0
    tp: int = 0
    layout: str = ""
    steps: list[StepTrace] = field(default_factory=list)

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
        return cls(data["rank"], data["stage"], data["dp"], data["tp"], data["layout"], steps)


class TraceRecorder:
    """Records the actions of one rank, the last `capacity` steps of them.

    Args:
        rank: Global rank.
        stage: The rank's pipeline coordinate.
        dp: The rank's data-parallel coordinate.
        tp: The rank's tensor-parallel coordinate.
        layout: The layout, for titles.
        capacity: Steps to keep; older ones are forgotten.
        synchronize: Called before each reading of the clock in `span`, e.g. `torch.cuda.synchronize`. It makes times
            on an accelerator exact and the run slower.
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
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        if capacity < 1:
            raise ConfigurationError(f"capacity is {capacity}; a recorder must keep at least 1 step.")
        self.rank, self.stage, self.dp, self.tp, self.layout = rank, stage, dp, tp, layout
        self._steps: deque[StepTrace] = deque(maxlen=capacity)
        self._open: StepTrace | None = None
        self._synchronize = synchronize
        # monotonic never jumps and is one clock on a machine; wall-clock time is the common zero of several
        self._zero = time.time() - time.monotonic()

    def __call__(self, action: Action, start: float, end: float) -> None:
        """Add one finished action of the pipeline's runner; `start` and `end` are `time.monotonic()`."""
        self.record(action.kind, action.microbatch, action.stage, start + self._zero, end + self._zero)

    def now(self) -> float:
        """Seconds of the shared clock."""
        return time.monotonic() + self._zero

    def begin_step(self, step: int, loop: str = "train") -> None:
        """Open a step; actions recorded until `end_step` belong to it. A step that failed half-way is dropped."""
        self._open = StepTrace(step, loop)

    def end_step(self) -> None:
        """Close the step and keep it."""
        assert self._open is not None, "end_step without begin_step"
        self._steps.append(self._open)
        self._open = None

    def record(self, kind: str, microbatch: int, stage: int, start: float, end: float) -> None:
        """Add one finished action; `start` and `end` come from `now()`. Outside of a step nothing is kept."""
        if self._open is not None:
            self._open.spans.append(Span(kind, microbatch, stage, start, end))

    @contextmanager
    def span(self, kind: str, microbatch: int = -1, stage: int | None = None) -> Iterator[None]:
        """Record what happens inside as one action, also when it raises."""
        start = self._read()
        try:
            yield
        finally:
            self.record(kind, microbatch, self.stage if stage is None else stage, start, self._read())

    def trace(self) -> RankTrace:
        """What is kept so far."""
        return RankTrace(self.rank, self.stage, self.dp, self.tp, self.layout, list(self._steps))

    def _read(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self.now()


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
            f"no trace_rank*.json in {str(folder)!r}. Train with ThreeDStrategy(record_timeline=True) and save each "
            "rank's recorder with lightning_3d.observe.save_trace(strategy.recorder, folder)."
        )
    return [RankTrace.from_data(json.loads(file.read_text())) for file in files]
