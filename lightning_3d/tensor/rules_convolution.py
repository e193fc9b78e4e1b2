"""Convolutions: cut over the channels, as linear layers over the features; groups of channels stay on their rank.

| input | weight | result | collectives forward | backward |
|---|---|---|---|---|
| whole | cut over its outputs | cut over the channels (column) | none | all-reduce of dx |
| cut over the channels | cut over its inputs | whole (row) | all-reduce of the result | none |
| cut over the channels | whole, grouped (depthwise) | cut over the channels | none | all-gather of dw |
| batch cut | whole | batch cut | none | all-reduce of dw |
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_3d.tensor.collectives import copy_in, reduce_out
from lightning_3d.tensor.operands import derive, no_copies, take
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, bind, register_rule, words
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded

_NAMES = words("input weight bias stride padding dilation groups")


@register_rule("conv1d", "conv2d", "conv3d")
def _convolution(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(_NAMES, args, kwargs)
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    channels = x.ndim - weight.ndim + 1  # 1 with a batch dim, 0 without
    if isinstance(weight, ShardedTensor) and given.get("groups", 1) == 1:
        if weight.placement.padding:
            raise NoRule(f"{func.__name__} with a padded weight")
        return _column(func, given, channels) if weight.placement.dim == 0 else _row(func, given, channels)
    if not isinstance(x, ShardedTensor):
        raise NoRule(f"{func.__name__} of groups on a whole input, or with only a cut bias")
    group, cut = x.group, x.placement
    if cut.dim < channels:  # the batch is cut
        if is_sharded(weight) or is_sharded(bias):
            raise NoRule(f"{func.__name__} with a cut weight on an input whose batch is cut")
        given.update(input=x.local, weight=copy_in(weight, group))
        given["bias"] = None if bias is None else copy_in(bias, group)
        return derive(func(**given), cut, x)
    if cut.dim > channels:
        raise NoRule(f"{func.__name__} over the cut dim {cut.dim}")
    return _grouped(func, given, cut, weight, bias)


def grouped_placement(x: ShardedTensor, weight: Tensor, groups: int) -> Placement:
    """How the outputs of a grouped convolution are cut (a placement of dim 0 of its weight).

    Raises:
        NoRule: The groups cannot be dealt as the channels are.
    """
    cut = x.placement
    inputs, outputs = cut.length // groups, weight.shape[0] // groups  # of one group
    if cut.padding or any(n % (cut.chunks(x.group.size) * inputs) for n in cut.segments):
        raise NoRule("a convolution mixes the channels, which are cut", kind="layout")
    return cut.cut(tuple(n // inputs * outputs for n in cut.segments), 0)


def _grouped(func: Any, given: Kwargs, cut: Placement, weight: Tensor, bias: Tensor | None) -> Any:
    """Whole groups of channels on every rank, as in depthwise convolutions."""
    x: ShardedTensor = given["input"]
    groups = given.get("groups", 1)
    out = grouped_placement(x, weight, groups)

    def part(parameter: Tensor) -> Tensor:
        if not isinstance(parameter, ShardedTensor):
            return take(parameter, out, x.group)
        if parameter.placement != out:
            raise NoRule(f"{func.__name__}: its groups are cut as {parameter.placement}, its input as {cut}")
        return parameter.local

    given.update(input=x.local, weight=part(weight), groups=groups // cut.chunks(x.group.size))
    given["bias"] = None if bias is None else part(bias)
    return derive(func(**given), out.at(cut.dim), x)


def _column(func: Any, given: Kwargs, channels: int) -> Tensor:
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    cut, group = weight.placement, weight.group
    if is_sharded(x):
        raise NoRule(f"the input of a {func.__name__} whose outputs are cut is cut, too")
    if isinstance(bias, ShardedTensor):
        if not bias.placement.like(cut):
            raise NoRule(f"weight and bias of {func.__name__} are cut differently")
        bias = bias.local
    elif bias is not None:
        bias = take(bias, cut, group)
    y = func(**{**given, "input": copy_in(x, group), "weight": weight.local, "bias": bias})
    return ShardedTensor(y, cut.at(channels), group, weight.sources)


def _row(func: Any, given: Kwargs, channels: int) -> Tensor:
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    cut, group = weight.placement, weight.group
    if cut.dim != 1:
        raise NoRule(f"{func.__name__} with a weight cut over its window")
    no_copies(cut, "contraction over")
    if not isinstance(x, ShardedTensor):
        part = take(x, cut.at(channels), group)
    elif x.placement.dim != channels or not x.placement.like(cut):
        raise NoRule(f"{func.__name__}: the input is cut as {x.placement}, the weight as {cut}")
    else:
        part = x.local
    y = reduce_out(func(**{**given, "input": part, "weight": weight.local, "bias": None}), group, fresh=True)
    return y if bias is None else y + bias.view(-1, *[1] * (weight.ndim - 2))  # once, not once per rank
