"""HOW MANY bytes will the ledger count?  What this library sends in a step, axis by axis (no torch here).

Unlike the time model, which prices messages, this counts what `comm.Ledger` counts: payload times what a ring sends, in
the training step of one rank, with the buckets of `zero/` padded as they are there. Proved against the ledger in
tests/planner/test_traffic.py and benchmarks/planner_self.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Elements; places in a bucket begin at multiples of it (`zero/bucket.py`)."""


@dataclass(frozen=True)
class StageTraffic:
    """What the ranks of one pipeline stage send in a step, in bytes per rank.

    Attributes:
        tp: All-reduces of activations, forward and backward.
        pp: Messages to other stages.
        dp: Gradients and parameters over the replicas.
    """

    tp: float
    pp: float
    dp: float


def buckets(sizes: Iterable[int], width: int, limit: int, shards: int) -> list[int]:
    """Padded elements of the buckets of one stage.

    Args:
        sizes: Elements of its parameters on this rank, in order of registration.
        width: Bytes of an element.
        limit: Bytes at which a bucket is closed.
        shards: Ranks that share a bucket (1 with ZeRO 0).
    """
    runs: list[list[int]] = []
    for size in reversed(list(sizes)):
        if not runs or sum(runs[-1]) * width + size * width > limit:
            runs.append([])
        runs[-1].append(size)
    return [_up(-(-sum(_up(size) for size in run) // shards)) * shards for run in runs]


def _up(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def data_bytes(sizes: Sequence[int], width: int, limit: int, dp: int, zero: int) -> float:
    """Bytes a rank sends over dp in a step: one all-reduce, or a reduce-scatter and an all-gather (ZeRO 1).

    The same in all of these stages: `2 (n-1)/n` of the padded parameters.
    """
    if dp == 1:
        return 0.0
    padded = sum(buckets(sizes, width, limit, dp if zero else 1))
    return 2 * (dp - 1) / dp * padded * width


def tensor_bytes(forward: float, backward: float, width: int, tp: int) -> float:
    """Bytes a rank sends over tp: all-reduces of so many elements in forward and backward."""
    return 2 * (tp - 1) / tp * (forward + backward) * width


def message_bytes(elements: float, width: int, messages: int) -> float:
    """Bytes a rank sends over pp: so many messages of so many elements."""
    return elements * width * messages
