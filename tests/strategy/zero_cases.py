"""What the ranks of a launch run for `test_zero_cases.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy.cases import trainer_for
from tests.strategy.fits import replica_difference

Sizes = dict[str, Any] | None


def strategy_of(sizes: Sizes) -> Any:
    return "auto" if sizes is None else ThreeDStrategy(**sizes)


def place(strategy: Any) -> tuple[int, int]:
    """(replica, replicas) of this process."""
    if isinstance(strategy, str):
        return 0, 1
    replicas = strategy.layout.dp
    return int(os.environ["RANK"]) // (int(os.environ["WORLD_SIZE"]) // replicas), replicas


def whole(strategy: Any, module: nn.Module) -> dict[str, Tensor]:
    found = dict(module.named_parameters()) if isinstance(strategy, str) else full_parameters(strategy)
    return {n: p.detach().clone() for n, p in found.items()}


# -- N10, N11, N12: experts without expert parallelism
class Experts(nn.Module):
    """Four experts, of which a token takes one; tokens are few, so some experts get none on some ranks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, dim)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.norm(x).flatten(0, -2)
        shares = self.router(flat).softmax(-1)
        weight, chosen = shares.max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        used = F.one_hot(chosen, 4).to(shares.dtype).mean(0)
        return x + out.view_as(x), 4 * (used * shares.mean(0)).sum()


class LitExperts(models.Lit):
    """Two such blocks; a tenth of their balance is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 8)
        self.blocks = nn.ModuleList(Experts(8) for _ in range(2))
        self.head = nn.Linear(8, models.VOCAB)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"][:, :3]
        x, balance = self.embed(tokens[:, :-1]), 0.0
        for block in self.blocks:
            x, more = block(x)
            balance = balance + more
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten()) + 0.1 * balance


models.MODELS["experts"] = (LitExperts, models.tokens)


# -- N9: what is left over at the end of an epoch
def leftovers(cases: list[tuple[Sizes, str]]) -> list[tuple[dict[str, Tensor], int]]:
    """Two epochs of five batches, four (or, by a schedule, two and then three) per step; parameters and steps."""
    out = []
    for sizes, how in cases:
        strategy = strategy_of(sizes)
        options: dict[str, Any] = {"accumulate_grad_batches": 4}
        if how == "scheduled":
            options = {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 3})]}
        trainer = trainer_for(strategy, max_epochs=2, use_distributed_sampler=False, **options)
        module = models.build("gpt_tied")
        trainer.fit(module, models.loader("gpt_tied", 40, 8, *place(strategy)))
        out.append((whole(strategy, module), trainer.global_step))
    return out


# -- U7: manual optimization with two optimizers
class GAN(pl.LightningModule):
    """Two optimizers that take turns, gradients of three batches per step, by hand."""

    every = 3

    def __init__(self, adaptive: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.adaptive = adaptive
        self.automatic_optimization = False
        parts = (nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))
        self.generator, self.critic = parts

    def configure_optimizers(self) -> Any:
        critic = torch.optim.SGD(self.critic.parameters(), 0.1, momentum=0.9)
        if not self.adaptive:
            return torch.optim.SGD(self.generator.parameters(), 0.1), critic
        return torch.optim.Adam(self.generator.named_parameters(), 0.01, betas=(0.5, 0.9)), critic

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, steps = batch["x"], (batch_idx + 1) % self.every == 0
        for optimizer, loss_of in zip(self.optimizers(), (self.fool, self.tell), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss_of(x) / self.every)
            if steps:
                self.clip_gradients(optimizer, 0.1, "norm")
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def fool(self, x: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.generator(x.flip(1)))).mean()

    def tell(self, x: Tensor) -> Tensor:
        fake = self.generator(x.flip(1)).detach()
        return F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake)).mean()


def gan(cases: list[Sizes], precision: str = "64-true") -> list[tuple[dict[str, Tensor], float]]:
    """(parameters, difference between copies) of every layout; in less than float64 with SGD, where rounding stays."""
    out = []
    for sizes in cases:
        strategy = strategy_of(sizes)
        options: dict[str, Any] = {"precision": precision}
        if precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
            options = {"precision": None, "plugins": [MixedPrecision(precision, "cpu", scaler)]}
        trainer = trainer_for(strategy, use_distributed_sampler=False, **options)
        module = GAN(adaptive=precision == "64-true")
        loader = models.loader("mlp", 48, 8, *place(strategy))
        if precision == "64-true":
            module.double()
        else:
            loader.dataset.columns["x"] = loader.dataset.columns["x"].float()
        trainer.fit(module, loader)
        out.append((whole(strategy, module), 0.0 if sizes is None else replica_difference(strategy)))
    return out


def refused(kind: Callable[[], pl.LightningModule], sizes: Sizes) -> str:
    strategy = strategy_of(sizes)
    try:
        trainer_for(strategy).fit(kind().double(), models.loader("mlp", 16, 8))
    except ValueError as error:
        return str(error)
    return ""


# -- M2: a large vocabulary makes the last stage heavy
class HeavyEnds(models.Lit):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 16), nn.Linear(16, 4096)
        self.blocks = nn.ModuleList(models.Block(16, 2) for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch["tokens"])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["tokens"].flatten())


def stage_bytes(split: str | list[str]) -> tuple[int, int]:
    """(stage, bytes of parameters) of this rank."""
    strategy = ThreeDStrategy(pipeline_parallel_size=2, pipeline_split=split)
    trainer = trainer_for(strategy, max_steps=1, precision="32-true")
    trainer.fit(HeavyEnds(), models.loader("gpt_tied", 8, 8))
    return strategy.mesh.at.pp, strategy.memory_report()["parameters"]
