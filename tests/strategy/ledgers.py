"""One training step on every rank, and what the ledger counted in it."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl

from lightning_3d import ThreeDStrategy
from lightning_3d.comm import FIRST_STEPS_ONLY
from tests import models
from tests.strategy.cases import trainer_for

SAMPLES, LENGTH, DIM = 8, 8, 16


class Quiet(models.LitGPT):
    """Logs nothing: a value logged with sync_dist is one more all-reduce over dp."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class Count(pl.Callback):
    def __init__(self) -> None:
        self.traffic: dict[tuple[str, str, str], tuple[int, int, int, float]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.ledger.reset()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        ledger = trainer.strategy.ledger
        kept = {k: t for k, t in ledger.traffic.items() if k[0] not in FIRST_STEPS_ONLY}
        self.traffic = {k: (t.calls, t.elements, t.payload, t.wire) for k, t in kept.items()}


def count(sizes: dict[str, Any], depth: int, tied: bool = True) -> dict[str, Any]:
    strategy = ThreeDStrategy(**sizes)
    record = Count()
    trainer = trainer_for(strategy, max_steps=2, max_epochs=-1, callbacks=[record], use_distributed_sampler=False)
    module = Quiet(depth=depth, dim=DIM, tied=tied).double()
    replicas = strategy.layout.dp
    rank = int(os.environ["RANK"]) // (int(os.environ["WORLD_SIZE"]) // replicas)
    trainer.fit(module, models.loader("gpt_tied", SAMPLES * replicas * 2, SAMPLES * replicas, rank, replicas))
    zero = strategy.engine.zero
    assert zero is not None
    return {
        "traffic": record.traffic,
        "parameters": sum(p.numel() for p in strategy.engine.held.values()),
        "padded": sum(bucket.numel for bucket in zero.buckets),
        "buckets": len(zero.buckets),
        "again": sum(s.flat.numel() for u in zero.units.units[1:-1] for s in u.storages) if zero.units else 0,
    }


def count_all(cases: list[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    return [count(*case) for case in cases]
