"""Matrix products: where column- and row-parallel layers come from.

| operand a | operand b | result | collectives forward | backward |
|---|---|---|---|---|
| whole | cut along the columns | cut along the last dim (column layer) | none | all-reduce of da |
| cut along the contraction | cut along the contraction | whole (row layer) | all-reduce of the result | none |
| cut along the contraction | whole | whole | all-reduce of the result | all-gather of db |
| cut along the rows | whole | cut along the rows | none | all-reduce of db |
| cut along a batch dim | cut alike, or whole | cut along the batch dim | none | for the whole operand |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor import collectives
from lightning_3d.tensor.collectives import copy_in
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.operands import (
    along_sequence,
    derive,
    finer,
    localize,
    no_copies,
    partial_to_whole,
    sequence_to_whole,
    take,
)
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, argument, bind, register_rule
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded, merged_sources, whole


def _may_contract(cut: Placement) -> None:
    no_copies(cut, "contraction over")
    # the padding rows of one operand would get gradient from what the other one holds there
    if cut.padding:
        raise NoRule("contraction over a padded dim")


@register_rule("linear")
def _linear(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, weight, bias = args[0], argument(args, kwargs, 1, "weight"), argument(args, kwargs, 2, "bias")
    if is_sharded(weight):
        if weight.ndim != 2:
            raise NoRule("linear with a vector as weight")
        return _column(x, weight, bias) if weight.placement.dim == 0 else _row(x, weight, bias)
    if not is_sharded(x) or is_sharded(bias):
        raise NoRule("linear with only a cut bias")
    group, cut = x.group, x.placement
    if cut.dim == x.ndim - 1:
        _may_contract(cut)
        y = partial_to_whole(F.linear(x.local, take(weight, cut.at(1), group)), group)
        return y if bias is None else y + bias
    bias = None if bias is None else copy_in(bias, group)
    return derive(F.linear(x.local, copy_in(weight, group), bias), cut, x)


def _column(x: Tensor, weight: ShardedTensor, bias: Tensor | None) -> Tensor:
    group = weight.group
    if isinstance(bias, ShardedTensor) and not bias.placement.like(weight.placement):
        bias = whole(bias)
    if isinstance(bias, ShardedTensor):
        bias = bias.local
    elif bias is not None:
        bias = take(bias, weight.placement, group)
    if along_sequence(x):
        y = F.linear(sequence_to_whole(x), weight.local, bias)  # type: ignore[arg-type]
    elif is_sharded(x):
        raise NoRule("the input of a column-parallel linear layer is cut")
    else:
        y = collectives.column_linear(x, weight.local, bias, group)
    return ShardedTensor(y, weight.placement.at(y.ndim - 1), group, weight.sources)


def _row(x: Tensor, weight: ShardedTensor, bias: Tensor | None) -> Tensor:
    group, cut = weight.group, weight.placement
    _may_contract(cut)
    if not isinstance(x, ShardedTensor) or along_sequence(x):
        part = take(whole(x), cut.at(x.ndim - 1), group)
    elif x.placement.dim != x.ndim - 1 or not x.placement.like(cut):
        raise NoRule(f"row-parallel linear: the input is cut as {x.placement}, the weight as {cut}")
    else:
        part = x.local
    y = partial_to_whole(F.linear(part, weight.local), group)
    return y if bias is None else y + bias  # after the sum: once, not once per rank


@register_rule("addmm")
def _addmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(("input", "mat1", "mat2"), args, kwargs)
    y = torch.matmul(given["mat1"], given["mat2"])
    return _scaled_sum(y, given["input"], given)


@register_rule("baddbmm")
def _baddbmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(("input", "batch1", "batch2"), args, kwargs)
    y = torch.matmul(given["batch1"], given["batch2"])
    return _scaled_sum(y, given["input"], given)


def _scaled_sum(product: Tensor, addend: Tensor, given: Kwargs) -> Tensor:
    alpha, beta = given.get("alpha", 1), given.get("beta", 1)
    if alpha != 1:
        product = product * alpha
    if beta == 0:  # the addend may even be NaN
        return product
    return product + (addend if beta == 1 else addend * beta)


@register_rule("matmul", "mm", "bmm", "rmatmul")
def _matmul(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(("input", "other"), args, kwargs)
    a, b = given["input"], given.get("other", given.get("mat2"))
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    assert b is not None
    if a.ndim < 2 or b.ndim < 2:
        raise NoRule("matmul with a vector")
    if along_sequence(a) and is_sharded(b) and b.ndim == 2:
        if b.placement.dim == 1:  # a column layer under sequence parallelism
            y = torch.matmul(sequence_to_whole(a), b.local)
            return ShardedTensor(y, b.placement.at(y.ndim - 1), b.group, b.sources)
        a = whole(a)
    dim_a = a.placement.dim - a.ndim if is_sharded(a) else None
    dim_b = b.placement.dim - b.ndim if is_sharded(b) else None
    if (dim_a is not None and dim_a <= -3) or (dim_b is not None and dim_b <= -3):
        return _batched(a, b, dim_a, dim_b)
    return _matrix_product(a, b, dim_a, dim_b)


def _batched(a: Any, b: Any, dim_a: int | None, dim_b: int | None) -> Any:
    """At least one operand is cut along a batch dim (heads)."""
    dim = min(d for d in (dim_a, dim_b) if d is not None)
    head = a if dim_a == dim else b
    cut, group = head.placement, head.group
    if dim_a == dim_b and a.placement.copies != b.placement.copies:
        a, b = finer(a), finer(b)
        head = a
        cut = head.placement
    if dim_a not in (None, dim) or dim_b not in (None, dim) or (dim_a == dim_b and not a.placement.like(b.placement)):
        raise NoRule("the operands of matmul are cut along different dims")
    y = torch.matmul(localize(a, dim, cut, group), localize(b, dim, cut, group))
    return ShardedTensor(y, cut.at(max(a.ndim, b.ndim) + dim), group, merged_sources([a, b]))


def _matrix_product(a: Any, b: Any, dim_a: int | None, dim_b: int | None) -> Any:
    """The operands are cut along rows, columns or the contraction."""
    head = a if dim_a is not None else b
    group, sources, ndim = head.group, merged_sources([a, b]), max(a.ndim, b.ndim)
    if dim_a == -1 or dim_b == -2:
        _may_contract(a.placement if dim_a == -1 else b.placement)
    if dim_a == -1 and dim_b == -2:
        if not a.placement.like(b.placement):
            raise NoRule("the operands of matmul are cut differently along the contraction")
        return partial_to_whole(torch.matmul(a.local, b.local), group)
    if dim_a == -1 and dim_b is None:
        return partial_to_whole(torch.matmul(a.local, take(b, a.placement.at(b.ndim - 2), group)), group)
    if dim_b == -2 and dim_a is None:
        return partial_to_whole(torch.matmul(take(a, b.placement.at(a.ndim - 1), group), b.local), group)
    if dim_a == -2 and dim_b is None:
        return ShardedTensor(torch.matmul(a.local, copy_in(b, group)), a.placement.at(ndim - 2), group, sources)
    if dim_b == -1 and dim_a is None:
        return ShardedTensor(torch.matmul(copy_in(a, group), b.local), b.placement.at(ndim - 1), group, sources)
    raise NoRule("the operands of matmul are cut along different dims")


@register_rule("einsum")
def _einsum(func: Any, args: Args, kwargs: Kwargs) -> Any:
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise NoRule("einsum without '->', or with '...'")
    left, result = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if any(len(set(term)) != len(term) for term in terms):
        raise NoRule("einsum with a repeated index (a diagonal)")
    sharded = [(x, term[x.placement.dim]) for x, term in zip(operands, terms, strict=True) if is_sharded(x)]
    head, letter = sharded[0]
    cut, group = head.placement, head.group
    if any(index != letter or not x.placement.like(cut) for x, index in sharded):
        raise NoRule("the operands of einsum are cut along different indices")
    if letter not in result:
        _may_contract(cut)
    parts = [_einsum_part(x, term.find(letter), cut, group) for x, term in zip(operands, terms, strict=True)]
    y = torch.einsum(equation, *parts)
    if letter in result:
        return ShardedTensor(y, cut.at(result.index(letter)), group, merged_sources(operands))
    return partial_to_whole(y, group)


def _einsum_part(x: Tensor, dim: int, cut: Placement, group: TensorGroup) -> Tensor:
    if isinstance(x, ShardedTensor):
        return x.local
    return take(x, cut.at(dim), group) if dim >= 0 else copy_in(x, group)


@register_rule("grouped_mm", "_grouped_mm")
def _grouped(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Expert weights (experts, in, out): column on the last dim, row on the middle one."""
    x, weight = args[0], args[1]
    if is_sharded(weight) and weight.ndim == 3:
        cut, group = weight.placement, weight.group
        if cut.dim == 2 and not is_sharded(x):
            y = func(copy_in(x, group), weight.local, *args[2:], **kwargs)
            return ShardedTensor(y, cut.at(y.ndim - 1), group, weight.sources)
        if cut.dim == 1 and is_sharded(x) and x.placement.dim == x.ndim - 1 and x.placement.like(cut):
            _may_contract(cut)
            return partial_to_whole(func(x.local, weight.local, *args[2:], **kwargs), group)
    raise NoRule("grouped_mm with these operands")
