"""Scaled dot product attention: heads (or the batch) cut over the ranks; every rank attends with its own heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.collectives import copy_in, slice_overlapping
from lightning_3d.tensor.operands import localize, no_copies, take
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import Args, Kwargs, bind, register_rule
from lightning_3d.tensor.rules_random import rank_stream
from lightning_3d.tensor.sharded import ShardedTensor, merged_sources

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@register_rule("scaled_dot_product_attention")
def _attention(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(_NAMES, args, kwargs)
    query, mask = given["query"], given.get("attn_mask")
    if not isinstance(query, ShardedTensor):
        raise NoRule("attention with a whole query and cut keys or values")
    group, cut = query.group, query.placement
    from_right = cut.dim - query.ndim
    if from_right >= -2:
        heads = query.shape[-3] if query.ndim >= 4 and from_right == -1 else None
        raise NoRule("attention over a dim that is cut", kind="layout", heads=heads)
    gqa = bool(given.get("enable_gqa"))
    key = _key_value(given["key"], query, from_right, gqa)
    value = _key_value(given["value"], query, from_right, gqa)
    if mask is not None:
        if isinstance(mask, ShardedTensor) and (
            mask.placement.dim - mask.ndim != from_right or not mask.placement.like(cut)
        ):
            raise NoRule("attention mask cut differently from the query")
        given["attn_mask"] = localize(mask, from_right, cut, group)
    p = given.get("dropout_p", 0.0)
    if p:
        no_copies(cut, "other masks on")
    if p and group.exact_dropout:
        return _explicit(query, key, value, mask, given)
    given.update(query=query.local, key=key, value=value)
    if p:
        with rank_stream(group, query.local):
            out = func(**given)
    else:
        out = func(**given)
    return ShardedTensor(out, cut, group, merged_sources([query, kwargs.get("key"), kwargs.get("value"), *args[1:3]]))


def _key_value(x: Tensor, query: ShardedTensor, from_right: int, gqa: bool) -> Tensor:
    """The keys or values this rank's query heads attend to."""
    cut, group = query.placement, query.group
    heads, count = query.shape[from_right], x.shape[from_right]
    if isinstance(x, ShardedTensor):
        if x.placement.dim - x.ndim != from_right:
            raise NoRule("queries and keys or values are cut along different dims")
        repeats = heads // count
        if x.placement.copies > 1 and cut.copies == 1:
            return _own_heads(x, query, from_right, gqa)
        if x.placement.copies != cut.copies:
            raise NoRule("query heads and key/value heads are held by different numbers of ranks", kind="layout")
        dealt_alike = tuple(n * repeats for n in x.placement.segments) == cut.segments
        if not dealt_alike or (repeats != 1 and not (gqa and from_right == -3)):
            hints = [x.placement.segments, cut.segments]
            raise NoRule("query heads and key/value heads are dealt to the ranks differently", hints, kind="layout")
        return x.local
    if count == heads:
        return take(x, cut.at(x.ndim + from_right), group)
    if gqa and from_right == -3 and len(cut.segments) == 1:
        # fewer key/value heads than ranks (or not divisible): each rank takes those its query heads use
        repeats, mine, chunk = heads // count, query.local.shape[from_right], group.rank // cut.copies
        first, last = chunk * mine // repeats, -(-(chunk + 1) * mine // repeats)
        if repeats % mine and mine % repeats:
            raise NoRule("groups of key/value heads straddle ranks")
        group.conversions += 1
        return slice_overlapping(x, x.ndim + from_right, first, last - first, group)
    if count != 1:
        raise NoRule("key/value heads do not match the query heads")
    return copy_in(x, group)


def _own_heads(x: ShardedTensor, query: ShardedTensor, from_right: int, gqa: bool) -> Tensor:
    """Of key/value heads that several ranks hold, those this rank's query heads attend to."""
    cut, group = query.placement, query.group
    repeats, mine = query.shape[from_right] // x.shape[from_right], query.local.shape[from_right]
    straddles = repeats % mine and mine % repeats
    alike = tuple(n * repeats for n in x.placement.segments) == cut.segments and len(cut.segments) == 1
    if not alike or straddles or (repeats != 1 and not (gqa and from_right == -3)):
        raise NoRule("query heads and key/value heads are dealt to the ranks differently", kind="layout")
    before = group.rank % x.placement.copies * mine  # query heads of the same chunk on earlier ranks
    first, last = before // repeats, -(-(before + mine) // repeats)
    return x.local.narrow(x.placement.dim, first, last - first)


def _explicit(query: ShardedTensor, key: Tensor, value: Tensor, mask: Tensor | None, given: Kwargs) -> Tensor:
    """Attention written out, so that its dropout can use the global mask (`exact_dropout`)."""
    cut, group = query.placement, query.group
    repeats = query.local.shape[-3] // key.shape[-3] if given.get("enable_gqa") else 1
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    keys, values = ShardedTensor(key, cut, group), ShardedTensor(value, cut, group)
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = torch.matmul(query, keys.transpose(-2, -1)) * scale
    if given.get("is_causal"):
        square = torch.ones(scores.shape[-2], scores.shape[-1], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(square.tril().logical_not(), float("-inf"))
    if mask is not None:
        allowed = mask.dtype == torch.bool
        scores = scores.masked_fill(mask.logical_not(), float("-inf")) if allowed else scores + mask
    return torch.matmul(F.dropout(torch.softmax(scores, -1), given["dropout_p"], True), values)
