"""Views: the cut follows the dims. Only shape arithmetic, never communication."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from lightning_3d.tensor.operands import derive
from lightning_3d.tensor.placement import NoRule, Placement, view_placement
from lightning_3d.tensor.registry import Args, Kwargs, argument, first, register_rule
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded


def shape_argument(args: Args, kwargs: Kwargs, name: str) -> tuple[int, ...]:
    """A shape given as one tuple or as separate numbers."""
    rest = args[1:] if len(args) > 1 else (kwargs[name],)
    if len(rest) == 1 and isinstance(rest[0], (tuple, list, torch.Size)):
        rest = tuple(rest[0])
    return rest


@functools.lru_cache(4096)
def _view_plan(
    old: torch.Size, cut: Placement, new: tuple[int, ...], size: int
) -> tuple[Placement, torch.Size, tuple[int, ...]]:
    if -1 in new:
        known = -math.prod(new)
        if known == 0 or old.numel() % known:
            raise RuntimeError(f"shape {list(new)} is invalid for input of size {old.numel()}")
        new = tuple(old.numel() // known if n == -1 else n for n in new)
    if math.prod(new) != old.numel():
        raise RuntimeError(f"shape {list(new)} is invalid for input of size {old.numel()}")
    cut = view_placement(old, cut, new, size)
    return cut, torch.Size(new), cut.local_shape(new, size)


def reshape(x: ShardedTensor, shape: Sequence[int], as_view: bool = False) -> ShardedTensor:
    """Reshape to a global shape (which may hold one -1)."""
    cut, new, local_shape = _view_plan(x._global_shape, x.placement, tuple(shape), x.group.size)
    out = x.local.view(local_shape) if as_view and not x.group.dry else x.local.reshape(local_shape)
    return ShardedTensor(out, cut, x.group, x.sources, new)


@first("view", "reshape", "_unsafe_view")
def _view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if (len(args) > 1 and isinstance(args[1], torch.dtype)) or "dtype" in kwargs:
        raise NoRule("view as another dtype")
    name = "shape" if "shape" in kwargs else "size"
    return reshape(args[0], shape_argument(args, kwargs, name), as_view=func.__name__ == "view")


@register_rule("view_as", "reshape_as")
def _view_as(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, other = args[0], argument(args, kwargs, 1, "other")
    return x.reshape(tuple(other.shape))


@first("flatten")
def _flatten(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    start = argument(args, kwargs, 1, "start_dim", 0) % x.ndim
    end = argument(args, kwargs, 2, "end_dim", -1) % x.ndim
    shape = tuple(x.shape)
    return reshape(x, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@first("ravel")
def _ravel(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return reshape(args[0], (-1,))


@first("unflatten")
def _unflatten(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    dim = argument(args, kwargs, 1, "dim") % x.ndim
    sizes = tuple(argument(args, kwargs, 2, "sizes"))
    if -1 in sizes:
        known = -math.prod(sizes)
        sizes = tuple(x.shape[dim] // known if n == -1 else n for n in sizes)
    shape = tuple(x.shape)
    return reshape(x, (*shape[:dim], *sizes, *shape[dim + 1 :]))


@first("transpose", "swapaxes", "swapdims")
def _transpose(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    a = argument(args, kwargs, 1, "dim0", kwargs.get("axis0")) % x.ndim
    b = argument(args, kwargs, 2, "dim1", kwargs.get("axis1")) % x.ndim
    dim = x.placement.dim
    cut = x.placement.at(b if dim == a else a) if dim in (a, b) else x.placement
    return ShardedTensor(x.local.transpose(a, b), cut, x.group, x.sources)


@first("t", "adjoint")
def _t(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if func.__name__ == "adjoint" and x.is_complex():
        raise NoRule("adjoint of a complex tensor")
    return x if x.ndim < 2 else x.transpose(-2, -1)


@first("permute")
def _permute(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    order = [i % x.ndim for i in shape_argument(args, kwargs, "dims")]
    return derive(x.local.permute(order), x.placement.at(order.index(x.placement.dim)), x)


@first("movedim", "moveaxis")
def _movedim(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    source, target = argument(args, kwargs, 1, "source"), argument(args, kwargs, 2, "destination")
    sources = [source] if isinstance(source, int) else list(source)
    targets = [target] if isinstance(target, int) else list(target)
    placed = {t % x.ndim: s % x.ndim for s, t in zip(sources, targets, strict=True)}
    rest = iter(d for d in range(x.ndim) if d not in placed.values())
    return x.permute([placed[d] if d in placed else next(rest) for d in range(x.ndim)])


@first("unsqueeze")
def _unsqueeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    dim = argument(args, kwargs, 1, "dim") % (x.ndim + 1)
    cut = x.placement
    return derive(x.local.unsqueeze(dim), cut.at(cut.dim + (dim <= cut.dim)), x)


@first("squeeze")
def _squeeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    given = argument(args, kwargs, 1, "dim")
    dims = range(x.ndim) if given is None else [given] if isinstance(given, int) else given
    # by global sizes: a shard of size 1 of a larger dim must stay
    drop = sorted(d % x.ndim for d in dims if x.shape[d] == 1)
    cut = x.placement
    return derive(x.local.squeeze(tuple(drop)), cut.at(cut.dim - sum(d < cut.dim for d in drop)), x)


@register_rule("expand", "expand_as", "broadcast_to")
def _expand(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if func.__name__ == "expand_as":
        shape = tuple(argument(args, kwargs, 1, "other").shape)
    else:
        shape = shape_argument(args, kwargs, "size")
    if not is_sharded(x):
        return x.expand(shape)
    cut = x.placement
    dim = cut.dim + len(shape) - x.ndim
    if shape[dim] not in (-1, cut.length):
        raise NoRule(f"expand of the cut dim {cut.dim}")
    target = list(shape)
    target[dim] = x.local.shape[cut.dim]
    return derive(x.local.expand(target), cut.at(dim), x)


@first("repeat", "tile")
def _repeat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, cut = args[0], args[0].placement
    repeats = shape_argument(args, kwargs, "repeats" if func.__name__ == "repeat" else "dims")
    repeats = (1,) * (x.ndim - len(repeats)) + tuple(repeats)
    dim = cut.dim + len(repeats) - x.ndim
    if cut.padding and repeats[dim] != 1:
        raise NoRule("repeat of a padded dim")
    segments = cut.segments * repeats[dim]
    return derive(x.local.repeat(repeats), Placement(dim, segments, cut.padding, cut.axis, cut.copies), x)


@first("repeat_interleave")
def _repeat_interleave(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, cut = args[0], args[0].placement
    repeats, dim = argument(args, kwargs, 1, "repeats"), argument(args, kwargs, 2, "dim")
    if dim is None or not isinstance(repeats, int):
        raise NoRule("repeat_interleave without dim, or with a tensor of repeats")
    dim %= x.ndim
    if dim == cut.dim and cut.padding:
        raise NoRule("repeat of a padded dim")
    segments = tuple(n * repeats for n in cut.segments) if dim == cut.dim else cut.segments
    return derive(
        x.local.repeat_interleave(repeats, dim), Placement(cut.dim, segments, cut.padding, cut.axis, cut.copies), x
    )


@first("view_as_complex", "view_as_real")
def _as_complex(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if func.__name__ == "view_as_complex" and x.placement.dim == x.ndim - 1:
        raise NoRule("view_as_complex over the cut dim")
    return derive(func(x.local), x.placement, x)


@first("roll", "flip")
def _along_dims(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, name = args[0], func.__name__
    if name == "flip":
        dims: Any = shape_argument(args, kwargs, "dims")
    else:
        dims = argument(args, kwargs, 2, "dims")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or x.placement.dim in [d % x.ndim for d in dims]:
        raise NoRule(f"{name} along the cut dim {x.placement.dim}")
    return derive(func(x.local, *args[1:], **kwargs), x.placement, x)


@first("triu", "tril", "diagonal")
def _triangle(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if func.__name__ == "diagonal" or x.placement.dim >= x.ndim - 2:
        raise NoRule(f"{func.__name__} over the cut dim {x.placement.dim}")
    return derive(func(x.local, *args[1:], **kwargs), x.placement, x)


@first("pad")
def _pad(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, widths = args[0], argument(args, kwargs, 1, "pad")
    from_last = x.ndim - 1 - x.placement.dim  # F.pad counts dims from the last
    if len(widths) > 2 * from_last and (widths[2 * from_last] or widths[2 * from_last + 1]):
        raise NoRule(f"pad of the cut dim {x.placement.dim}")
    return derive(func(x.local, *args[1:], **kwargs), x.placement, x)
