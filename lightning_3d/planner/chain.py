"""WHICH blocks does a model consist of, in order, and which of them are on which stage?  (no torch here)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.model import ModelShape
from lightning_3d.planner.work import Setting, Work, embedding_work, head_work, layer_work


class Chain(Protocol):
    """A model as a chain of blocks that a pipeline can cut between.

    Attributes:
        name: For the reader.
        hidden: Features of what goes from block to block.
        kinds: The kind of each block, in order; blocks of one kind have the same work.
        params: All parameters, shared ones once.
        tied: Whether the first and the last stage share a weight of `embedding_params` parameters.
    """

    @property
    def name(self) -> str: ...
    @property
    def hidden(self) -> int: ...
    @property
    def kinds(self) -> tuple[int, ...]: ...
    @property
    def params(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def embedding_params(self) -> int: ...

    def works(self, at: Setting) -> tuple[Work, ...]:
        """The work of a block of each kind."""

    def check(self, tp: int, cp: int, ep: int) -> str | None:
        """Why these sizes do not fit, or None."""

    def __hash__(self) -> int: ...

    def flops_per_token(self, seq: int, *, causal: bool, embeddings: bool = False) -> float:
        """Operations of the model, forward and backward, per token."""


EMBEDDING, DENSE, MOE, HEAD = 0, 1, 2, 3


@dataclass(frozen=True)
class ShapeChain:
    """A transformer of known sizes: embedding, layers, head."""

    model: ModelShape

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def hidden(self) -> int:
        return self.model.hidden

    @property
    def kinds(self) -> tuple[int, ...]:
        return _shape_kinds(self.model)

    @property
    def params(self) -> int:
        return self.model.params

    @property
    def tied(self) -> bool:
        return self.model.tied

    @property
    def embedding_params(self) -> int:
        return self.model.embedding_params

    def works(self, at: Setting) -> tuple[Work, ...]:
        return _shape_works(self.model, at)

    def check(self, tp: int, cp: int, ep: int) -> str | None:
        model = self.model
        experts = model.experts.count if model.experts else 0
        if model.heads % tp:
            return f"TP={tp} does not divide the {model.heads} attention heads"
        if max(tp, model.kv_heads) % min(tp, model.kv_heads):
            return f"TP={tp} does not divide the {model.kv_heads} key/value heads"
        if model.ffn % tp:
            return f"TP={tp} does not divide the MLP's inner size {model.ffn}"
        if ep > 1 and (not experts or experts % ep):
            return f"EP={ep} does not divide the {experts} experts" if experts else f"EP={ep}: the model has no experts"
        return None

    def flops_per_token(self, seq: int, *, causal: bool, embeddings: bool = False) -> float:
        return self.model.flops_per_token(seq, causal=causal, embeddings=embeddings)


@lru_cache(maxsize=256)
def _shape_kinds(model: ModelShape) -> tuple[int, ...]:
    return (EMBEDDING, *(DENSE if model.moe(layer) is None else MOE for layer in range(model.layers)), HEAD)


@lru_cache(maxsize=4096)
def _shape_works(model: ModelShape, at: Setting) -> tuple[Work, ...]:
    kinds = _shape_kinds(model)
    first = {kind: number - 1 for number, kind in reversed(list(enumerate(kinds))) if kind in (DENSE, MOE)}
    layers = {kind: layer_work(model, layer, at) for kind, layer in first.items()}
    some = next(iter(layers.values()))  # of a kind that the model does not have, nothing is asked
    return embedding_work(model, at), layers.get(DENSE, some), layers.get(MOE, some), head_work(model, at)


@lru_cache(maxsize=4096)
def cut(kinds: tuple[int, ...], costs: tuple[float, ...], windows: int, even: bool) -> tuple[tuple[int, ...], ...]:
    """The blocks of each window of a pipeline, by their numbers.

    Args:
        kinds: The kind of each block; the first and the last stay at the ends.
        costs: Seconds of a block of each kind.
        windows: Into how many runs of blocks.
        even: Cut by number, not by cost: every window gets equally many inner blocks, or, if that does not come out
            even, equally many blocks with the first and the last one (as Llama 3's 126 layers on 16 stages).

    Raises:
        ConfigurationError: There are fewer blocks than windows.
    """
    inner = len(kinds) - 2
    if len(kinds) < windows:
        raise ConfigurationError(f"{inner} layers, embedding and head cannot be cut into {windows} parts.")
    if windows == 1:
        return (tuple(range(len(kinds))),)
    if even and inner % windows == 0:
        ends = [1 + (w + 1) * (inner // windows) for w in range(windows)]
        ends[-1] = len(kinds)
    else:
        ends = _balanced([1.0 if even else costs[kind] for kind in kinds], windows)
    starts = [0, *ends[:-1]]
    return tuple(tuple(range(start, end)) for start, end in zip(starts, ends, strict=True))


def _balanced(costs: Sequence[float], windows: int) -> list[int]:
    """Ends of runs whose largest sum is as small as can be; no run is empty (bisection on the largest)."""
    low, high = max(costs), sum(costs)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _runs(costs, windows, middle) else (middle, high)
    found = _runs(costs, windows, high * (1 + 1e-12))
    assert found is not None
    return found


def _runs(costs: Sequence[float], windows: int, most: float) -> list[int] | None:
    """Ends of at-most-`most` runs; so many blocks are left that no later run is empty."""
    ends, start, count = [], 0, len(costs)
    for window in range(windows):
        last = count - (windows - window - 1)
        end, total = start, 0.0
        while end < last and (end == start or total + costs[end] <= most):
            total += costs[end]
            end += 1
        ends.append(end)
        start = end
    return ends if start == count else None
