"""WHERE in the code does a thread stand?  Its Python frames, read from outside: module, collective, user's line.

Frames are lists from the innermost outwards. The names of functions and locals that are looked for are those of
`pipeline/stage.py`, `pipeline/walk.py`, `pipeline/channels.py`, `comm.py` and `torch.distributed`; where one is not
found, less is said.
"""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lightning_3d.comm import ProcessCommunicator, ranks_of
from lightning_3d.mesh import Coordinate, Mesh, rank_of

_PACKAGE = str(Path(__file__).resolve().parents[1])
_NOT_USERS = (_PACKAGE, *{sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")}, "<")
_STACK = 24
"""Lines of a stack that are shown; what is further out is how training was started."""


class Wait(NamedTuple):
    """How a rank waits (see `activity.Note`), for which ranks, in which collective."""

    text: str
    ranks: tuple[int, ...] = ()
    call: str | None = None


def _is(frame: FrameType, file: str, *functions: str) -> bool:
    code = frame.f_code
    return code.co_name in functions and code.co_filename.endswith(file)


def atom_in(frames: list[FrameType]) -> str | None:
    """Name of the pipeline's piece that runs."""
    return next((f.f_locals.get("name") for f in frames if _is(f, "pipeline/stage.py", "on_atom")), None)


def window_in(frames: list[FrameType], action: Any) -> str | None:
    """The pieces of the window an action runs, as text."""
    for frame in frames:
        if _is(frame, "pipeline/walk.py", "run"):
            partition = frame.f_locals["self"].partitions[action.microbatch]
            window = partition.windows[action.stage]
            names = [event.atom for n, event in partition.trace.calls() if window.start <= n < window.stop]
            return f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names)
    return None


def users_line(frames: list[FrameType]) -> str:
    """The innermost line of code that is neither of a package nor of Python, and what it called."""
    for frame in frames:
        if not frame.f_code.co_filename.startswith(_NOT_USERS) and "site-packages" not in frame.f_code.co_filename:
            return _line(frame) + ("" if frame is frames[0] else f", inside {_line(frames[0])}")
    return _line(frames[0]) if frames else "no Python code"


def stack_text(frames: list[FrameType]) -> str:
    """The innermost lines, as in a traceback, without those of `nn.Module.__call__`."""
    if not frames:
        return "  (no Python code runs)"
    # not `extract_stack`, which fails on a frame without a line
    found = traceback.StackSummary.extract((frame, line_of(frame)) for frame in reversed(frames))
    shown = [s for s in found if not s.filename.endswith("torch/nn/modules/module.py")]
    return "".join(traceback.format_list(shown[-_STACK:])).rstrip()


def line_of(frame: FrameType) -> int:
    """The line a frame is at; 0 while it is between two lines, which a look from another thread may meet."""
    line: int | None = frame.f_lineno
    return line or 0


def _line(frame: FrameType) -> str:
    line = line_of(frame)
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}{f', line {line}' if line else ''})"


def blocked_in(frames: list[FrameType], mesh: Mesh) -> Wait | None:
    """The communication the thread is inside of, or None."""
    for frame in frames:
        if _is(frame, "pipeline/channels.py", "_release"):
            stage = frame.f_locals["target_stage"]
            at = mesh.at
            rank = rank_of(mesh.layout, Coordinate(at.dp, stage, at.cp, at.tp))
            return Wait("until its message is taken by", (rank,))
        if frame.f_code.co_filename.endswith("lightning_3d/comm.py"):
            axis = frame.f_locals.get("self")
            if isinstance(axis, ProcessCommunicator):
                return _collective(mesh, _operation(frames, frame), f"over {axis.axis}", axis.group)
    for frame in frames:
        if frame.f_code.co_filename.endswith("torch/distributed/distributed_c10d.py") and "group" in frame.f_locals:
            return _collective(mesh, frame.f_code.co_name, "called outside of lightning_3d", frame.f_locals["group"])
    if frames and ".wait(" in linecache.getline(frames[0].f_code.co_filename, line_of(frames[0])):
        # a reduction that was started earlier and is waited for now
        reduced = any(f"{_PACKAGE}/zero/" in f.f_code.co_filename for f in frames)
        return _collective(mesh, "a reduction", "over dp", mesh.data.group) if reduced else None
    return None


def _operation(frames: list[FrameType], frame: FrameType) -> str:
    """The outermost method of the same communicator (a barrier is an all-reduce inside)."""
    mine = frame.f_locals["self"]
    outer = [f for f in frames if f.f_code.co_filename == frame.f_code.co_filename and f.f_locals.get("self") is mine]
    return outer[-1].f_code.co_name


def _collective(mesh: Mesh, operation: str, where: str, group: Any) -> Wait:
    ranks = ranks_of(group)
    others = tuple(rank for rank in ranks if rank != mesh.rank)
    return Wait(f"in {operation} {where} for", others, f"{operation} {where} {ranks}")
