"""What the ranks of `test_callback.py` run."""

from __future__ import annotations

import csv
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytorch_lightning as other
import torch
from torch import nn

import lightning_3d
import lightning_3d.pytorch_lightning as for_other


def module_of(package: Any) -> Any:
    """An unbalanced model: the last of five layers is wide."""

    class Net(package.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            widths = [16, 16, 16, 16, 16, 512]
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, w), nn.Tanh(), nn.Linear(w, 16)) for w in widths)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            for layer in self.layers:
                batch = layer(batch)
            return batch.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net()


def fit(package: str, sizes: dict[str, Any], callback: dict[str, Any], folder: str) -> dict[str, Any]:
    """Six batches; what is logged and whether recording is off again."""
    warnings.simplefilter("ignore")
    library, ours = (pl, lightning_3d) if package == "lightning" else (other, for_other)
    strategy = ours.ThreeDStrategy(**sizes)
    trainer = library.Trainer(
        max_steps=6, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, use_distributed_sampler=False,
        logger=library.loggers.CSVLogger(folder, "log", version=0), strategy=strategy,
        callbacks=[ours.PipelineTimeline(**callback)],
    )  # fmt: skip
    trainer.fit(module_of(library), torch.utils.data.DataLoader(torch.randn(96, 16), batch_size=16))
    metrics = Path(folder) / "log" / "version_0" / "metrics.csv"
    rows: list[dict[str, str]] = []
    if trainer.is_global_zero and metrics.is_file():
        with open(metrics) as file:
            rows = list(csv.DictReader(file))
    return {
        "logged": [float(row["pipeline/bubble"]) for row in rows if row.get("pipeline/bubble")],
        "recording": strategy.recorder is not None,
    }
