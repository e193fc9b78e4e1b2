"""Planning and proving leave the user's generators, iterators and counters alone, so all ranks train on alike."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tensor.fitting import compare

OWN_NUMPY, OWN_PYTHON, OWN_TORCH = np.random.default_rng(3), random.Random(3), torch.Generator()
COUNTED = SimpleNamespace(calls=0)
TICKETS: Any = itertools.count()


def endless() -> Iterator[float]:
    value = 0.0
    while True:
        value += 0.1
        yield value


def batches() -> list[Any]:
    return [(torch.randn(3, 8).double(), torch.randn(3, 8).double()) for _ in range(6)]


class Mixing(pl.LightningModule):
    """Mixes samples by a number it draws; sometimes it runs the network once more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        random.seed(5)
        np.random.seed(5)
        OWN_NUMPY.bit_generator.state = np.random.default_rng(3).bit_generator.state
        OWN_PYTHON.seed(3)
        OWN_TORCH.manual_seed(3)
        COUNTED.calls = 0
        global TICKETS
        TICKETS = itertools.count()
        self.own: dict[str, Any] = {"numpy": np.random.default_rng(1), "python": random.Random(1)}
        self.torch_generator = torch.Generator().manual_seed(2)
        self.count, self.held = itertools.count(), SimpleNamespace(inner=SimpleNamespace(calls=0))
        self.endless = endless()

    def draw(self) -> float:
        if self.kind == "counted":
            COUNTED.calls += 1
            return COUNTED.calls / 10
        if self.kind == "held":
            self.held.inner.calls += 1
            return self.held.inner.calls / 10
        draws: dict[str, Any] = {
            "random": random.random,
            "numpy": np.random.rand,
            "own numpy": OWN_NUMPY.random,
            "own python": OWN_PYTHON.random,
            "own torch": lambda: float(torch.rand(1, generator=OWN_TORCH)),
            "held numpy": lambda: float(self.own["numpy"].beta(1, 1)),
            "held python": self.own["python"].random,
            "held torch": lambda: float(torch.rand(1, generator=self.torch_generator)),
            "count": lambda: next(self.count) / 10,
            "tickets": lambda: next(TICKETS) / 10,
            "endless": lambda: next(self.endless),
        }
        return float(draws[self.kind]())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        share = self.draw()
        loss = F.mse_loss(self.net(share * x + (1 - share) * x.flip(0)), y)
        if share < 0.35:  # collectives of one rank only, if the ranks draw other numbers
            loss = loss + F.mse_loss(self.net(x.flip(0)), y)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


KINDS = (
    *("random", "numpy", "own numpy", "own python", "own torch", "held numpy", "held python", "held torch"),
    *("count", "tickets", "endless", "counted", "held"),
)


def build(kind: str) -> pl.LightningModule:
    return Mixing(kind)


def test_ranks_draw_what_one_process_draws(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken before: the proof drew on rank zero only, so the ranks took other samples or waited for each other."""
    monkeypatch.setenv("LIGHTNING_3D_CACHE", str(tmp_path))  # no proof is remembered
    found = compare({kind: (functools.partial(build, kind), batches) for kind in KINDS})
    for kind, result in found.items():
        assert "error" not in result, (kind, result["error"])
        assert result["worst"] < 1e-9, (kind, result)
        assert len(result["cut"]) == 3, (kind, result["cut"])
