"""Images and sequences of channels: pooling, resampling and norms, with the channels (or the batch) cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.collectives import copy_in
from lightning_3d.tensor.operands import derive, no_copies, take
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, bind, first, register_rule, words
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded

_POOLS = [f"{kind}_pool{n}d" for kind in ("avg", "max", "adaptive_avg", "adaptive_max", "lp") for n in (1, 2, 3)]
_GROUP_NORM = words("input num_groups weight bias eps")
_BATCH_NORM = words("input running_mean running_var weight bias training momentum eps")


@first(*_POOLS, *(f"{name}_with_indices" for name in _POOLS if "max" in name))
def _pool(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Windows over the last dims, as many as the name says."""
    x = args[0]
    window = int(func.__name__.partition("pool")[2][0])
    return _each_channel(func, args, kwargs, x.ndim - window)


@first("interpolate", "upsample", "upsample_nearest", "upsample_bilinear")
def _resample(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _each_channel(func, args, kwargs, 2)


def _each_channel(func: Any, args: Args, kwargs: Kwargs, leading: int) -> Any:
    """`func` treats all of the first `leading` dims alike, and keeps them."""
    x = args[0]
    if x.placement.dim >= leading:
        raise NoRule(f"{func.__name__} over the cut dim {x.placement.dim}")
    out = func(x.local, *args[1:], **kwargs)
    if isinstance(out, tuple):
        return tuple(derive(part, x.placement, x) for part in out)
    return derive(out, x.placement, x)


def _affine(value: Any, cut: Placement, x: ShardedTensor) -> Any:
    """This rank's part of a parameter that has one number per channel."""
    if not isinstance(value, Tensor):
        return value
    if cut.dim == 0:
        if is_sharded(value):
            raise NoRule("a norm with a cut weight on an input whose batch is cut")
        return copy_in(value, x.group)
    if isinstance(value, ShardedTensor):
        if not value.placement.like(cut):
            raise NoRule("the weight of the norm is cut differently from the channels")
        return value.local
    return take(value, cut.at(0), x.group)


def _channels(name: str, x: Any) -> Placement:
    if not isinstance(x, ShardedTensor):
        raise NoRule(f"{name} with a cut weight only")
    if x.placement.dim > 1 or x.placement.padding:
        raise NoRule(f"{name} over the cut dim {x.placement.dim}")
    return x.placement


@register_rule("group_norm")
def _group_norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(_GROUP_NORM, args, kwargs)
    x, groups = given["input"], given["num_groups"]
    cut = _channels("group_norm", x)
    if cut.dim == 1:
        width, chunks = x.shape[1] // groups, cut.chunks(x.group.size)
        if any(n % (chunks * width) for n in cut.segments):
            raise NoRule(f"{groups} groups of channels cannot be dealt to {chunks} ranks", kind="layout")
        given["num_groups"] = groups // chunks
    given.update(input=x.local, weight=_affine(given.get("weight"), cut, x), bias=_affine(given.get("bias"), cut, x))
    return derive(func(**given), cut, x)


@register_rule("batch_norm")
def _batch_norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Statistics of each channel are local; the running ones, whole on every rank, are put together again.

    Collectives: in training with running statistics two all-gathers of one number per channel.
    """
    given = bind(_BATCH_NORM, args, kwargs)
    x, buffers = given["input"], [given.get(k) for k in ("running_mean", "running_var")]
    cut = _channels("batch_norm", x)
    if cut.dim != 1 or any(is_sharded(b) for b in buffers):
        raise NoRule("batch_norm with a cut batch: it needs statistics of all of it")
    kept = [None if b is None else cut.at(0).to_local(b, x.group.rank, x.group.size).clone() for b in buffers]
    given.update(zip(("running_mean", "running_var"), kept, strict=True))
    given.update(input=x.local, weight=_affine(given.get("weight"), cut, x), bias=_affine(given.get("bias"), cut, x))
    if given.get("training"):
        no_copies(cut, "statistics of")
    out = func(**given)
    if given.get("training"):
        with torch.no_grad():
            for buffer, part in zip(buffers, kept, strict=True):
                if buffer is not None and part is not None:
                    buffer.copy_(cut.at(0).to_global(x.group.all_gather(part), x.group.size))
    return derive(out, cut, x)
