"""What the ranks of a launch run for `test_zero.py`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters, relative_error
from tests import models
from tests.strategy.cases import trainer_for
from tests.strategy.fits import replica_difference

BUCKET = 4096
"""Bytes."""


def _storages(tensors: list[Tensor | None]) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(found.values())


class Gradients(pl.Callback):
    """Bytes of all gradient storages after every batch that only accumulates."""

    def __init__(self) -> None:
        self.kept = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            return
        zero = trainer.strategy.engine.zero
        tensors = [x for b in zero.buckets for x in (b.gradients, b.travels, b.pending, b.published)]
        tensors += [p.grad for p in module.parameters() if not getattr(p, "is_absent", False)]
        self.kept = max(self.kept, _storages(tensors))


def memories(layouts: list[dict[str, Any]], precision: str) -> list[tuple[int, dict[str, float]]]:
    return [memory(sizes, precision) for sizes in layouts]


def memory(sizes: dict[str, Any], precision: str) -> tuple[int, dict[str, float]]:
    """(number of this rank's parameters, its bytes for each kind): between steps, gradients between batches."""
    strategy = ThreeDStrategy(bucket_size_mb=BUCKET / 2**20, **sizes)
    watch = Gradients()
    trainer = trainer_for(strategy, accumulate_grad_batches=3, callbacks=[watch], max_epochs=1, precision=precision)
    torch.manual_seed(3)
    module = models.LitMLP(dim=96, depth=2)
    module.optimizer = "adamw"
    columns = models.vectors(48).columns
    trainer.fit(module, DataLoader(models.Samples({**columns, "x": columns["x"].float()}), batch_size=8))
    report = strategy.memory_report()
    return sum(p.numel() for p in strategy.engine.held.values()), {**report, "gradients": watch.kept}


def gradient_bytes(sizes: dict[str, Any]) -> tuple[int, int, int]:
    """(bytes of this rank's parameters, most gradients between batches, most at any time)."""
    strategy = ThreeDStrategy(bucket_size_mb=BUCKET / 2**20, **sizes)
    watch = Gradients()
    trainer = trainer_for(strategy, accumulate_grad_batches=3, callbacks=[watch], max_epochs=1)
    torch.manual_seed(3)
    module = models.build("mlp")
    trainer.fit(module, DataLoader(models.vectors(48), batch_size=8))
    parameters = sum(p.nbytes for p in strategy.engine.held.values())
    zero = strategy.engine.zero
    assert zero is not None
    return parameters, watch.kept, zero.gradient_peak + sum(b.size * b.dtype.itemsize for b in zero.buckets)


def uneven_last_batch(sizes: dict[str, Any]) -> tuple[float, float]:
    """(difference between replicas, error of the parameters): the second batch has 8 and 3 samples."""
    strategy = ThreeDStrategy(bucket_size_mb=BUCKET / 2**20, **sizes)
    trainer = trainer_for(strategy, max_epochs=1, use_distributed_sampler=False)
    torch.manual_seed(3)
    module, plain = models.build("mlp"), models.build("mlp")
    plain.load_state_dict(module.state_dict())
    columns = models.vectors(32).columns
    mine = {0: [(0, 8), (8, 16)], 1: [(16, 24), (24, 27)]}
    halves = {r: [{k: v[a:b] for k, v in columns.items()} for a, b in spans] for r, spans in mine.items()}

    class Module(type(module)):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return DataLoader(halves[self.trainer.strategy.data_parallel_rank], batch_size=None)

    module.__class__ = Module
    optimizer: Any = plain.configure_optimizers()
    trainer.fit(module)
    for step in range(2):
        optimizer.zero_grad()
        for replica in (0, 1):
            (plain.loss(halves[replica][step]) / 2).backward()
        optimizer.step()
    got = full_parameters(strategy)
    return replica_difference(strategy), max(relative_error(got[n], p) for n, p in plain.named_parameters())


def two_trainers(
    first: dict[str, Any] | None, second: dict[str, Any] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same module in two runs with a strategy each (None: one process), as the second and as the first see it."""
    torch.manual_seed(3)
    module = models.build("mlp")
    strategies: list[Any] = []
    for sizes in (first, second):
        strategies.append("auto" if sizes is None else ThreeDStrategy(bucket_size_mb=BUCKET / 2**20, **sizes))
        trainer = trainer_for(strategies[-1], use_distributed_sampler=False)
        trainer.fit(module, DataLoader(models.vectors(24), batch_size=8))
    if second is None:
        whole = {n: p.detach().clone() for n, p in module.named_parameters()}
        return whole, whole
    after = full_parameters(strategies[1])
    with strategies[1].whole_parameters():
        return after, full_parameters(strategies[0])
