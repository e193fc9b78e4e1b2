"""The same microbatches in one process: loss, gradients, logs and outputs of the uncut module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.testing import relative_error
from tests.pipeline.zoo import Lift


def train(
    module: nn.Module, microbatches: Sequence[Any], weights: Sequence[float], batch_idx: int = 0
) -> tuple[Tensor, list[tuple[str, float]]]:
    """Accumulate the gradients of the weighted losses; returns (weighted loss, logged values)."""
    logs: list[tuple[str, float]] = []

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        logs.append((name, float(value.detach() if isinstance(value, Tensor) else value)))

    module.log = log
    total = torch.zeros((), dtype=torch.float64)
    for microbatch, weight in zip(microbatches, weights, strict=True):
        with Lift():
            out = module.training_step(microbatch, batch_idx)
        loss = out["loss"] if isinstance(out, dict) else out
        (loss * weight).backward()
        total = total + loss.detach() * weight
    del module.log
    return total, logs


def worst_gradient(got: dict[str, Any], module: nn.Module) -> tuple[float, str]:
    """Largest relative error of the given parameters' gradients (or gradients) against `module`'s."""
    want = dict(module.named_parameters())
    worst = (0.0, "")
    for name, x in got.items():
        gradient = x.grad if isinstance(x, nn.Parameter) else x
        worst = max(worst, (relative_error(gradient, want[name].grad), name))
    return worst
