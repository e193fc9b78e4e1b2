"""HOW LARGE is the gradient?  One norm over the whole mesh, every element of the model counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.comm import Communicator


def total_norm(
    gradients: Iterable[Tensor], group: Communicator, device: torch.device, norm_type: float = 2.0
) -> Tensor:
    """The norm of the concatenation of all ranks' gradients.

    Args:
        gradients: What this rank counts; replicas and ties must be given by one rank only.
        group: All ranks that together hold the model's gradient exactly once.
        device: Where the result lies; a rank may have no gradient at all.
        norm_type: p of the p-norm, `inf` for the largest absolute value.

    Returns:
        A 0-dim tensor, equal on all ranks of `group` (float64 on devices that have it).

    Collectives: one all-reduce of one number over `group`.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    parts = [g for g in gradients if g.numel()]
    if not parts:
        local = torch.zeros((), dtype=dtype, device=device)
    else:
        # those of an optimizer that steps on the host are there
        kinds: dict[Any, list[Tensor]] = {}
        for gradient in parts:
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found = [torch.stack(list(torch._foreach_norm(alike, norm_type))) for alike in kinds.values()]
        norms = torch.cat([some.to(device, dtype) for some in found])
        local = norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
    if math.isinf(norm_type):
        return group.all_reduce(local, "max")
    return group.all_reduce(local) ** (1.0 / norm_type)


def scale_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients by `max_norm / norm` where that is below one, as `torch.nn.utils.clip_grad_norm_` does."""
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for device in {g.device for g in gradients}:
        torch._foreach_mul_([g for g in gradients if g.device == device], factor.to(device))
