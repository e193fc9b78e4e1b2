"""A thread is looked at from outside, at any moment: also while its frame has no line."""

from __future__ import annotations

import sys
from types import FrameType
from typing import cast

from lightning_3d.mesh import Mesh
from lightning_3d.observe.frames import blocked_in, stack_text, users_line


def _frame() -> FrameType:
    return sys._getframe()


def test_a_frame_without_a_line() -> None:
    """Broken before: the thread that reports hangs ended at such a look, for the rest of the run."""
    code = _frame.__code__
    _frame.__code__ = code.replace(co_linetable=b"")
    try:
        frame = _frame()
    finally:
        _frame.__code__ = code
    assert frame.f_lineno is None
    assert frame.f_back is not None
    frames, no_mesh = [frame, frame.f_back], cast(Mesh, None)
    assert blocked_in(frames, no_mesh) is None
    assert users_line(frames) == "_frame (test_frames.py)"
    assert "in test_a_frame_without_a_line" in stack_text(frames)


def test_the_innermost_line_is_the_last_of_the_stack() -> None:
    frame: FrameType | None = sys._getframe()
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    assert "stack_text(frames)" in stack_text(frames).splitlines()[-1]
