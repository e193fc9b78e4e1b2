"""WHAT does the pipeline know about tensor parallelism?  Only these few functions.

A sharded value is one tracked value like any other: it shows the global shape, and only its local piece is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_3d import tensor as tensor_room
from lightning_3d.probe import intercept_functions
from lightning_3d.tensor import ShardedTensor, function_guard

_UNGUARDED = nullcontext()


def _sharded(value: object) -> bool:
    return isinstance(value, ShardedTensor)


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
    return tensor_room.map_local(function, value)


def wrap(piece: Tensor, meta: Any, group: Any) -> Tensor:
    """Make a received piece what its `TensorMeta` says: a sharded tensor again, or just itself."""
    if meta.placement is None:
        return piece
    return tensor_room.wrap(piece, meta.placement, group, sources=meta.sources)


def original_class(module: nn.Module) -> type:
    """The class of a module before the tensor-parallel rewrite."""
    return tensor_room.original_class(module)


def whole(value: Any) -> Any:
    """A sharded tensor gathered over the tensor-parallel group; anything else itself."""
    return tensor_room.whole(value) if _sharded(value) else value


def guarded(group: object = True) -> AbstractContextManager[None]:
    """While open, custom autograd Functions called with sharded tensors are handled by the tensor room.

    Args:
        group: The tensor-parallel group, where it is known: if it is None there are no sharded tensors.
    """
    return _UNGUARDED if group is None else intercept_functions(function_guard, 1)


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
