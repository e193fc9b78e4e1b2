"""WHICH operand is a weight?  Operations that multiply by a parameter, and parameters seen through views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.tensor.group import is_shape_only
from lightning_3d.tensor.registry import Args, Kwargs
from lightning_3d.tensor.sharded import is_sharded, local

WEIGHT_OPS: dict[str, tuple[int, int, int]] = {
    "linear": (1, 0, -1),
    "matmul": (1, -1, -2),
    "__matmul__": (1, -1, -2),
    "mm": (1, -1, -2),
    "bmm": (1, -1, -2),
    "addmm": (2, -1, -2),
    "grouped_mm": (1, -1, -2),
    "_grouped_mm": (1, -1, -2),
}
"""Operation -> (position of the weight, its output dim, its contraction dim)."""

CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
WEIGHT_OPS.update(dict.fromkeys(CONVOLUTIONS, (1, 0, 1)))


def feature_dim(name: str, x: Tensor, weight: Tensor) -> int:
    """The dim of the input that is contracted with the weight."""
    return x.ndim - weight.ndim + 1 if name in CONVOLUTIONS else x.ndim - 1


def groups_of(name: str, args: Args, kwargs: Kwargs) -> int:
    """In how many groups, each with its own inputs and outputs, a convolution is done."""
    groups: int = (args[6] if len(args) > 6 else kwargs.get("groups", 1)) if name in CONVOLUTIONS else 1
    return groups


def base_parameter(x: Any) -> nn.Parameter | None:
    """The parameter that `x` is, or is a view of."""
    if not isinstance(x, torch.Tensor) or is_sharded(x):
        return None
    if isinstance(x, nn.Parameter):
        return x
    return x._base if isinstance(x._base, nn.Parameter) else None


def dim_in_base(view: Tensor, base: Tensor, dim: int) -> int | None:
    """Which dim of `base` a dim of its view is, found by the strides; None if that is not clear."""
    dim %= view.ndim
    if view is base:
        return dim
    same = [
        d
        for d in range(base.ndim)
        if base.stride(d) == view.stride(dim) and base.shape[d] >= view.shape[dim] and base.shape[d] > 1
    ]
    return same[0] if len(same) == 1 else None


def einsum_with_weight(args: Args) -> tuple[nn.Parameter, Tensor, str, str, str] | None:
    """(weight, other operand, indices of the weight, of the other, of the result) of a product with one parameter."""
    operands = args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(args[0], str) or "->" not in args[0] or "." in args[0] or len(operands) != 2:
        return None
    left, result = args[0].replace(" ", "").split("->")
    terms = left.split(",")
    found = [i for i, operand in enumerate(operands) if base_parameter(operand) is operand]
    if len(found) != 1:
        return None
    at = found[0]
    return operands[at], operands[1 - at], terms[at], terms[1 - at], result


def grouped_mm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Without values torch can follow grouped_mm only in bfloat16; the shapes are the same."""
    dtype = args[0].dtype
    if dtype == torch.bfloat16 or not is_shape_only(local(args[1])):
        return func(*args, **kwargs)
    return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(dtype)
