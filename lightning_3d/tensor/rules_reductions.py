"""Reductions and normalisations: free over whole dims; over the cut dim sums and extrema, by an all-reduce."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.comm import Reduction
from lightning_3d.tensor import collectives
from lightning_3d.tensor.operands import along_sequence, derive, no_copies
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, argument, first, register_rule, words
from lightning_3d.tensor.rules_elementwise import elementwise
from lightning_3d.tensor.rules_ranking import RANKINGS, rank_over_cut_dim
from lightning_3d.tensor.rules_softmax import reduced_logsumexp
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded

_KEEPS_DIM = ("topk", "sort", "argsort")
_COMBINED = frozenset(words("sum mean nansum any all amax amin max min"))  # the parts of the ranks can be combined
_DIM_AT = {"norm": 2, "topk": 2, "linalg_vector_norm": 2}  # position of `dim` where it is not 1


@first("softmin", "cumsum", "cumprod", "logcumsumexp")
def _along(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, dim = args[0], argument(args, kwargs, 1, "dim")
    if dim is None or dim % x.ndim == x.placement.dim:
        raise NoRule(f"{func.__name__} along the cut dim {x.placement.dim}")
    return derive(func(x.local, *args[1:], **kwargs), x.placement, x)


def _dims(name: str, x: Tensor, args: Args, kwargs: Kwargs) -> tuple[list[int], bool]:
    """(dims that are reduced, whether dims were given)."""
    at = _DIM_AT.get(name, 1)
    dims = args[at] if len(args) > at else kwargs.get("dim", kwargs.get("axis", -1 if name in _KEEPS_DIM else None))
    if dims is None or isinstance(dims, bool) or dims == ():
        return list(range(x.ndim)), False
    return [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims)], True


@first(
    *words("sum mean nansum var std amax amin max min argmax argmin any all prod median topk sort argsort"),
    *words("norm linalg_vector_norm logsumexp"),
)
def _reduce(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, name = args[0], func.__name__
    if name in ("max", "min") and ((len(args) > 1 and isinstance(args[1], Tensor)) or "other" in kwargs):
        return elementwise(func, args, kwargs)
    dims, given = _dims(name, x, args, kwargs)
    cut = x.placement
    if cut.dim in dims:
        return _over_cut_dim(func, args, kwargs, dims, given)
    out = func(x.local, *args[1:], **kwargs)
    shape_of = out[0] if isinstance(out, tuple) else out
    kept = shape_of.ndim == x.ndim
    result = cut.at(cut.dim if kept else cut.dim - sum(d < cut.dim for d in dims))
    if isinstance(out, tuple):  # values and indices
        parts = [derive(part, result, x) for part in out]
        return type(out)(parts) if hasattr(out, "n_fields") else tuple(parts)
    return derive(out, result, x)


def _over_cut_dim(func: Any, args: Args, kwargs: Kwargs, dims: list[int], given: bool) -> Any:
    """Partial results of the shards, combined by an all-reduce of the result's size.

    In a strict plan only for whole reductions (a loss, a guard like `isnan(x).any()`) and along the sequence: over
    features it means a norm between two layers of a pair.
    """
    x: ShardedTensor = args[0]
    name, group = func.__name__, x.group
    no_copies(x.placement, f"{name} over")
    refused = group.strict and given and not along_sequence(x)
    if name in RANKINGS and given and dims == [x.placement.dim] and not refused:
        return rank_over_cut_dim(func, args, kwargs)
    if refused or (x.placement.padding and name != "logsumexp"):
        raise NoRule(f"{name} over the cut dim {x.placement.dim}")
    if name == "logsumexp" and dims == [x.placement.dim]:
        return reduced_logsumexp(x, argument(args, kwargs, 2, "keepdim", False))
    if name in ("norm", "linalg_vector_norm") and len(dims) == x.ndim:
        return _norm(func, args, kwargs)
    if name not in _COMBINED:
        raise NoRule(f"{name} over the cut dim {x.placement.dim}")
    part = func(x.local, *args[1:], **kwargs)
    if name in ("sum", "mean", "nansum"):
        group.conversions += 1
        total = collectives.reduce_out(part, group, fresh=True)
        return total / group.size if name == "mean" else total
    if name in ("any", "all"):
        group.conversions += 1
        return group.all_reduce(part.to(torch.uint8), "max" if name == "any" else "min").to(part.dtype)
    if isinstance(part, tuple):
        raise NoRule(f"{name} with indices over the cut dim {x.placement.dim}")
    return _extremum(x, part, dims, "max" if "max" in name else "min")


def _norm(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """The norm over all elements is the norm of the shards' norms, for every order but 0 (and below)."""
    x: ShardedTensor = args[0]
    order = argument(args, kwargs, 1, "p" if func.__name__ == "norm" else "ord", 2)
    order = 2.0 if order in (None, "fro") else order
    if not isinstance(order, (int, float)) or order <= 0:
        raise NoRule(f"norm of order {order!r} over the cut dim {x.placement.dim}")
    part = func(x.local, *args[1:], **kwargs)
    x.group.conversions += 1
    parts = collectives.gather(part.reshape(1), Placement(0, (x.group.size,)), x.group)
    return torch.linalg.vector_norm(parts, order).view(part.shape)


def _extremum(x: ShardedTensor, part: Tensor, dims: list[int], op: Reduction) -> Tensor:
    """The largest (smallest) element; its gradient is dealt evenly to all elements that have that value."""
    group = x.group
    group.conversions += 1
    top = group.all_reduce(part.detach().clone(), op)
    if not (part.requires_grad and torch.is_grad_enabled()):
        return top
    spread = top.view([1 if d in dims else n for d, n in enumerate(x.local.shape)])
    equal = x.local == spread
    count = group.all_reduce(equal.sum(dims))
    total = collectives.reduce_out(torch.where(equal, x.local, torch.zeros_like(x.local)).sum(dims), group, fresh=True)
    return (total / count).view(top.shape)


@register_rule("layer_norm", "rms_norm")
def _layer_norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if not is_sharded(x) or any(is_sharded(a) for a in (*args[1:], *kwargs.values())):
        raise NoRule("normalisation with cut weights")
    shape = argument(args, kwargs, 1, "normalized_shape")
    if x.placement.dim >= x.ndim - len(shape):
        raise NoRule(f"{func.__name__} normalises over the cut dim {x.placement.dim}: it needs global statistics")

    def enter(value: Any) -> Any:
        return collectives.copy_in(value, x.group) if isinstance(value, Tensor) else value

    out = func(x.local, *map(enter, args[1:]), **{k: enter(v) for k, v in kwargs.items()})
    return derive(out, x.placement, x)


@first("normalize")
def _normalize(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, dim = args[0], argument(args, kwargs, 2, "dim", 1)
    dims = [dim] if isinstance(dim, int) else dim
    if x.placement.dim in [d % x.ndim for d in dims]:
        raise NoRule(f"normalize over the cut dim {x.placement.dim}")
    return derive(func(x.local, *args[1:], **kwargs), x.placement, x)


@first("glu")
def _glu(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, dim = args[0], argument(args, kwargs, 1, "dim", -1)
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()
