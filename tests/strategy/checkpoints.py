"""Save and resume on every rank of a launch."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint import export_checkpoint, inspect_checkpoint
from lightning_3d.testing import full_parameters
from tests import models


def train(
    sizes: dict[str, Any] | None, steps: int, name: str, optimizer: str, folder: str, resume: str | None = None,
    save: str | None = None, file: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """`steps` steps in all (also those before a resume); `sizes` None: one process without the strategy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = models.build(name)
        module.optimizer = optimizer
        if resume is not None and sizes is not None:
            module.float()  # as users build it; its weights must not be rounded to that when they are read
        strategy = "auto" if sizes is None else ThreeDStrategy(**sizes, save_distributed_checkpoint=not file)
        world = int(os.environ["WORLD_SIZE"])
        callbacks = []
        if save is not None:
            callbacks = [pl.callbacks.ModelCheckpoint(save, "{step}", save_top_k=-1, save_on_train_epoch_end=True)]
        trainer = pl.Trainer(
            max_steps=steps, accelerator="cpu", precision="64-true", logger=False, enable_progress_bar=False,
            enable_checkpointing=save is not None, enable_model_summary=False, strategy=strategy, devices=world,
            use_distributed_sampler=False, limit_val_batches=0, default_root_dir=folder, callbacks=callbacks,
        )  # fmt: skip

        class Data(pl.LightningDataModule):
            def train_dataloader(self) -> Any:
                parallel = isinstance(strategy, ThreeDStrategy)
                replica, replicas = (strategy.data_parallel_rank, strategy.layout.dp) if parallel else (0, 1)
                return models.loader(name, 16, 8, replica, replicas)  # two batches an epoch

        trainer.fit(module, datamodule=Data(), ckpt_path=resume)
        parallel = isinstance(strategy, ThreeDStrategy)
        parameters = full_parameters(strategy) if parallel else dict(module.named_parameters())
        return {
            "parameters": {n: p.detach().clone() for n, p in parameters.items()},
            "steps": trainer.global_step,
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
        }


def save_and_resume(cases: list[tuple[Any, ...]], folder: str) -> list[Any]:
    """(sizes to save with, to resume with, model, optimizer, file): the whole run, and resumed after 2 of 4 steps."""
    out = []
    for index, (saved, resumed, name, optimizer, file) in enumerate(cases):
        where = Path(folder) / f"case{index}"
        whole = train(saved, 4, name, optimizer, folder, save=str(where), file=file)
        path = where / "step=2.ckpt"
        out.append((whole, train(resumed, 4, name, optimizer, folder, resume=str(path), file=file)))
        if not file and os.environ["RANK"] == "0":
            assert "global step 2" in inspect_checkpoint(path)
            assert sorted(p.name for p in where.iterdir()) == ["step=2.ckpt", "step=4.ckpt"]
    return out


def one_process(cases: list[tuple[str, str]], folder: str) -> list[Any]:
    """Lightning itself: the whole run, and resumed after 2 of 4 steps (it then reads the first batch again)."""
    out = []
    for name, optimizer in cases:
        where = Path(folder) / f"plain_{name}_{optimizer}"
        whole = train(None, 4, name, optimizer, folder, save=str(where))
        out.append((whole, train(None, 4, name, optimizer, folder, resume=str(where / "step=2.ckpt"))))
    return out


def plain_files(cases: list[tuple[str, str, str]], folder: str) -> list[Any]:
    """(directory, model, optimizer): exported to a Lightning file, resumed in one process without the strategy."""
    results = []
    for path, name, optimizer in cases:
        out = f"{folder}/plain_{name}_{optimizer}.ckpt"
        export_checkpoint(path, out)
        content = torch.load(out, weights_only=True)
        assert set(content["state_dict"]) == set(models.build(name).state_dict())
        results.append(train(None, 4, name, optimizer, folder, resume=out))
    return results
