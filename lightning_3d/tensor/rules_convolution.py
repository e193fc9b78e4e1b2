"""Convolutions: depthwise ones act on each channel alone, so a cut over the channels goes through (Mamba, ConvNeXt)."""

from __future__ import annotations

from typing import Any

from lightning_3d.tensor.collectives import copy_in
from lightning_3d.tensor.operands import derive, take
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import Args, Kwargs, bind, register_rule, words
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded

_NAMES = words("input weight bias stride padding dilation groups")


@register_rule("conv1d", "conv2d", "conv3d")
def _convolution(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(_NAMES, args, kwargs)
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if not isinstance(x, ShardedTensor) or is_sharded(weight) or is_sharded(bias):
        raise NoRule(f"{func.__name__} with a cut weight")
    channels = x.ndim - weight.ndim + 1  # 1 with a batch dim, 0 without
    group, cut = x.group, x.placement
    if cut.dim < channels:  # the batch is cut
        given.update(input=x.local, weight=copy_in(weight, group))
        given["bias"] = None if bias is None else copy_in(bias, group)
        return derive(func(**given), cut, x)
    if cut.dim > channels:
        raise NoRule(f"{func.__name__} over the cut dim {cut.dim}")
    if given.get("groups", 1) != x.shape[channels] or cut.padding:
        raise NoRule(f"{func.__name__} mixes the channels, which are cut", kind="layout")
    repeats = weight.shape[0] // x.shape[channels]  # outputs per channel
    out = cut.cut(tuple(n * repeats for n in cut.segments))
    given.update(input=x.local, weight=take(weight, out.at(0), group), groups=x.local.shape[channels])
    given["bias"] = None if bias is None else take(bias, out.at(0), group)
    return derive(func(**given), out, x)
