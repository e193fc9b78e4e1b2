"""The vocabulary: embedding tables and logits cut over the tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lightning_3d.tensor.loss import cut_cross_entropy, has_cut_form
from lightning_3d.tensor.operands import partial_to_whole
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import Args, Kwargs, bind, register_rule, words
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded

_CROSS_ENTROPY = words("input target weight size_average ignore_index reduce reduction label_smoothing")
_EMBEDDING = words("input weight padding_idx max_norm norm_type scale_grad_by_freq sparse")


@register_rule("cross_entropy")
def _cross_entropy(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = bind(_CROSS_ENTROPY, args, kwargs)
    legacy = given.get("size_average") is not None or given.get("reduce") is not None
    if legacy or not has_cut_form(given["input"], given["target"], given.get("weight")):
        raise NoRule("cross_entropy with probabilities, or with cut targets or weights, has no vocab-parallel form")
    return cut_cross_entropy(
        given["input"],
        given["target"],
        given.get("weight"),
        given.get("ignore_index", -100),
        given.get("reduction", "mean"),
        given.get("label_smoothing", 0.0),
    )


@register_rule("embedding")
def _embedding(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Each rank looks up the tokens it owns, zeros for the others, and the sum is the lookup.

    Collectives: one all-reduce of the output (backward: none).
    """
    given = bind(_EMBEDDING, args, kwargs)
    index, weight = given["input"], given["weight"]
    cut = weight.placement if isinstance(weight, ShardedTensor) else None
    special = given.get("max_norm") is not None or given.get("scale_grad_by_freq")
    if is_sharded(index) or cut is None or cut.dim != 0 or len(cut.segments) != 1 or special or cut.copies > 1:
        raise NoRule("embedding with max_norm, scale_grad_by_freq, cut indices, or a table not cut over its rows")
    group, rows = weight.group, weight.local.shape[0]
    offset = group.rank * rows
    mine = (index >= offset) & (index < offset + rows)
    position = torch.where(mine, index - offset, torch.zeros_like(index))
    # an index outside of the whole table fails on every rank, as it does on one device
    position = torch.where((index < 0) | (index >= cut.length), torch.full_like(index, -1), position)
    skipped = given.get("padding_idx")
    if skipped is not None:
        skipped = (skipped % cut.length) - offset
        skipped = skipped if 0 <= skipped < rows else None
    out = F.embedding(position, weight.local, skipped, sparse=given.get("sparse", False))
    return partial_to_whole(out.masked_fill(~mine[..., None], 0.0), group)
