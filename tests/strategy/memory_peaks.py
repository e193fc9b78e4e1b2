"""What the ranks of a launch run for `test_memory_peaks.py`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from benchmarks.memory_of_process import forget_peak, status
from lightning_3d import ThreeDStrategy
from tests import models
from tests.strategy.cases import trainer_for

LAYERS, WIDTH = 16, 1024
PARAMETERS = 4 * LAYERS * WIDTH * WIDTH
"""Bytes: 64 MiB."""


class Wide(pl.LightningModule):
    """Weights far larger than activations, built on the meta device, so that a rank never has all of them."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"].float().repeat(1, WIDTH // 8)
        return self.net(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


def fit(folder: str, resume: str | None, **sizes: Any) -> tuple[pl.Trainer, int]:
    """The Trainer, and the rise of this rank's memory at its peak."""
    gc.collect()
    forget_peak()
    before = status("VmRSS")
    strategy = ThreeDStrategy(zero_stage=3, **sizes)
    steps = 2 if resume is None else 4
    trainer = trainer_for(strategy, max_steps=steps, max_epochs=-1, precision="32-true", default_root_dir=folder)
    torch.manual_seed(1)
    trainer.fit(Wide(), models.loader("mlp", 16, 4), ckpt_path=resume)
    return trainer, status("VmHWM") - before


def started_and_saved(folder: str) -> tuple[int, int, int]:
    """Rises of this rank's memory: a start, a checkpoint as a directory, one as a file."""
    trainer, start = fit(folder, None)
    rises = []
    for name, directory in (("run", True), ("plain", False)):
        trainer.strategy._save_distributed = directory
        gc.collect()
        forget_peak()
        before = status("VmRSS")
        trainer.save_checkpoint(Path(folder) / f"{name}.ckpt")
        rises.append(status("VmHWM") - before)
    return start, *rises


def resumed(folder: str) -> int:
    return fit(folder, f"{folder}/run.ckpt")[1]
