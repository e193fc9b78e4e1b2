"""Random windows: a backward in two halves gives every gradient, and calls every hook, as one backward does."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.pipeline.split_backward import edge_of, input_half

WIDTH = 4


class Waits(torch.autograd.Function):
    """x @ w + v, whose weights can wait."""

    weights_can_wait = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w + v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, w), wanted = gradients, ctx.saved_tensors, ctx.needs_input_grad

        def weights() -> list[Tensor | None]:
            return [x.T @ g if wanted[1] else None, g.sum(0) if wanted[2] else None]

        if getattr(ctx, "weights_later", None) is not None:
            ctx.weights_later.append((ctx, 1, weights))
            return g @ w.T, None, None
        return (g @ w.T, *weights())


class Window:
    """A window made of a seed.

    Attributes:
        weights, received, outputs: Its weights, what it gets, and some of what it makes.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._draw = draw = random.Random(seed)
        self.matrices = [self._leaf(WIDTH, WIDTH, wants=0.9) for _ in range(5)]
        self.vectors = [self._leaf(WIDTH, wants=1.0) for _ in range(4)]
        self.weights = self.matrices + self.vectors
        self.received = [self._leaf(3, WIDTH, wants=0.85) for _ in range(draw.randint(1, 3))]
        self._shared = [self._expression() for _ in range(2)]
        values = list(self.received)
        for _ in range(draw.randint(2, 9)):
            made = self._layer(values)
            values.append(made.tanh() if draw.random() < 0.5 else made)
        wanting = [x for x in values[len(self.received) :] if x.requires_grad]
        self.outputs = draw.sample(wanting, min(len(wanting), draw.randint(1, 3)))

    def _leaf(self, *size: int, wants: float) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, requires_grad=self._draw.random() < wants)

    def _expression(self) -> Tensor:
        draw, w = self._draw, self._draw.choice(self.matrices)
        other = draw.choice(self.matrices)
        return draw.choices([w, w.tanh(), w * other, w @ other, w.detach()], [13, 3, 2, 1, 1])[0]

    def _layer(self, values: list[Tensor]) -> Tensor:
        draw = self._draw
        x, y, b, c = draw.choice(values), draw.choice(values), draw.choice(self.vectors), draw.choice(self.vectors)
        w = draw.choice(self._shared) if draw.random() < 0.3 else self._expression()
        kinds = [
            lambda: F.linear(x, w, b), lambda: x @ w, lambda: torch.addmm(b, x, w), lambda: Waits.apply(x, w, b),
            lambda: F.layer_norm(x, (WIDTH,), b, c), lambda: x + y, lambda: x * b, lambda: (w @ b) * torch.ones_like(x),
        ]  # fmt: skip
        made: Tensor = draw.choices(kinds, [6, 3, 2, 2, 2, 2, 2, 1])[0]()
        return made


def gradients(seed: int, halves: bool, hooks: bool) -> tuple[list[Tensor | None], Counter[int]]:
    """Of all leaves, and how often each weight's hook was called."""
    window, called = Window(seed), Counter[int]()
    for number, weight in enumerate(window.weights if hooks else ()):
        if weight.requires_grad:
            weight.register_hook(lambda g, number=number: called.update([number]))
    given = [torch.randn_like(x) for x in window.outputs]
    if halves and given:
        input_half([(edge_of(x), g) for x, g in zip(window.outputs, given, strict=True)], window.received).run()
    elif given:
        torch.autograd.backward(window.outputs, given)
    return [x.grad for x in window.weights + window.received], called


@pytest.mark.parametrize("hooks", [False, True])
def test_random_windows(hooks: bool) -> None:
    """Wrong before: `F.linear(x, w)` below `h @ w` gave w a gradient twice; hooks ran on parts of a gradient."""
    left = 0
    for seed in range(1200):
        (want, called), (found, again) = (gradients(seed, halves, hooks) for halves in (False, True))
        for one, other in zip(want, found, strict=True):
            assert torch.allclose(
                *(torch.zeros(()).double() if x is None else x for x in (one, other)), rtol=1e-9, atol=1e-9
            ), seed
        assert again == called, seed
        left += any(x is not None for x in want)
    assert left > 1000


@pytest.mark.parametrize("order", ["linear first", "product first"])
def test_a_weight_and_its_transpose(order: str) -> None:
    torch.manual_seed(0)
    w, x = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = F.linear(x, w).tanh() @ w if order == "linear first" else F.linear((x @ w).tanh(), w)
    (want,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
    input_half([(edge_of(y), torch.ones_like(y))], [x]).run()
    assert torch.allclose(w.grad, want, rtol=1e-12)
