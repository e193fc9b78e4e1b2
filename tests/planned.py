"""A module and data for LightningCLI, and what `fit` does with a planned layout."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import ThreeDCLI
from lightning_3d.deferred import is_deferred


class Net(pl.LightningModule):
    deferred: bool | None = None

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
        self.last = nn.Linear(width, 3)
        Net.deferred = is_deferred(self.blocks[0][0].weight)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        assert self.trainer.accumulate_grad_batches > 0
        return nn.functional.cross_entropy(self.last(self.blocks(self.first(x))), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = TensorDataset(torch.randn(64, 4, generator=generator), torch.randint(3, (64,), generator=generator))

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=self.batch_size)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return torch.cat([batch[0], batch[0]], 1), batch[1]  # the module wants 8 features


def command(arguments: list[str]) -> ThreeDCLI:
    return ThreeDCLI(Net, Data, args=arguments, save_config_callback=None)


def fit(arguments: list[str]) -> tuple[str, int | str, int]:
    trainer = command(["fit", *arguments]).trainer
    strategy: Any = trainer.strategy
    return str(strategy.layout), strategy._settings.num_microbatches, trainer.global_step
