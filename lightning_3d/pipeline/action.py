"""WHAT is one piece of work of a pipeline?  An action: forward, backward or half a backward (no torch here)."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "wait"]


class Action(NamedTuple):
    """One piece of work of one microbatch in one window.

    `F` is the forward, `B` the whole backward. A backward may be split into `I`, the gradient of the window's inputs,
    for which the window before waits, and `W`, the gradient of its weights, for which nobody waits.

    `wait` never appears in a schedule; the recorder is told with it how long a window waited for a receive.

    Attributes:
        kind: What is done.
        microbatch: Of which microbatch.
        stage: In which window of the chain. With one window per rank, window and pipeline rank are the same number.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


Lists = tuple[tuple[Action, ...], ...]
"""Per pipeline rank, what it does, in order."""
