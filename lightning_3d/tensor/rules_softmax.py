"""Softmax and its family along the cut dim: only maxima and sums cross the ranks, the result stays cut.

| operation | forward | backward |
|---|---|---|
| logsumexp | all-reduce of the maxima, of the sums | none |
| log_softmax, softmax | the same | all-reduce of one number per row |
| nll_loss | all-reduce of one number per target | none |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor import collectives
from lightning_3d.tensor.operands import along_sequence, derive, no_copies, unpadded_rows
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import Args, Kwargs, argument, bind, first, words
from lightning_3d.tensor.sharded import ShardedTensor

_NLL = words("input target weight size_average ignore_index reduce reduction")


def unpadded(x: ShardedTensor, fill: float = float("-inf")) -> Tensor:
    """The shard with `fill` in rows that are padding."""
    if not x.placement.padding:
        return x.local
    shape = [1] * x.ndim
    shape[x.placement.dim] = -1
    row = torch.arange(x.local.shape[x.placement.dim], device=x.device).view(shape)
    return x.local.masked_fill(row >= unpadded_rows(x), fill)


def log_sum_exp(x: ShardedTensor) -> Tensor:
    """log(sum(exp(x))) along the cut dim, which is kept with size 1; a whole tensor."""
    dim, group = x.placement.dim, x.group
    local = unpadded(x)
    top = group.all_reduce(local.detach().amax(dim, keepdim=True), "max")
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    total = collectives.reduce_out((local - top).exp().sum(dim, keepdim=True), group, fresh=True)
    return total.log() + top


def _may_reduce(name: str, x: ShardedTensor) -> None:
    if x.group.strict and not along_sequence(x):
        raise NoRule(f"{name} along the cut dim {x.placement.dim}")
    no_copies(x.placement, f"{name} along")
    x.group.conversions += 1


def _dtype(args: Args, kwargs: Kwargs) -> torch.dtype | None:
    found = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)]
    return found[0] if found else None


@first("softmax", "log_softmax")
def _softmax(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, dim = args[0], argument(args, kwargs, 1, "dim")
    if dim is None:
        raise NoRule(f"{func.__name__} without dim")
    if dim % x.ndim != x.placement.dim:
        return derive(func(x.local, *args[1:], **kwargs), x.placement, x)
    _may_reduce(func.__name__, x)
    dtype = _dtype(args[1:], kwargs)
    kind = x.device.type
    if dtype is None and torch.is_autocast_enabled(kind) and x.dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32  # as autocast's softmax
    if dtype is not None:
        x = x.to(dtype)
    log = derive(x.local - collectives.copy_in(log_sum_exp(x), x.group), x.placement, x)
    return log if func.__name__ == "log_softmax" else log.exp()


def reduced_logsumexp(x: ShardedTensor, keepdim: bool) -> Tensor:
    """`torch.logsumexp` along the cut dim."""
    _may_reduce("logsumexp", x)
    out = log_sum_exp(x)
    return out if keepdim else out.squeeze(x.placement.dim)


@first("nll_loss")
def _nll_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(_NLL, args, kwargs)
    x, target = given["input"], given["target"]
    special = (given.get(k) is not None for k in ("weight", "size_average", "reduce"))
    classes = 0 if x.ndim == 1 else 1
    if (
        any(special)
        or x.placement.dim != classes
        or len(x.placement.segments) != 1
        or x.placement.copies > 1
        or isinstance(target, ShardedTensor)
    ):
        raise NoRule("nll_loss with class weights, or of log-probabilities that are not cut over the classes")
    ignored, reduction, group = given.get("ignore_index", -100), given.get("reduction", "mean"), x.group
    rows = x.local.shape[classes]
    offset = group.rank * rows
    mine = (target >= offset) & (target < offset + rows)
    at = (target - offset).clamp(0, rows - 1)
    picked = x.local.gather(classes, at.unsqueeze(classes)).squeeze(classes)
    counts = target != ignored
    loss = -collectives.reduce_out(torch.where(mine & counts, picked, torch.zeros_like(picked)), group, fresh=True)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / counts.sum()
