"""What the ranks of a launch run for `test_habits.py`: what users do in their modules and a pipeline can get wrong."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_3d import ThreeDStrategy
from tests import models
from tests.strategy.cases import trainer_for


def trained(module: pl.LightningModule, sizes: dict[str, Any] | None, **options: Any) -> pl.Trainer:
    """Train on 20 samples in batches of 8, 8 and 4."""
    trainer = trainer_for(
        "auto" if sizes is None else ThreeDStrategy(**sizes), use_distributed_sampler=False, **options
    )
    replicas = 1 if sizes is None else trainer.strategy.layout.dp
    rank = int(os.environ["RANK"]) // (int(os.environ["WORLD_SIZE"]) // replicas)
    trainer.fit(module, models.loader("mlp", 20, 8, rank, replicas))
    return trainer


# -- metrics that are logged for every step
class StepMetrics(models.LitMLP):
    def __init__(self) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(5, average="macro")
        self.both = MetricCollection({"accuracy": MulticlassAccuracy(5, average="micro"), "f2": self.f1.clone()})
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch["x"])
        self.f1(logits, batch["y"])
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.both(logits, batch["y"])
        self.log_dict(self.both, on_step=True, on_epoch=False)
        self.error(logits.amax(-1), batch["y"].double())
        self.log("error", self.error)
        return F.cross_entropy(logits, batch["y"])


class Logged(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def step_metrics(sizes: dict[str, Any] | None) -> list[dict[str, float]]:
    record = Logged()
    torch.manual_seed(4)
    trainer = trained(StepMetrics().double(), sizes, callbacks=[record])
    return [*record.seen, {k: float(v) for k, v in trainer.callback_metrics.items()}]


# -- buffers that the user's code changes
class Counting(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.linear = inside, nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("constant", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.inside:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.linear(x - self.mean * self.constant)


class Buffers(models.LitMLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))
        self.first, self.second, self.norm = Counting(True), Counting(False), nn.BatchNorm1d(8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(self.norm(self.second(self.first(batch["x"])))), batch["y"])
        self.ema.mul_(0.9).add_(0.1 * loss.detach())
        self.calls = self.calls + 1
        return loss


def changed_buffers(cases: list[dict[str, Any]]) -> list[list[str]]:
    out = []
    for sizes in cases:
        with warnings.catch_warnings(record=True) as caught:
            strategy = ThreeDStrategy(**sizes)
            trainer = trainer_for(strategy, max_steps=1)
            warnings.simplefilter("always")
            trainer.fit(Buffers(), models.loader("mlp", 16, 16))
        out.append([str(w.message) for w in caught if "changes and reads" in str(w.message)])
    return out


# -- a value of the first stage that is used only in some steps
class Late(models.LitMLP):
    always = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = self.net[:2](batch["x"])
        logits = self.net[2:](first)
        loss = F.cross_entropy(logits, batch["y"])
        mean = first.abs().mean() if self.always or batch_idx % 2 else None
        if batch_idx % 2:
            self.log("first", mean)
            self.log("last", logits.mean())
        if self.always:
            loss = loss + (0.1 if self.current_epoch else 0.0) * first.square().mean()
        self.log("loss", loss)
        return loss


class OnlyThen(Late):
    """Computes it only in the steps that use it."""

    always = False


def late(sizes: dict[str, Any] | None) -> list[dict[str, float]]:
    seen = []
    for make in (Late, OnlyThen):
        record = Logged()
        torch.manual_seed(6)
        trained(make().double(), sizes, callbacks=[record], max_epochs=2)
        seen += record.seen
    return seen
