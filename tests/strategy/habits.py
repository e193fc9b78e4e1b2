"""What the ranks of a launch run for `test_habits.py`: what users do in their modules and a pipeline can get wrong."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
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
