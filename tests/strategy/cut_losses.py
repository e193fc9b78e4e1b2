"""What the ranks of a launch run for `test_cut_losses.py`: losses that microbatches change, and those they do not."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from tests import models
from tests.strategy.cases import trainer_for


class Mean(models.LitMLP):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


class Dropped(Mean):
    """Random numbers of every kind, norms over the batch, counters: nothing of it is the loss's fault."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, nn.Dropout(0.5))
        self.net.insert(4, nn.BatchNorm1d(32))
        self.seen: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        self.seen.append(random.random())
        scale = float(np.random.rand()) + random.random()
        return super().loss({**batch, "x": batch["x"] * scale})


class Sum(models.LitMLP):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="sum")


class Contrastive(models.LitMLP):
    def loss(self, batch: Any) -> Tensor:
        out = F.normalize(self.net(batch["x"]), dim=-1)
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))


class TimeMajor(models.LitMLP):
    def loss(self, batch: Any) -> Tensor:
        x = batch["x"].reshape(8, -1, 1).expand(8, -1, 8)
        return F.cross_entropy(self.net(x.cumsum(0))[-1], batch["y"])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch["x"].T.contiguous(), "y": batch["y"]}


CASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "mean": (Mean, {}),
    "dropped": (Dropped, {"num_microbatches": 4}),
    "sum": (Sum, {}),
    "sum, one microbatch": (Sum, {"num_microbatches": 1}),
    "sum, not asked": (Sum, {"verify": False}),
    "contrastive": (Contrastive, {}),
    "time": (TimeMajor, {}),
}


def cut_losses() -> dict[str, list[str]]:
    """The warnings of every case about losses and microbatches."""
    out = {}
    for name, (kind, sizes) in CASES.items():
        trainer = trainer_for(ThreeDStrategy(pipeline_parallel_size=2, **sizes), max_steps=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                trainer.fit(kind().double(), DataLoader(models.vectors(8), batch_size=8))
            except ValueError:
                assert name == "time"
        out[name] = [text for w in caught if "whole batch" in (text := str(w.message))]
    return out
