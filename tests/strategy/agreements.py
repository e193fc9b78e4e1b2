"""What the ranks of a launch run for `test_agreement.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from torchmetrics.aggregation import MeanMetric

from lightning_3d import ThreeDStrategy
from tests import models
from tests.strategy.cases import trainer_for


class LogsInAnyOrder(models.LitMLP):
    """Which names are logged, and in which order, depends on the replica and the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        replica = self.trainer.strategy.data_parallel_rank
        size = len(batch["x"])
        names = {0: ("a", "b"), 1: ("b", "c", "a")}[replica]
        if self.current_epoch == 1 and replica == 0:
            names = ("c", *names)  # new here, known there
        for name in names:
            if self.current_epoch == 0 or name != ("a" if replica else "b"):
                value = torch.tensor(10.0 * replica + ord(name) - ord("a"), dtype=torch.float64)
                how: Any = "max" if name == "c" else "mean"
                self.log(name, value, sync_dist=True, reduce_fx=how, batch_size=size)
        if replica == 1:
            self.mean.update(float(batch_idx))
            self.log("metric", self.mean)


def logged_in_any_order(sizes: dict[str, Any]) -> list[dict[str, float]]:
    """Callback metrics after every epoch."""
    found: list[dict[str, float]] = []

    class Module(LogsInAnyOrder):
        def on_validation_end(self) -> None:
            found.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})

    trainer = trainer_for(ThreeDStrategy(**sizes), max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Module().double(), models.loader("mlp", 16, 8), models.loader("mlp", 32, 8))
    return found


def unequal_training(sizes: dict[str, Any], **options: Any) -> int:
    """Replica 0 trains on three batches in an epoch, replica 1 on two."""
    trainer = trainer_for(ThreeDStrategy(**sizes), use_distributed_sampler=False, **options)

    class Module(models.LitMLP):
        def train_dataloader(self) -> Any:
            count = 3 if self.trainer.strategy.data_parallel_rank == 0 else 2
            return DataLoader(models.vectors(8 * count), batch_size=8)

    trainer.fit(Module().double())
    return int(trainer.global_step)
