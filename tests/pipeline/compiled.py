"""Blocks the user compiled, in every way there is, and a backend that counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Compile = Callable[..., Any]


class Counting:
    """`aot_eager`, which runs through autograd as inductor does, and counts its graphs."""

    def __init__(self) -> None:
        from torch._dynamo.backends.registry import lookup_backend

        torch._dynamo.reset()
        self.graphs = 0
        self._inner = lookup_backend("aot_eager")

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self._inner(graph, inputs)

    def compile(self, what: Any) -> Any:
        return torch.compile(what, backend=self)


def _between(x: Tensor) -> Tensor:
    return torch.sin(torch.exp(x))  # what is kept for its backward is neither argument nor result


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.between = _between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.between(self.linear(self.norm(x)))


class Compiled(pl.LightningModule):
    """A model with six blocks.

    Args:
        way: "in_place" (`block.compile()`), "wrapper" (`torch.compile(block)`), "function" (called inside blocks),
            "whole" (a module that is cut), "recomputed" (in place, in a checkpoint of the user's), or "as_written".
        backend: Counts the graphs.
    """

    def __init__(self, way: str, backend: Counting) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(_Block() for _ in range(6))
        self.out = nn.Linear(16, 5)
        function = backend.compile(_between)
        for k, block in enumerate(self.blocks):
            if way in ("in_place", "recomputed"):
                block.compile(backend=backend)
            elif way == "wrapper":
                self.blocks[k] = backend.compile(block)
            elif way == "function":
                block.between = function  # type: ignore[assignment]
        self.last = nn.Linear(16, 16)
        self.whole = backend.compile(nn.Sequential(*self.blocks, self.last)) if way == "whole" else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out.weight.sum()  # requires grad
        if self.whole is not None:
            return self.out(self.whole(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.way == "recomputed" else block(x)
        return self.out(self.last(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    validation_step = training_step


@contextmanager
def no_other_warnings() -> Iterator[None]:
    """Errors for all warnings but one, which torch hides itself unless warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield
