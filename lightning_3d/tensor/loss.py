"""WHAT is the loss of logits that are cut over the vocabulary?  Cross-entropy that never gathers them.

Megatron-style (Shoeybi et al., 2019, section 3): per token only the maximum, the sum of exponentials and the target's
logit cross the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.probe.intercept import original_apply
from lightning_3d.tensor.group import TensorGroup, is_shape_only
from lightning_3d.tensor.operands import unpadded_rows
from lightning_3d.tensor.sharded import ShardedTensor, whole


class _VocabCrossEntropy(torch.autograd.Function):
    """Loss per row of (rows, local vocabulary) logits; rows of padding never take part."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        valid: int,
        vocabulary: int,
        ignore_index: int,
        smoothing: float,
        weight: Tensor | None,
        group: TensorGroup,
    ) -> Tensor:
        x = logits if logits.dtype == torch.float64 else logits.float()
        width = x.shape[-1]
        offset = group.rank * width
        if valid < width:
            x = x.masked_fill(torch.arange(width, device=x.device) >= valid, float("-inf"))
        z = x - group.all_reduce(x.amax(-1), "max")[:, None]
        mine = (target >= offset) & (target < offset + valid)
        at = (target - offset).clamp(0, max(valid - 1, 0))
        picked = torch.where(mine, z.gather(1, at[:, None])[:, 0], z.new_zeros(()))
        e = z.exp()
        sums = [e.sum(-1), picked]
        weights = None if weight is None else weight[offset : offset + valid].to(z.dtype)  # of the classes here
        if smoothing:
            sums.append((z[:, :valid] if weights is None else z[:, :valid] * weights).sum(-1))
        total = group.all_reduce(torch.stack(sums))
        log_sum = total[0].log()
        counts = target != ignore_index
        # of the target's class, and of all classes
        own = None if weight is None else weight[target.clamp(0, vocabulary - 1)].to(z.dtype)
        everyone = vocabulary if weight is None else weight.to(z.dtype).sum()
        loss = log_sum - total[1]
        loss = loss if own is None else own * loss
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing / vocabulary * (everyone * log_sum - total[2])
        ctx.save_for_backward(e.div_(total[0][:, None]), mine & counts, at, counts, weights, own)
        ctx.settings = (smoothing, vocabulary, valid, logits.dtype, everyone)
        return torch.where(counts, loss, loss.new_zeros(()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        softmax, mine, at, counts, weights, own = ctx.saved_tensors
        smoothing, vocabulary, valid, dtype, everyone = ctx.settings
        grad = torch.where(counts, grad, grad.new_zeros(()))
        hard = (1 - smoothing) * (grad if own is None else own * grad)  # of log(sum) - logit of the target
        out = softmax * (hard + smoothing / vocabulary * everyone * grad)[:, None]
        if smoothing:
            soft = (smoothing / vocabulary) * grad[:, None]
            out[:, :valid] -= soft if weights is None else soft * weights
        out.scatter_add_(1, at[:, None], torch.where(mine, -hard, hard.new_zeros(()))[:, None])
        return (out.to(dtype), *(None,) * 7)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` on logits that are cut over the classes, which stay cut.

    Args:
        logits: (N, C), (N, C, d1, ...) or (C,); a `ShardedTensor` cut along C (whole logits take the ordinary path).
        target: Class indices, whole, equal on all ranks.
        weight: Weight per class, whole, equal on all ranks.
        ignore_index: Targets that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: As in `F.cross_entropy`.

    Returns:
        The loss, equal on all ranks; float32 under autocast.

    Collectives: two all-reduces of one and of two (smoothing: three) numbers per target; none backward.
    """
    if has_cut_form(logits, target, weight):
        assert isinstance(logits, ShardedTensor)
        return cut_cross_entropy(logits, target, weight, ignore_index, reduction, label_smoothing)
    return F.cross_entropy(
        whole(logits),
        whole(target),
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def has_cut_form(logits: Any, target: Tensor, weight: Tensor | None) -> bool:
    """Whether the loss can be computed without gathering the logits."""
    return (
        isinstance(logits, ShardedTensor)
        and logits.placement.dim == (0 if logits.ndim == 1 else 1)
        and len(logits.placement.segments) == 1
        and logits.placement.copies == 1
        and not isinstance(target, ShardedTensor)
        and not target.is_floating_point()
        and not isinstance(weight, ShardedTensor)
    )


def cut_cross_entropy(
    logits: ShardedTensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> Tensor:
    """`vocab_parallel_cross_entropy` for arguments with `has_cut_form`."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction!r} is not a valid reduction: choose 'mean', 'sum' or 'none'.")
    classes, x = logits.shape[logits.placement.dim], logits.local
    if x.ndim > 2:
        x = x.movedim(1, -1)
    x = x.reshape(-1, x.shape[-1])
    flat = target.reshape(-1)
    if is_shape_only(x) or is_shape_only(flat):
        loss = x.sum(-1)
    else:
        known = ((flat >= 0) & (flat < classes)) | (flat == ignore_index)
        torch._assert_async(known.all(), f"cross_entropy: a target is outside of the {classes} classes")
        valid = unpadded_rows(logits)
        loss = original_apply(
            _VocabCrossEntropy, x, flat, valid, classes, ignore_index, smoothing, weight, logits.group
        )
    if not torch.is_autocast_enabled(x.device.type):  # autocast's cross_entropy returns float32
        loss = loss.to(logits.dtype)
    loss = loss.reshape(target.shape)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    counts = target != ignore_index
    if weight is None:
        return loss.sum() / counts.sum()
    return loss.sum() / torch.where(counts, weight[target.clamp(0, classes - 1)], weight.new_zeros(())).sum()
