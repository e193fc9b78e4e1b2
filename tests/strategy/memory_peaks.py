"""What the ranks of a launch run for `test_memory_peaks.py`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

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


def resident() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """The most since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def fit(folder: str, resume: str | None, **sizes: Any) -> tuple[pl.Trainer, int]:
    """The Trainer, and the rise of this rank's memory at its peak."""
    forget_peak()
    before = resident()
    strategy = ThreeDStrategy(zero_stage=3, **sizes)
    steps = 2 if resume is None else 4
    trainer = trainer_for(strategy, max_steps=steps, max_epochs=-1, precision="32-true", default_root_dir=folder)
    torch.manual_seed(1)
    trainer.fit(Wide(), models.loader("mlp", 16, 4), ckpt_path=resume)
    return trainer, peak() - before


def started_and_saved(folder: str) -> tuple[int, int, int]:
    """Rises of this rank's memory: a start, a checkpoint as a directory, one as a file."""
    trainer, start = fit(folder, None)
    rises = []
    for name, directory in (("run", True), ("plain", False)):
        trainer.strategy._save_distributed = directory
        forget_peak()
        before = resident()
        trainer.save_checkpoint(Path(folder) / f"{name}.ckpt")
        rises.append(peak() - before)
    return start, *rises


def resumed(folder: str) -> int:
    return fit(folder, f"{folder}/run.ckpt")[1]
