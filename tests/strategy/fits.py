"""Runs `Trainer.fit` on every rank of a launch, and in one process, and returns what they computed."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_3d import ThreeDStrategy
from lightning_3d.comm import DONE, PendingShard, ProcessCommunicator
from lightning_3d.testing import full_gradients, full_parameters, relative_error
from tests import models

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


@dataclass
class Case:
    model: str = "gpt_tied"
    steps: int = 2
    accumulate: int = 1
    samples: int = 8
    """Size of the global batch."""
    clip: float | None = None
    optimizer: str = "sgd"
    validate: bool = False
    parts: tuple[int, int] = (1, 1)
    """In the reference: replicas and microbatches whose losses are averaged."""
    strategy: dict[str, Any] = field(default_factory=dict)


class Record(pl.Callback):
    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.gradients:
            return
        if isinstance(trainer.strategy, ThreeDStrategy):
            self.gradients = full_gradients(trainer.strategy)
        else:
            self.gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(case: Case, strategy: Any, **trainer_options: Any) -> dict[str, Any]:
    """One `Trainer.fit`; every rank returns the same global values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = models.build(case.model)
        module.optimizer = case.optimizer
        module.parts = (1, 1) if isinstance(strategy, ThreeDStrategy) else case.parts
        record = Record()
        trainer = pl.Trainer(
            max_steps=case.steps, accelerator="cpu", precision="64-true", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=case.accumulate,
            gradient_clip_val=case.clip, strategy=strategy, callbacks=[record], use_distributed_sampler=False,
            limit_val_batches=1 if case.validate else 0, num_sanity_val_steps=1 if case.validate else 0,
            **trainer_options,
        )  # fmt: skip
        count = case.samples * case.steps * case.accumulate
        parallel = isinstance(strategy, ThreeDStrategy)
        replicas = strategy.layout.dp if parallel else 1

        class Data(pl.LightningDataModule):
            def train_dataloader(self) -> Any:
                replica = strategy.data_parallel_rank if parallel else 0
                return models.loader(case.model, count, case.samples, replica, replicas)

            val_dataloader = train_dataloader

        trainer.fit(module, datamodule=Data())
        parameters = full_parameters(strategy) if parallel else dict(module.named_parameters())
        out = {
            "gradients": record.gradients,
            "losses": record.losses,
            "rates": record.rates,
            "parameters": {n: p.detach().clone() for n, p in parameters.items()},
            "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
            "steps": trainer.global_step,
        }
        if parallel:
            out["replicas"] = replica_difference(strategy)
        return out


def replica_difference(strategy: ThreeDStrategy) -> float:
    """Largest difference between copies of a parameter: over dp, over tp if it is not cut, over stages that share."""
    engine, mesh = strategy.engine, strategy.mesh
    with strategy.whole_parameters():
        mine = {n: p.detach().clone() for n, p in engine.held.items()}
    cut = {n for n in mine if engine.placement(n) is not None}
    worst = 0.0
    for axis, skip in ((mesh.data, set()), (mesh.tensor, cut), (mesh.pipeline, set())):
        for other in axis.all_gather_object({n: p for n, p in mine.items() if n not in skip}):
            for n in other.keys() & mine.keys():
                worst = max(worst, float((other[n] - mine[n]).abs().max()) if other[n].numel() else 0.0)
    return worst


def one_process(cases: list[Case]) -> list[dict[str, Any]]:
    return [fit(case, "auto", devices=1) for case in cases]


def on_layout(cases: list[Case], sizes: dict[str, Any], world: int) -> list[dict[str, Any]]:
    return [fit(case, ThreeDStrategy(**{**sizes, **case.strategy}), devices=world) for case in cases]


def with_a_dropped_collective(axis: str, case: Case, sizes: dict[str, Any]) -> dict[str, Any]:
    """A run in which one call of `axis` silently does nothing: the third all-reduce, or the first reduction."""
    calls = {"tp": 0, "pp": 0, "dp": 0}
    all_reduce, scatter = ProcessCommunicator.all_reduce_start, ProcessCommunicator.reduce_scatter_start

    def dropped(comm: Any, op: str, tensor: Tensor) -> bool:
        if comm.axis != axis or (axis == "dp") != (op == "scatter") or tensor.numel() < 100:
            return False
        calls[axis] += 1
        return calls[axis] == (3 if axis == "tp" else 1)

    def lazy_all_reduce(self: Any, tensor: Tensor, op: Any = "sum") -> Any:
        return DONE if dropped(self, "reduce", tensor) else all_reduce(self, tensor, op)

    def lazy_scatter(self: Any, full: Tensor) -> Any:
        mine = full[self.rank * (full.numel() // self.size) :][: full.numel() // self.size]
        return PendingShard(DONE, lambda: mine) if dropped(self, "scatter", full) else scatter(self, full)

    ProcessCommunicator.all_reduce_start, ProcessCommunicator.reduce_scatter_start = lazy_all_reduce, lazy_scatter
    try:
        out = fit(case, ThreeDStrategy(**sizes), devices=2)
    finally:
        ProcessCommunicator.all_reduce_start, ProcessCommunicator.reduce_scatter_start = all_reduce, scatter
    assert calls[axis] >= 1
    return out


def differences(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Worst relative errors, by kind; gradients by parameter so that the first wrong one is named."""
    out = {}
    for kind in ("gradients", "parameters"):
        assert want[kind].keys() <= got[kind].keys(), want[kind].keys() - got[kind].keys()
        for name, tensor in want[kind].items():
            out[f"{kind} {name}"] = relative_error(got[kind][name], tensor)
    return out
