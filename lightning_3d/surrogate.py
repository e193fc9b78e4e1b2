"""HOW do gradients of a finished schedule reach the optimizer?  Through the backward Lightning calls later.

Lightning runs training_step, then zero_grad, then backward. A pipeline has done its backwards inside training_step, so
it returns a surrogate: a scalar whose backward publishes the waiting gradients. Every hook, accumulation and clipping
then work as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.zero import Zero


class _Publish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, zero: Zero, scale: float | Tensor, last: bool) -> Tensor:
        ctx.zero, ctx.scale, ctx.last = zero, scale, last
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        on_cpu = grad.device.type == "cpu"
        ratio = grad.to(torch.float32 if grad.device.type == "mps" else torch.float64) / ctx.scale
        one = torch.ones_like(ratio)
        # a loss of low precision (bf16-true) comes back divided by the number of accumulated batches, and rounded
        tolerance = max(1e-6, torch.finfo(grad.dtype).eps)
        factor = torch.where(torch.isclose(ratio, one, rtol=tolerance), one, ratio)
        if ctx.zero.rescaled is not None:
            _check_equal(factor, ctx.zero.rescaled, tolerance)
        ctx.zero.rescaled = None if ctx.last else factor
        if ctx.last:
            ctx.zero.publish(1.0 if on_cpu and factor == 1.0 else factor)
        return None, None, None, None, None


def _check_equal(factor: Tensor, before: Tensor, tolerance: float) -> None:
    """Sums of accumulated batches stay where they are: a factor that differs from batch to batch cannot be applied."""
    same = torch.isclose(factor, before, rtol=tolerance)
    message = (
        "the loss was multiplied in a `backward` hook with another factor than that of the batch before, with which "
        "its gradients are accumulated. In a pipeline they are summed before that hook runs, so one factor must hold "
        "for all of them: scale the loss in training_step"
    )
    if factor.device.type != "cpu":
        torch._assert_async(same, message)
    elif not bool(same):
        raise RuntimeError(f"{message} (found {float(factor):g}, before it {float(before):g}).")


def surrogate_loss(value: Tensor, zero: Zero, scale: float | Tensor, last: bool) -> Tensor:
    """A scalar with the loss's value whose backward publishes `zero`'s pending gradients.

    Args:
        value: The loss.
        zero: Holds gradients of `scale * loss`.
        scale: What Lightning will multiply the loss with (one over the accumulation count, a gradient scaler's scale).
        last: The optimizer steps after this batch; otherwise its gradients stay in the buffers.
    """
    anchor = torch.zeros((), device=value.device, requires_grad=True)
    return _Publish.apply(anchor, value, zero, scale, last)
