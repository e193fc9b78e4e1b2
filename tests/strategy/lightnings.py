"""Lightning's own features on every rank of a launch."""

from __future__ import annotations

import csv
import io
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytorch_lightning as other
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

import lightning_3d.pytorch_lightning
from lightning_3d import GradientNorm, ThreeDStrategy
from lightning_3d.errors import ConfigurationError
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy.cases import trainer_for


# -- callbacks and loggers
def with_callbacks(sizes: dict[str, Any], folder: str) -> dict[str, Any]:
    strategy = ThreeDStrategy(**sizes)
    checkpoint = ModelCheckpoint(f"{folder}/kept", "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=1)
    stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)  # never better by 10: stops after two epochs
    trainer = trainer_for(
        strategy, max_epochs=5, callbacks=[checkpoint, stopping, LearningRateMonitor("step"), TQDMProgressBar()],
        enable_checkpointing=True, enable_progress_bar=True, logger=CSVLogger(folder, "log", version=0),
        log_every_n_steps=1, use_distributed_sampler=False,
    )  # fmt: skip
    module = models.build("gpt_tied")
    module.optimizer = "adamw"
    replica, replicas = (0, 1) if strategy.layout.dp == 1 else (int(os.environ["RANK"]) // 2, 2)
    train, val = models.loader("gpt_tied", 16, 8, replica, replicas), models.loader("gpt_tied", 8, 8, replica, replicas)
    trainer.fit(module, train, val)
    shown = sorted(trainer.progress_bar_metrics)
    best = trainer.validate(module, val, ckpt_path="best", verbose=False)[0]["val_loss"]
    rows: list[dict[str, str]] = []
    if trainer.is_global_zero:
        with open(Path(folder) / "log" / "version_0" / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
    return {
        "epochs": trainer.current_epoch,
        "best": float(checkpoint.best_model_score),
        "path": Path(checkpoint.best_model_path).name,
        "validated": best,
        "shown": shown,
        "losses": [float(r["loss_step"]) for r in rows if r["loss_step"]],
        "rates": [float(r["lr-AdamW/pg1"]) for r in rows if r["lr-AdamW/pg1"]],
    }


# -- precision
def in_precision(sizes: dict[str, Any] | None, precision: str) -> list[float]:
    strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
    losses: list[float] = []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            losses.append(float(outputs["loss"]))

    trainer = trainer_for(
        strategy, precision=precision, max_steps=3, max_epochs=-1, callbacks=[Losses()], use_distributed_sampler=False
    )
    torch.manual_seed(2)
    trainer.fit(models.LitGPT(), models.loader("gpt_tied", 24, 8))
    return losses


# -- test, predict, batches of other sizes
class Predicts(models.LitGPT):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["tokens"][:, :-1])


def evaluate(sizes: dict[str, Any] | None) -> dict[str, Any]:
    strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
    trainer = trainer_for(strategy, use_distributed_sampler=False, max_epochs=2)
    torch.manual_seed(4)
    module = Predicts().double()
    loader = DataLoader(models.tokens(13), batch_size=5)  # batches of 5, 5, 3
    trainer.fit(module, loader)
    result = trainer.test(module, loader, verbose=False)[0]
    predictions = trainer.predict(module, loader)
    parameters = dict(module.named_parameters()) if sizes is None else full_parameters(strategy)
    return {
        "test_loss": result["test_loss"],
        "predictions": None if predictions[0] is None else torch.cat(predictions),
        "parameters": {n: p.detach().clone() for n, p in parameters.items()},
        "steps": trainer.global_step,
    }


class Validates(models.LitMLP):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def validate_then_fit(sizes: dict[str, Any] | None) -> dict[str, Any]:
    strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
    trainer = trainer_for(strategy, use_distributed_sampler=False)
    torch.manual_seed(4)
    module = Validates().double()
    loader = DataLoader(models.vectors(16), batch_size=8)
    text = io.StringIO()
    logging.getLogger("lightning_3d").addHandler(handler := logging.StreamHandler(text))
    result = trainer.validate(module, loader, verbose=False)[0]
    trainer.fit(module, loader)
    logging.getLogger("lightning_3d").removeHandler(handler)
    parameters = dict(module.named_parameters()) if sizes is None else full_parameters(strategy)
    out: dict[str, Any] = {
        "val_loss": result["val_loss"],
        "parameters": {n: p.detach().clone() for n, p in parameters.items()},
        "logged": text.getvalue(),
    }
    if sizes is not None and strategy.engine.runner is not None:
        out["microbatches"] = strategy.engine.runner.num_microbatches
        module.automatic_optimization = False
        try:
            trainer.fit(module, loader)
        except ConfigurationError as error:
            out["refusal"] = str(error)
    return out


# -- the other Lightning package
class Elsewhere(other.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = models.LitMLP().net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def in_pytorch_lightning() -> tuple[int, float, str, str]:
    warnings.simplefilter("ignore")
    options: dict[str, Any] = {
        "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "logger": False, "max_steps": 2,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "precision": "64-true",
    }  # fmt: skip
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    trainer = other.Trainer(strategy=lightning_3d.pytorch_lightning.ThreeDStrategy(**sizes), **options)
    trainer.fit(Elsewhere(), DataLoader(models.vectors(16), batch_size=8))
    errors = []
    for make in (
        lambda: other.Trainer(strategy=ThreeDStrategy(**sizes), **options),
        lambda: pl.Trainer(strategy=ThreeDStrategy(**sizes), **options).fit(Elsewhere()),
    ):
        try:
            make()
            errors.append("")
        except (ValueError, TypeError) as error:
            errors.append(str(error))
    return trainer.global_step, float(trainer.callback_metrics["loss"]), errors[0], errors[1]


# -- BatchNorm: one rule, one warning, statistics of one replica
class Normed(models.Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 5))

    def loss(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])


def batch_norm(sizes: dict[str, Any]) -> tuple[list[str], list[float], int, float]:
    strategy = ThreeDStrategy(**sizes)
    trainer = trainer_for(strategy, max_steps=2, max_epochs=-1, use_distributed_sampler=False)
    torch.manual_seed(6)
    module = Normed().double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replicas = strategy.layout.dp
        loader = models.loader("mlp", 32, 16, int(os.environ["RANK"]) // (4 // replicas), replicas)
        trainer.fit(module, loader)
        loss = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    state = strategy.lightning_module_state_dict()
    mean = state["net.1.running_mean"].full_tensor()
    count = int(state["net.1.num_batches_tracked"].full_tensor())
    return [str(w.message) for w in caught if "BatchNorm" in str(w.message)], mean.tolist(), count, loss


# -- the norm of the gradient
class OwnNorm(pl.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(float(torch.stack([p.grad.norm(3) for p in module.parameters()]).norm(3)))


def logged_norms(sizes: dict[str, Any] | None, folder: str) -> list[float]:
    """The norm of every step's gradient before it is clipped: computed in one process, logged by the callback else."""
    own = OwnNorm()
    callbacks = [own] if sizes is None else [GradientNorm("size", norm_type=3)]
    strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
    trainer = trainer_for(
        strategy, use_distributed_sampler=False, callbacks=callbacks, gradient_clip_val=0.05, log_every_n_steps=1,
        logger=CSVLogger(folder, "norms", version=str(sizes)),
    )  # fmt: skip
    trainer.fit(models.build("gpt_tied"), models.loader("gpt_tied", 24, 8))
    if sizes is None or not trainer.is_global_zero:
        return own.norms
    with open(Path(trainer.logger.log_dir) / "metrics.csv") as file:
        return [float(row["size"]) for row in csv.DictReader(file) if row["size"]]


# -- the learning rate finder
class Tuned(models.LitMLP):
    learning_rate = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def found_rate(sizes: dict[str, Any] | None, folder: str) -> tuple[float | None, dict[str, Any]]:
    """The suggestion, and the parameters after it: what they were before."""
    strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
    trainer = trainer_for(strategy, use_distributed_sampler=False, default_root_dir=folder)
    torch.manual_seed(4)
    module = Tuned().double()
    loader = DataLoader(models.vectors(160), batch_size=4)
    suggestion = Tuner(trainer).lr_find(module, loader, num_training=30, early_stop_threshold=None).suggestion()
    parameters = dict(module.named_parameters()) if sizes is None else full_parameters(strategy)
    return suggestion, {n: p.detach().clone() for n, p in parameters.items()}
