"""Elementwise operations, with broadcasting: the shards meet their own part of every other operand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.operands import align, derive, localize, tensors_in
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, first, register_rule, words
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded, merged_sources

# Padding rows are zero. An operation whose slope at zero is not finite would turn their zero gradient into NaN, which a
# later matmul spreads; then gather instead (gathering drops the padding).
_UNSAFE_AT_ZERO = frozenset(
    words(
        """
        log log2 log10 sqrt rsqrt reciprocal pow rpow float_power logit xlogy atan2 arctan2 hypot erfinv lgamma digamma
        acosh arccosh special_logit special_xlogy
        """
    )
)
_DIVISIONS = frozenset(words("div true_divide truediv rtruediv rdiv divide floor_divide fmod remainder addcdiv"))


def _plain(name: str) -> str:
    return name.strip("_") if name.startswith("__") else name.rstrip("_")


def _check_padding(name: str, args: Args, kwargs: Kwargs, cut: Placement) -> None:
    name = _plain(name)
    if name in _UNSAFE_AT_ZERO:
        raise NoRule(f"{name} of rows that only pad the vocabulary")
    if name in _DIVISIONS:
        divisors = [t for t in tensors_in(args[1:], kwargs) if t.ndim and t.shape[-1] == cut.length]
        if divisors or not is_sharded(args[0]):
            raise NoRule(f"{name} by rows that only pad the vocabulary")


@register_rule("<elementwise>")
def elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Any elementwise function; the result is cut as its sharded operands are."""
    if not kwargs:
        result = _fast(func, args)
        if result is not None:
            return result
    found = tensors_in(args, kwargs)
    sharded = [t for t in found if isinstance(t, ShardedTensor)]
    name = func.__name__
    if sharded[0].placement.padding:
        _check_padding(name, args, kwargs, sharded[0].placement)
    if name in ("to", "type_as") and len(found) > 1:  # x.to(other): other only says which dtype and device
        return _convert(func, args, kwargs)
    from_right, cut = align(sharded)
    group = sharded[0].group

    def part(value: Any) -> Any:
        return localize(value, from_right, cut, group) if isinstance(value, Tensor) else value

    out = func(*map(part, args), **{k: part(v) for k, v in kwargs.items()})
    if not isinstance(out, Tensor):  # x == "not a tensor"
        return out
    ndim = max(t.ndim for t in found)
    return ShardedTensor(out, cut.at(ndim + from_right), group, merged_sources(sharded))


def _fast(func: Any, args: Args) -> ShardedTensor | None:
    """The frequent cases: unary; with a number; two operands cut alike."""
    x = args[0]
    if type(x) is not ShardedTensor or x.placement.padding:
        return None
    if len(args) == 1:
        return ShardedTensor(func(x.local), x.placement, x.group, x.sources, x._global_shape)
    if len(args) == 2:
        y = args[1]
        if type(y) in (int, float):
            return ShardedTensor(func(x.local, y), x.placement, x.group, x.sources, x._global_shape)
        if type(y) is ShardedTensor and y.placement == x.placement and len(x._global_shape) == len(y._global_shape):
            sources = x.sources if x.sources == y.sources else x.sources | y.sources
            return ShardedTensor(func(x.local, y.local), x.placement, x.group, sources)
    return None


def _convert(func: Any, args: Args, kwargs: Kwargs) -> Any:
    rest = [a.local if is_sharded(a) else a for a in args[1:]]
    named = {k: v.local if is_sharded(v) else v for k, v in kwargs.items()}
    x = args[0]
    if not is_sharded(x):
        return func(x, *rest, **named)
    return derive(func(x.local, *rest, **named), x.placement, x)


@register_rule("<elementwise in place>")
def elementwise_in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`x.add_(y)` and the like: writes into the shard, never another one in its place (views of it must see it)."""
    x = args[0]
    if type(x) is not ShardedTensor:
        raise NoRule(f"{func.__name__} writes a cut tensor into a whole one")
    found = tensors_in(args, kwargs)
    if x.placement.padding:
        _check_padding(func.__name__, args, kwargs, x.placement)
    from_right, cut = align([t for t in found if isinstance(t, ShardedTensor)])
    group = x.group
    if x.placement.copies != cut.copies:
        raise NoRule(f"{func.__name__} writes what each rank has for itself into what several ranks hold copies of")

    def part(value: Any) -> Any:
        return localize(value, from_right, cut, group) if isinstance(value, Tensor) else value

    func(*map(part, args), **{k: part(v) for k, v in kwargs.items()})
    x.sources = merged_sources(found)
    return x


@first("type")
def _type(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if len(args) > 1 or kwargs:
        return elementwise(func, args, kwargs)
    return func(args[0].local)


@first("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def _new(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`x.new_zeros(shape)`: with the shape of `x`, cut as `x`, since it will most likely be combined with it."""
    x = args[0]
    name = func.__name__
    shape: Any = kwargs.get("size", args[1] if len(args) == 2 or name == "new_full" else args[1:])
    cut = x.placement
    fits = (
        name != "new_tensor"
        and isinstance(shape, (tuple, list, torch.Size))
        and len(shape) == x.ndim
        and shape[cut.dim] == cut.length
        and not cut.padding
    )
    if not fits:
        return func(x.local, *args[1:], **kwargs)
    shard = list(shape)
    shard[cut.dim] = x.local.shape[cut.dim]
    rest = args[2:] if name == "new_full" else ()
    named = {k: v for k, v in kwargs.items() if k != "size"}
    return derive(func(x.local, shard, *rest, **named), cut, x)


@register_rule("numpy", "tolist", "item", any_argument=False)
def _read(func: Any, args: Args, kwargs: Kwargs) -> Any:
    raise NoRule("reading values needs the whole tensor")


@first("register_post_accumulate_grad_hook", "retain_grad", "backward", "is_contiguous", "detach_")
def _on_shard(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if args[0].placement.copies > 1 and func.__name__ == "backward":
        raise NoRule("several ranks hold it, each with a part of the gradient", fatal=True)
    return func(args[0].local, *args[1:], **kwargs)


@first(
    "stride",
    "data_ptr",
    "storage",
    "untyped_storage",
    "storage_offset",
    "set_",
    "as_strided",
    "share_memory_",
    "resize_",
)
def _storage(func: Any, args: Args, kwargs: Kwargs) -> Any:
    raise NoRule("its storage is one rank's shard", fatal=True)
