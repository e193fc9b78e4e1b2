"""What the ranks of a launch run for `test_callbacks.py`: fits with callbacks that touch weights and groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelPruning
from torch import Tensor

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy.cases import trainer_for

Parameters = dict[str, Tensor]


class Unfreeze(BaseFinetuning):
    """The first layers are trained from the second epoch on, in a group of their own."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[:5])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[:5], optimizer, lr=0.03)


class Replace(pl.Callback):
    """Gives parameters new data, as code that prunes or averages by hand does."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data * 0.9


class Trained(models.LitMLP):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        if self.kind == "adagrad":  # its state exists from the start
            return torch.optim.Adagrad(self.parameters(), lr=0.05)
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(sizes: dict[str, Any] | None, kind: str, folder: str, epochs: int = 3, resume: str | None = None) -> Any:
    """(parameters, path of a checkpoint of the second epoch) of a fit."""
    callbacks: list[Any] = {
        "finetune": [Unfreeze()],
        "average": [EMAWeightAveraging(decay=0.8)],
        "prune": [ModelPruning("l1_unstructured", amount=0.3, make_pruning_permanent=False, verbose=0)],
        "replace": [Replace()],
        "adagrad": [],
    }[kind]
    saver = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=2)
    strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
    trainer = trainer_for(
        strategy, max_epochs=epochs, callbacks=[*callbacks, saver], use_distributed_sampler=False,
        enable_checkpointing=True, default_root_dir=folder,
    )  # fmt: skip
    torch.manual_seed(3)
    module = Trained(kind).double()
    replicas = 1 if sizes is None else strategy.layout.dp
    rank = int(os.environ["RANK"]) // (int(os.environ["WORLD_SIZE"]) // replicas)
    trainer.fit(module, models.loader("mlp", 32, 16, rank, replicas), ckpt_path=resume, weights_only=False)
    full = dict(module.named_parameters()) if sizes is None else full_parameters(strategy)
    # pruning renames the parameters
    return {n.removesuffix("_orig"): p.detach().clone() for n, p in full.items()}, str(Path(folder) / "epoch=1.ckpt")


def fits(cases: list[tuple[dict[str, Any] | None, str]], folder: str) -> list[tuple[Parameters, Parameters]]:
    """The parameters after three epochs, and after resuming from the second one's checkpoint."""
    out = []
    for index, (sizes, kind) in enumerate(cases):
        where = f"{folder}/{index}"
        whole, path = fit(sizes, kind, where)
        if kind == "prune":  # Lightning cannot resume from it
            out.append((whole, whole))
        else:
            out.append((whole, fit(sizes, kind, f"{where}/again", resume=path)[0]))
    return out
