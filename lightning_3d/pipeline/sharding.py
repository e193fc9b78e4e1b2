"""WHAT does the pipeline know about tensor parallelism?  Only these few functions.

A sharded value is one tracked value like any other: it shows the global shape, and only its local piece is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

try:
    from lightning_3d.tensor import ShardedTensor, function_guard
except ImportError:  # the tensor room is not there yet
    ShardedTensor = None  # type: ignore[assignment,misc]
    function_guard = None  # type: ignore[assignment]

from lightning_3d.probe import intercept_functions


def _sharded(value: object) -> bool:
    return ShardedTensor is not None and isinstance(value, ShardedTensor)


def local(value: Any) -> Any:
    """This rank's piece of a sharded tensor; anything else itself."""
    return value.local if _sharded(value) else value


def placement(value: Any) -> Any:
    """How a sharded tensor is cut; None for anything else."""
    return value.placement if _sharded(value) else None


def sources(value: Any) -> Any:
    """What a sharded tensor derives from; None for anything else."""
    return value.sources if _sharded(value) else None


def on_local(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Apply `function` to this rank's piece and keep the placement."""
    if not _sharded(value):
        return function(value)
    from lightning_3d.tensor import map_local

    return map_local(function, value)


def wrap(piece: Tensor, meta: Any, group: Any) -> Tensor:
    """Make a received piece what its `TensorMeta` says: a sharded tensor again, or just itself."""
    if meta.placement is None:
        return piece
    from lightning_3d.tensor import wrap as wrap_piece

    return wrap_piece(piece, meta.placement, group, sources=meta.sources)


def whole(value: Any) -> Any:
    """A sharded tensor gathered over the tensor-parallel group; anything else itself."""
    if not _sharded(value):
        return value
    from lightning_3d.tensor import whole as gather

    return gather(value)


@contextmanager
def guarded() -> Iterator[None]:
    """While open, custom autograd Functions called with sharded tensors are handled by the tensor room."""
    if function_guard is None:
        yield
        return
    with intercept_functions(function_guard, 1):
        yield


@contextmanager
def dry(group: Any) -> Iterator[None]:
    """While open, the tensor-parallel group answers with shapes only: a probe must not communicate."""
    if group is None:
        yield
        return
    before, group.dry = group.dry, True
    try:
        yield
    finally:
        group.dry = before
