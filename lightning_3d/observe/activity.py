"""WHAT is this rank doing right now, and for whom does it wait?  A note that costs nothing until somebody asks.

The pipeline tells which action runs and which message it waits for (two assignments). Everything else is looked up when
it is asked for, from another thread: the module that runs and the collective that blocks stand in the Python frames of
the main thread, and whether anything has moved since the last look is seen from counters that are kept anyway.

On CUDA the host does not wait, it only queues; where the device stands is found by events (`DeviceProgress`).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_3d.mesh import Coordinate, Mesh, rank_of
from lightning_3d.observe.device import DeviceProgress
from lightning_3d.observe.frames import Wait, atom_in, blocked_in, stack_text, users_line, window_in

if TYPE_CHECKING:
    from lightning_3d.pipeline import PipelineRunner

_KIND = {
    "F": "forward",
    "B": "backward",
    "I": "backward (gradient of the inputs)",
    "W": "backward (gradient of the weights)",
}


@dataclass(frozen=True)
class Note:
    """What one rank says of itself.

    Attributes:
        rank: Global rank.
        place: Where it stands, e.g. "stage 2".
        doing: What it does, e.g. "in forward of layers.14 (microbatch 3)".
        waits: How it waits, to be followed by a rank: "for the gradients of microbatch 3 from"; None: it does not.
        on: The global ranks it may wait for.
        call: Ranks with the same text here stand in one collective, and do not wait for each other.
        seconds: For how long nothing has moved.
        stack: Its Python stack.
    """

    rank: int
    place: str
    doing: str
    waits: str | None = None
    on: tuple[int, ...] = ()
    call: str | None = None
    seconds: float = 0.0
    stack: str = ""

    def __str__(self) -> str:
        return f"{self.place} (rank {self.rank})"

    def to_text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Note:
        """The inverse of `to_text`."""
        data = json.loads(text)
        return cls(**{**data, "on": tuple(data["on"])})


class _Seen(NamedTuple):
    """One look at the main thread."""

    progress: Any
    wait: Wait | None
    frames: list[FrameType]


class Activity:
    """What this rank does. Make it in the thread that trains; ask it from another.

    Args:
        mesh: This rank's place.
        device: Where the device stands; None: the host waits itself (CPU).

    Attributes:
        action: The pipeline's action that runs, None between batches.
        parcel: The message it waits for, or None.
    """

    def __init__(self, mesh: Mesh, device: DeviceProgress | None = None) -> None:
        self.mesh, self.device = mesh, device
        self.action: Any = None
        self.parcel: Any = None
        self._count = 0
        self._thread = threading.get_ident()
        self._progress: Any = None
        self._since = time.monotonic()

    @classmethod
    def of(cls, mesh: Mesh) -> Activity:
        """The one that fits this rank's device."""
        return cls(mesh, DeviceProgress() if mesh.device.type == "cuda" else None)

    # -- told by the pipeline
    def follow(self, runner: PipelineRunner) -> None:
        """Be told what a pipeline does from now on."""
        runner.on_action, runner.channels.on_wait = self.begins, self.waits

    def begins(self, action: Any) -> None:
        """An action begins (None: the batch is over)."""
        self.action, self.parcel = action, None
        self._count += 1
        if self.device is not None:
            self.device.mark(action)

    def waits(self, parcel: Any) -> None:
        """A receive begins (None: it is over)."""
        self.parcel = parcel
        self._count += 1
        if self.device is not None:
            self.device.mark(self.action if parcel is None else parcel)

    # -- asked from another thread
    def look(self) -> tuple[Any, float, bool]:
        """(what changes whenever anything moves, seconds since it did, whether the rank waits for another)."""
        seen = self._see()
        if seen.progress != self._progress:
            self._progress, self._since = seen.progress, time.monotonic()
        return seen.progress, time.monotonic() - self._since, seen.wait is not None

    def note(self) -> Note:
        """What this rank has to say now."""
        _, seconds, _ = self.look()
        seen = self._see()
        note = Note(self.mesh.rank, place_of(self.mesh), self._doing(seen.frames), seconds=seconds)
        stack = stack_text(seen.frames)
        if seen.wait is None:
            return replace(note, stack=stack)
        return replace(note, waits=seen.wait.text, on=seen.wait.ranks, call=seen.wait.call, stack=stack)

    def _see(self) -> _Seen:
        frames = list(_outwards(sys._current_frames().get(self._thread)))
        wait = self._wait(frames)
        calls = sum(entry.calls for entry in list(self.mesh.ledger.traffic.values()))
        where = (frames[0].f_code, frames[0].f_lineno) if frames else None
        return _Seen((self._count, calls, where, wait and wait.text, self.device and self.device.passed), wait, frames)

    def _wait(self, frames: list[FrameType]) -> Wait | None:
        if self.device is not None:
            stands, behind = self.device.stands_at()
            if behind and hasattr(stands, "message"):
                return self._for_parcel(stands)
            if behind and stands is not None:
                return Wait(f"for its own device to end the {_KIND[stands.kind]} of microbatch {stands.microbatch}")
        parcel = self.parcel
        if parcel is not None and self.device is None:
            return self._for_parcel(parcel)
        return blocked_in(frames, self.mesh)

    def _for_parcel(self, parcel: Any) -> Wait:
        what = "values" if parcel.message.kind == "F" else "gradients"
        at = self.mesh.at
        source = rank_of(self.mesh.layout, Coordinate(at.dp, parcel.stage, at.cp, at.tp))
        return Wait(f"for the {what} of microbatch {parcel.message.microbatch} from", (source,))

    def _doing(self, frames: list[FrameType]) -> str:
        action = self.action
        if action is None:
            return f"in {users_line(frames)}"
        kind = _KIND[action.kind]
        atom = atom_in(frames) if action.kind == "F" else None
        if atom is not None:
            return f"in {kind} of {atom} (microbatch {action.microbatch})"
        pieces = window_in(frames, action)
        return f"in {kind} of microbatch {action.microbatch}" + (f" ({pieces})" if pieces else "")


def place_of(mesh: Mesh) -> str:
    """Where a rank stands, in as few words as tell it from the others."""
    layout, at = mesh.layout, mesh.at
    parts = [f"stage {at.pp}"] if layout.pp > 1 else []
    parts += [f"replica {at.dp}"] if layout.dp > 1 else []
    parts += [f"tensor-parallel rank {at.tp}"] if layout.tp > 1 else []
    return ", ".join(parts) or "the only process"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
