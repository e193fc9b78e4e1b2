"""What the ranks of `test_failure.py` run: a fit over two stages in which one rank ends, in one of many ways."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy

WHERE = {
    "forward": 1,
    "backward": 0,
    "loader": 1,
    "optimizer": 0,
    "exit": 1,
    "_exit": 0,
    "kill": 1,
    "kill first": 0,
    "kill while the other sleeps": 1,
}
"""Kind of end -> the rank that ends (rank 0 is the last stage, and hosts the store's only user)."""


def _fail(kind: str) -> None:
    Path(os.environ["FAILED_AT"]).write_text(str(time.monotonic()))
    if kind == "exit":
        sys.exit(3)
    if kind == "_exit":
        os._exit(3)
    if kind.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"the true error, in the {kind}")


class Net(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == WHERE[self.kind]:
            for layer in self.layers:
                layer.trouble = self.kind
            Optimizer.armed = self.kind == "optimizer"
        elif batch_idx == 2 and self.kind == "kill while the other sleeps":
            time.sleep(30)  # no connection tells this rank anything

    def configure_optimizers(self) -> Any:
        return Optimizer(self.parameters(), lr=0.1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.trouble = nn.Linear(4, 4), ""

    def forward(self, x: Tensor) -> Tensor:
        if self.trouble not in ("", "loader", "optimizer", "backward"):
            _fail(self.trouble)
        y = torch.relu(self.linear(x))
        if self.trouble == "backward":
            y.register_hook(lambda gradient: _fail("backward"))
        return y


class Optimizer(torch.optim.SGD):
    armed = False

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        if Optimizer.armed:
            _fail("optimizer")
        return out


class Samples(torch.utils.data.Dataset[Tensor]):
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        if self.fails and index == 16:
            _fail("loader")
        return torch.full((4,), float(index))


def fit(kind: str, folder: str) -> None:
    """An error is printed as a script would print it, to one file in the order in which the ranks print."""
    warnings.simplefilter("ignore")
    os.environ["FAILED_AT"] = f"{folder}/failed_at"
    os.dup2(os.open(f"{folder}/printed", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    rank = int(os.environ["RANK"])
    worker: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"} if kind == "loader" else {}
    loader = torch.utils.data.DataLoader(Samples(bool(worker) and rank == WHERE[kind]), batch_size=8, **worker)
    trainer = pl.Trainer(
        max_steps=8, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, strategy=ThreeDStrategy(pipeline_parallel_size=2, num_microbatches=2),
    )  # fmt: skip
    try:
        trainer.fit(Net(kind), loader)
    except BaseException:
        traceback.print_exc()
        raise
