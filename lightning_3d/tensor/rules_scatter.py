"""Picking and placing by an index tensor (`gather`, `scatter_add`, `index_add`): along dims that are whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_3d.tensor.operands import align, derive, localize
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, bind, register_rule, words
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded

_GATHER = words("input dim index")
_SCATTER = words("input dim index src")
_INDEX_ADD = words("input dim index source")


def _part(x: Tensor, cut: Placement, head: ShardedTensor) -> Tensor:
    """This rank's part of an operand as long along the cut dim as the sharded one."""
    if x.ndim != head.ndim or x.shape[cut.dim] != cut.length or cut.length == 1:
        raise NoRule(f"an operand of shape {tuple(x.shape)} does not span the cut dim {cut.dim}")
    return localize(x, cut.dim - head.ndim, cut, head.group)


def _along_whole_dims(
    func: Any, given: Kwargs, alike: tuple[str, ...], in_place: bool, positional: tuple[str, ...]
) -> Any:
    """Run on the shards; the operands named in `alike` are as long as each other along the cut dim."""
    x = given["input"]
    operands = [given[k] for k in alike if isinstance(given.get(k), Tensor)]
    sharded = [t for t in operands if isinstance(t, ShardedTensor)]
    if not sharded or any(is_sharded(v) for k, v in given.items() if k not in alike):
        raise NoRule(f"{func.__name__} at positions given by a cut tensor")
    if in_place and not is_sharded(x):
        raise NoRule(f"{func.__name__} writes a cut tensor into a whole one")
    _, cut = align(sharded)
    head = sharded[0]
    if not isinstance(given["dim"], int) or given["dim"] % head.ndim == cut.dim:
        raise NoRule(f"{func.__name__} along the cut dim {cut.dim}", kind="layout")
    if in_place and x.placement.copies != cut.copies:
        raise NoRule(f"{func.__name__} writes what each rank has for itself into what several ranks hold copies of")
    parts = {k: _part(v, cut, head) if k in alike and isinstance(v, Tensor) else v for k, v in given.items()}
    first = [parts.pop(k) for k in positional if k in parts]
    out = func(*first, **parts)
    if in_place:
        x.local, x.sources = out, derive(out, cut, *sharded).sources
        return x
    return derive(out, cut, *sharded)


@register_rule("gather")
def _gather(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _along_whole_dims(func, bind(_GATHER, args, kwargs), ("input", "index"), False, _GATHER)


@register_rule("take_along_dim")
def _take_along_dim(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(("input", "indices", "dim"), args, kwargs)
    return _along_whole_dims(func, {"dim": None, **given}, ("input", "indices"), False, ("input", "indices", "dim"))


@register_rule(*words("scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_"))
def _scatter(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Sums and products of the elements that meet at one position are formed on the rank that owns it."""
    given = bind((*_SCATTER, "reduce"), args, kwargs)
    order = _SCATTER if "src" in given else (*_SCATTER[:3], "value")
    if "value" not in given and "src" not in given:
        raise NoRule(f"{func.__name__} without a source")
    in_place = func.__name__.endswith("_")
    return _along_whole_dims(func, given, ("input", "index", "src"), in_place, (*order, *_reduce_position(func)))


def _reduce_position(func: Any) -> tuple[str, ...]:
    return ("reduce",) if func.__name__.startswith("scatter_reduce") else ()


@register_rule(*words("index_add index_add_ index_copy index_copy_"))
def _index_add(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(_INDEX_ADD, args, kwargs)
    return _along_whole_dims(func, given, ("input", "source"), func.__name__.endswith("_"), _INDEX_ADD)


@register_rule("index_fill", "index_fill_")
def _index_fill(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind((*_GATHER, "value"), args, kwargs)
    if isinstance(given.get("value"), Tensor):
        raise NoRule("index_fill with a value that is a tensor")
    return _along_whole_dims(func, given, ("input",), func.__name__.endswith("_"), (*_GATHER, "value"))
