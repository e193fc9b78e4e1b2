"""WHAT does the search for a plan believe, and how is it contradicted?"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_3d.tensor.decisions import Decision


class Refuted(BaseException):
    """An assumption does not hold. Not an `Exception`: user code must not catch it.

    Args:
        keys: Parameters whose assumption is to blame.
        reason: What happened.
        hints: Segmentations that might work.
        kind: "layout" if another segmentation could help.
        heads: Number of attention heads the ranks cannot share, if that is why.
        lengths: Sizes of the cut dims that met.
    """

    def __init__(
        self,
        keys: frozenset[str],
        reason: str,
        hints: Sequence[tuple[int, ...]] = (),
        kind: str = "op",
        heads: int | None = None,
        lengths: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(reason)
        self.keys, self.reason, self.hints, self.kind, self.heads = keys, reason, tuple(hints), kind, heads
        self.lengths = lengths


class Again(BaseException):
    """A weight was decided after parts of it had been used: follow the code again, knowing the decision."""


class Beliefs:
    """What the search believes before a run.

    Attributes:
        replicated: Key -> why it stays whole.
        segments: Key -> segmentation to try.
        copies: Key -> number of ranks that share each of its chunks (fewer heads than ranks).
        shares: Key -> for each of its segments, how many ranks have to hold it together (fused, fewer heads).
        pinned: Decisions of an earlier run that ended in `Again`.
    """

    def __init__(self) -> None:
        self.replicated: dict[str, str] = {}
        self.segments: dict[str, tuple[int, ...]] = {}
        self.copies: dict[str, int] = {}
        self.shares: dict[str, tuple[int, ...]] = {}
        self.pinned: dict[str, Decision] = {}
