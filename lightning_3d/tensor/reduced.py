"""HOW is a product with a huge weight tried?  At a smaller size: nothing in a product depends on how large it is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_3d.tensor.operations import Operand, Operation
from lightning_3d.tensor.weights import WEIGHT_OPS

_ENOUGH = 1 << 20  # operands of fewer elements are tried as they are
_SMALL = 64  # dims up to this size are kept
_REDUCIBLE = frozenset((*WEIGHT_OPS, "embedding", "einsum"))


def reduced(operation: Operation, size: int) -> Operation:
    """The same product with smaller dims, if it is large; dims that are equal stay equal.

    Args:
        operation: Any operation; one that is no product is given back as it is.
        size: Number of ranks.
    """
    operands = [a for a in tree_leaves((operation.args, operation.kwargs)) if isinstance(a, Operand)]
    large = max((math.prod(a.shape) for a in operands), default=0) > _ENOUGH
    if not large or operation.name not in _REDUCIBLE:
        return operation
    sizes = _smaller_sizes(operands, size)
    if sizes is None:
        return operation

    def change(operand: Operand) -> Operand:
        cut, value = operand.cut, operand.value
        if cut is not None:
            cut = dataclasses.replace(cut, segments=sizes.segments.get(cut.segments, cut.segments))
        if value is not None and operation.name == "embedding":  # an index into the rows of the table
            rows = max(a.shape[0] for a in operands if a.value is None)
            value = value % sizes.dims.get(rows, rows)
        elif value is not None:
            for dim, n in enumerate(operand.shape):
                value = value.narrow(dim, 0, sizes.dims.get(n, n))
        shape = tuple(sizes.dims.get(n, n) for n in operand.shape)
        if value is not None:
            shape = tuple(value.shape)
        return dataclasses.replace(operand, shape=shape, cut=cut, value=value)

    args, kwargs = tree_map_only(Operand, change, (operation.args, operation.kwargs))
    if operation.name == "embedding":
        args, kwargs = _without_padding_index(args, kwargs)
    return dataclasses.replace(operation, args=args, kwargs=kwargs)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    dims: dict[int, int]
    segments: dict[tuple[int, ...], tuple[int, ...]]


def _smaller_sizes(operands: list[Operand], size: int) -> _Sizes | None:
    """New sizes for the large dims; None if a dim is cut in two ways."""
    dims: dict[int, int] = {}
    segments: dict[tuple[int, ...], tuple[int, ...]] = {}
    parts: dict[int, int] = {}
    for cut in (a.cut for a in operands if a.cut is not None):
        if cut.length <= _SMALL or cut.segments in segments:
            continue
        if cut.length in dims:
            return None
        for n in cut.segments:
            if n not in parts:
                parts[n] = size * (8 + len(parts)) + n % size  # with padding: as far from a multiple as before
        segments[cut.segments] = tuple(parts[n] for n in cut.segments)
        dims[cut.length] = sum(segments[cut.segments])
    for n in (n for a in operands for n in a.shape if n > _SMALL):
        if n not in dims:
            dims[n] = 8 * size + 8 * len(dims)
    return _Sizes(dims, segments)


def _without_padding_index(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Row numbers of the large table mean nothing in the small one."""
    return args[:2] + (None,) * len(args[2:3]) + args[3:], {k: v for k, v in kwargs.items() if k != "padding_idx"}
