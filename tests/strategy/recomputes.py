"""Fits with dropout, with and without recomputed activations, for `test_schedules.py`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters
from tests.strategy.cases import trainer_for


class Block(nn.Module):
    """Dropout in attention and behind it, an operation in place, an argument by name."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)
        self.attention, self.drop = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True), nn.Dropout(0.3)
        if compiled:
            self.compile(backend="eager")

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.drop(self.down(F.relu(self.up(self.norm(x)), inplace=True))) * scale


class Dropping(pl.LightningModule):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers, self.out = nn.ModuleList(Block(compiled) for _ in range(4)), nn.Linear(16, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x, scale=0.7)
        return F.cross_entropy(self.out(x).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fitted(options: dict[str, Any], compiled: bool) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    strategy = ThreeDStrategy(**options)
    data = TensorDataset(torch.randn(64, 3, 16).double(), torch.randint(0, 5, (64, 3)))
    trainer_for(strategy, max_steps=4, max_epochs=-1).fit(Dropping(compiled).double(), DataLoader(data, batch_size=8))
    return {name: p.clone() for name, p in full_parameters(strategy).items()}


def differences(cases: list[tuple[dict[str, Any], str, bool]]) -> list[float]:
    """Largest difference of a weight after four steps, recomputed against kept, per case."""
    out = []
    for options, mode, compiled in cases:
        kept = _fitted(options, compiled)
        again = _fitted({**options, "activation_checkpointing": mode}, compiled)
        out.append(max(float((kept[name] - p).abs().max()) for name, p in again.items()))
    return out
