"""What the ranks of a launch run for the public bug reports in `test_cases.py`."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy.fits import replica_difference


def trainer_for(strategy: Any, **options: Any) -> pl.Trainer:
    warnings.simplefilter("ignore")
    defaults = {
        "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "logger": False, "precision": "64-true",
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "strategy": strategy, "max_epochs": 1,
    }  # fmt: skip
    return pl.Trainer(**{**defaults, **options})


# -- N16, T1: replicas and ties stay bit-equal although every rank starts from another seed
def ten_steps(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[float, float]]:
    out = []
    for name, sizes in cases:
        strategy = ThreeDStrategy(**sizes)
        trainer = trainer_for(strategy, max_steps=10, max_epochs=-1)
        torch.manual_seed(100 + int(os.environ["RANK"]))
        module = models.MODELS[name][0]().double()
        data = models.MODELS[name][1](16)
        trainer.fit(module, DataLoader(data, batch_size=8))
        moved = [p for p in full_parameters(strategy).values() if not torch.isfinite(p).all()]
        out.append((replica_difference(strategy), float(len(moved))))
    return out


# -- T2: a tie survives being built on the meta device
class OnMeta(models.LitGPT):
    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.wte = None

    def configure_model(self) -> None:
        if self.wte is None:
            with torch.device("meta"):
                whole = models.LitGPT(depth=2)
            for name, child in whole.named_children():
                setattr(self, name, child)


def built_on_meta(layouts: list[dict[str, Any]]) -> list[tuple[bool, float, float]]:
    """Whether the tie held, how far replicas (and the two ends) are apart, and the first loss."""
    out = []
    for sizes in layouts:
        strategy = ThreeDStrategy(**sizes)
        trainer = trainer_for(strategy, max_steps=3, max_epochs=-1)
        module = OnMeta()
        torch.manual_seed(1)
        trainer.fit(module, models.loader("gpt_tied", 16, 8))
        tied = "wte.weight" in (names := dict(module.named_parameters())) and "head.weight" not in names
        finite = all(torch.isfinite(p).all() for p in full_parameters(strategy).values())
        out.append((tied and finite, replica_difference(strategy), float(trainer.callback_metrics["loss"])))
    return out


# -- C1, C2, C4: one norm for the whole mesh
class Uneven(models.LitGPT):
    """Gradients of very different size in the first and the last stage."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 20 * self.wpe.weight.square().sum() + self.norm.weight.square().sum() / 50


def clipped(cases: list[tuple[dict[str, Any] | None, str]]) -> list[tuple[float, dict[str, Tensor]]]:
    out = []
    for sizes, algorithm in cases:
        strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
        norms: list[float] = []

        class Norm(pl.Callback):
            def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
                if isinstance(trainer.strategy, ThreeDStrategy):
                    norms.append(float(trainer.strategy.gradient_norm(optimizer)))  # noqa: B023
                else:
                    norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters()])))  # noqa: B023

        trainer = trainer_for(
            strategy, max_steps=2, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm, callbacks=[Norm()],
            use_distributed_sampler=False,
        )  # fmt: skip
        torch.manual_seed(3)
        module = Uneven().double()
        replicas = 1 if sizes is None else strategy.layout.dp
        rank = int(os.environ["RANK"]) // (int(os.environ["WORLD_SIZE"]) // replicas)
        trainer.fit(module, models.loader("gpt_tied", 16, 8, rank, replicas))
        full = dict(module.named_parameters()) if sizes is None else full_parameters(strategy)
        out.append((norms[0], {n: p.detach().clone() for n, p in full.items()}))
    return out


# -- D1, D4: which samples a rank sees
class Index(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": torch.full((8,), float(i), dtype=torch.float64), "y": torch.tensor(i % 5)}


class Stream(IterableDataset):
    """Sharded the way Lightning offers: by the sampler's number of replicas and rank."""

    trainer: Any = None

    def __iter__(self) -> Any:
        where = self.trainer.distributed_sampler_kwargs
        return (Index()[i] for i in range(where["rank"], 16, where["num_replicas"]))


class Ids(pl.Callback):
    def __init__(self) -> None:
        self.ids: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.ids += batch["x"][:, 0].int().tolist()


class Samples(pl.LightningDataModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        if self.kind == "own_sampler":  # keyed on the global rank, as written for DDP
            sampler = DistributedSampler(Index(), dist.get_world_size(), dist.get_rank(), shuffle=False)
            return DataLoader(Index(), batch_size=2, sampler=sampler)
        if self.kind == "batch_sampler":
            return DataLoader(Index(), batch_sampler=BatchSampler(list(range(16)), 2, False))
        if self.kind == "stream":
            stream = Stream()
            stream.trainer = self.trainer
            return DataLoader(stream, batch_size=2)
        return DataLoader(Index(), batch_size=2, shuffle=self.kind == "shuffled")


def sample_ids(sizes: dict[str, Any], kinds: list[str]) -> list[tuple[list[int], int]]:
    out = []
    for kind in kinds:
        record = Ids()
        trainer = trainer_for(ThreeDStrategy(**sizes), callbacks=[record])
        torch.manual_seed(5)
        trainer.fit(models.LitMLP(), datamodule=Samples(kind))
        out.append((record.ids, trainer.global_step))
    return out


# -- D6: metrics count every sample once
class Metrics(models.LitMLP):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(5, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch["x"])
        self.accuracy(logits, batch["y"])
        losses = F.cross_entropy(logits, batch["y"], reduction="none")
        self.log("accuracy", self.accuracy)
        self.log("sum", losses.sum(), sync_dist=True, reduce_fx="sum")
        self.log("mean", losses.mean(), sync_dist=True)
        self.log("largest", losses.max(), sync_dist=True, reduce_fx="max")
        self.log("perplexity", losses.mean().exp(), sync_dist=True)


def metrics(sizes: dict[str, Any] | None) -> dict[str, float]:
    strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
    trainer = trainer_for(strategy, use_distributed_sampler=False)
    torch.manual_seed(9)
    module = Metrics().double()
    replicas = 1 if sizes is None else strategy.layout.dp
    rank = int(os.environ["RANK"]) // (int(os.environ["WORLD_SIZE"]) // replicas)
    # batches of 8 and, at the end, of 4: a mean over batches is not a mean over samples
    result = trainer.validate(module, models.loader("mlp", 20, 8, rank, replicas), verbose=False)
    assert {k: float(v) for k, v in trainer.callback_metrics.items()} == result[0]
    return {k: float(v) for k, v in result[0].items()}


# -- L4, L7: shapes on disk, parameter groups chosen by the number of dims
class Grouped(models.LitGPT):
    """Vocabulary 101 does not divide; decay for matrices only."""

    def configure_optimizers(self) -> Any:
        matrices = {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": 0.1}
        vectors = {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([matrices, vectors], lr=0.01)


def groups_and_file(sizes: dict[str, Any], folder: str) -> list[list[str]]:
    """Names in every group; a plain file of the run's weights is in the folder."""
    from lightning_3d.checkpoint import export_checkpoint

    strategy = ThreeDStrategy(**sizes)
    trainer = trainer_for(strategy, max_steps=1, max_epochs=-1)
    torch.manual_seed(3)
    trainer.fit(Grouped().double(), models.loader("gpt_tied", 16, 8))
    trainer.save_checkpoint(f"{folder}/run.ckpt")
    if trainer.is_global_zero:
        export_checkpoint(f"{folder}/run.ckpt", f"{folder}/plain.ckpt")
    strategy.barrier()
    return strategy.engine.zero.names_of(trainer.optimizers[0])


# -- S6: two fits in one process
def two_models(fits: list[tuple[int, int, int]]) -> list[float]:
    """The last loss of fits of (heads, tp, pp), one after the other in this process."""
    out = []
    for heads, tp, pp in fits:
        strategy = ThreeDStrategy(tensor_parallel_size=tp, pipeline_parallel_size=pp) if tp * pp > 1 else "auto"
        trainer = trainer_for(strategy, max_steps=3, max_epochs=-1, use_distributed_sampler=False)
        torch.manual_seed(3)
        trainer.fit(models.LitGPT(heads=heads).double(), models.loader("gpt_tied", 16, 8))
        out.append(float(trainer.callback_metrics["loss"]))
    return out
