"""Random steps, cut anywhere, whole backwards or halves: the loss and every gradient of plain PyTorch."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline import simulate
from lightning_3d.pipeline.execution import Live, backward, backward_of_weights, divide
from tests.pipeline.random_steps import WIDTH, Step


def halves(live: Live, gradients: dict[Any, Tensor], deliver: Callable[[dict[Any, Tensor]], None]) -> None:
    """As zero-bubble schedules do it."""
    if live.window % 2:
        divide(live, list(gradients))
    backward(live, gradients, deliver, weights_later=True)
    backward_of_weights(live)


def check(seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns how many steps were cut and compared."""
    compared = 0
    for seed in seeds:
        draw = random.Random(seed)
        module, samples = Step(seed).double(), draw.choice([4, 5, 6])
        batch = tuple(torch.randn(samples, WIDTH).double() for _ in range(2))
        try:
            loss = module.training_step(batch, 0)
            loss.backward()
        except RuntimeError:  # not even in one process
            continue
        want = {n: p.grad for n, p in module.named_parameters()}
        module.zero_grad()
        stages, count = draw.choice([2, 2, 3, 4]), draw.choice([1, 2, 3])
        monkeypatch.setattr(
            sys.modules["lightning_3d.pipeline.simulate"], "backward", halves if draw.random() < 0.6 else backward
        )
        try:
            cut = simulate(module, stages, batch, num_microbatches=count)
        except PipelineError:  # too few pieces for so many stages
            continue
        for name, gradient in want.items():
            found = cut.gradients[name]
            # what is computed for nothing may get zeros
            one, other = (torch.zeros(1).double() if g is None else g for g in (gradient, found))
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-9), (seed, name, stages, count)
        compared += 1
    return compared


def test_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(range(40), monkeypatch) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong before: a checkpoint over a plain tensor that was changed, a weight used as it is and transposed."""
    assert check(range(40, 500), monkeypatch) > 220
