"""WHICH class is the best?  Largest and smallest elements along the cut dim, and where they are: predictions.

Every rank ranks what it has; candidates (a value and its place, both exact in float64) are gathered in place of all
logits. Only while steps run: planning takes such an operation for a gather, so that no layer is cut for its sake.

| operation | collective over tp |
|---|---|
| argmax, argmin, max, min | all-gather of one candidate per row and rank; values with gradients: all-reduce |
| topk | all-gather of k candidates per row and rank; with gradients the logits are gathered |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor import collectives
from lightning_3d.tensor.group import is_shape_only
from lightning_3d.tensor.operands import no_copies
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import Args, Kwargs, argument
from lightning_3d.tensor.rules_softmax import unpadded
from lightning_3d.tensor.sharded import ShardedTensor

RANKINGS = frozenset(("argmax", "argmin", "max", "min", "topk"))


def rank_over_cut_dim(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The operation's results, whole on every rank.

    Raises:
        NoRule: The cut dim has several segments or copies; the values are no floating point numbers; topk with
            gradients, or of padded rows (it could choose the padding where elements are masked by -inf).
    """
    x, name = args[0], func.__name__
    largest = bool(argument(args, kwargs, 3, "largest", True)) if name == "topk" else "max" in name
    differentiable = x.requires_grad and torch.is_grad_enabled()
    unfit = name == "topk" and (differentiable or x.placement.padding)
    if unfit or is_shape_only(x.local) or len(x.placement.segments) > 1 or not x.dtype.is_floating_point:
        raise NoRule(f"{name} over the cut dim {x.placement.dim}")
    no_copies(x.placement, f"{name} over")
    x.group.conversions += 1
    if name == "topk":
        count, in_order = argument(args, kwargs, 1, "k"), bool(argument(args, kwargs, 4, "sorted", True))
        values, places = _candidates(x, count, largest)
        top, at = values.topk(count, x.placement.dim, largest, in_order)
        return torch.return_types.topk((top.to(x.dtype), places.gather(x.placement.dim, at)))
    values, places = _candidates(x, 1, largest)
    value, at = _best(values, x.placement.dim, largest)
    place = places.gather(x.placement.dim, at)
    keeps = argument(args, kwargs, 2, "keepdim", False)
    if name.startswith("arg"):
        return place if keeps else place.squeeze(x.placement.dim)
    value = _value_at(x, place) if differentiable else value.to(x.dtype)
    results = (value, place) if keeps else (value.squeeze(x.placement.dim), place.squeeze(x.placement.dim))
    return (torch.return_types.max if largest else torch.return_types.min)(results)


def _candidates(x: ShardedTensor, count: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Every rank's best `count` elements of each row, one rank after the other, and where they are in the whole."""
    dim = x.placement.dim
    local = unpadded(x, float("-inf" if largest else "inf")).detach()
    rows = local.shape[dim]
    found = _best(local, dim, largest) if count == 1 else local.topk(min(count, rows), dim, largest)
    mine = torch.stack([found[0].double(), (found[1] + x.group.rank * rows).double()])
    values, places = torch.cat(x.group.all_gather(mine), dim + 1)
    return values, places.long()


def _best(values: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The first of the largest (smallest) elements, as torch takes it."""
    found = values.max(dim, keepdim=True) if largest else values.min(dim, keepdim=True)
    return found[0], found[1]


def _value_at(x: ShardedTensor, place: Tensor) -> Tensor:
    """The elements at places of the whole; their gradients go to the rank that has them."""
    dim = x.placement.dim
    rows = x.local.shape[dim]
    here = place - x.group.rank * rows
    picked = x.local.gather(dim, here.clamp(0, rows - 1))
    mine = (here >= 0) & (here < rows)
    return collectives.reduce_out(torch.where(mine, picked, torch.zeros_like(picked)), x.group, fresh=True)
