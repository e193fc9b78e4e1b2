"""WHAT does one training run of the demo do?  Train the example's module once and write what was measured.

`lightning_3d.demo` starts this file twice, as `python -m lightning_3d.demo_run`: once for one process, once for the
layout (then Lightning's launcher starts the other processes with the same command line). Every rank writes
`rank<n>.json` and, if it recorded one, its trace into the output folder; nothing is returned any other way.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.observe import ledger_rows, save_trace, show

SEED = 1234
BATCH_PER_REPLICA = 8
VALIDATION_BATCHES = 4
VALIDATIONS = 4


class Measure(L.Callback):
    """Keeps losses, times, bytes and one step's communication; writes them when training ends."""

    def __init__(self, folder: Path, tokens_per_step: int) -> None:
        self.folder, self.tokens_per_step = folder, tokens_per_step
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self.seconds: list[float] = []
        self.ledger: list[dict[str, Any]] = []
        self._start = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if trainer.is_global_zero and hasattr(strategy, "explain"):
            show(strategy.explain(), "")

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        strategy: Any = trainer.strategy
        if hasattr(strategy, "ledger"):
            strategy.ledger.reset()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        strategy: Any = trainer.strategy
        if hasattr(strategy, "ledger"):
            self.ledger = [asdict(row) for row in ledger_rows(strategy.ledger)]
        self.train.append((trainer.global_step, _mean(trainer, "train_loss")))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validation.append((trainer.global_step, _mean(trainer, "val_loss")))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        memory = strategy.memory_report() if hasattr(strategy, "memory_report") else _bytes(trainer)
        at = strategy.mesh.at if hasattr(strategy, "mesh") else None
        result = {
            "rank": trainer.global_rank,
            "stage": at.pp if at else 0,
            "dp": at.dp if at else 0,
            "tp": at.tp if at else 0,
            "layout": str(getattr(strategy, "layout", "one process")),
            "train": self.train,
            "validation": self.validation,
            "seconds": self.seconds,
            "tokens_per_step": self.tokens_per_step,
            "memory": memory,
            "ledger": self.ledger,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"rank{trainer.global_rank:05d}.json").write_text(json.dumps(result))
        if getattr(strategy, "recorder", None) is not None:
            save_trace(strategy.recorder, self.folder)


def _mean(trainer: L.Trainer, name: str) -> float:
    """A logged value, averaged over the replicas (each has logged the mean of its own samples)."""
    value = trainer.strategy.reduce(trainer.callback_metrics[name].detach().clone(), reduce_op="mean")
    return float(value)


def _bytes(trainer: L.Trainer) -> dict[str, int]:
    """Bytes one process holds: parameters, gradients, optimizer state."""
    parameters = [p for p in trainer.lightning_module.parameters() if p.requires_grad]
    states = [s for o in trainer.optimizers for entry in o.state.values() for s in entry.values()]
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.nbytes for p in parameters),
        "optimizer": sum(s.nbytes for s in states if isinstance(s, torch.Tensor)),
    }


def load_example() -> ModuleType:
    """Import `examples/train_gpt.py` of the checkout this package lies in.

    Raises:
        ConfigurationError: The package was installed without a checkout around it.
    """
    path = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
    if not path.is_file():
        raise ConfigurationError(
            f"the demo trains examples/train_gpt.py, and there is no {path}. The examples are not part of the "
            "installed package: run the demo from a clone of the repository (make demo)."
        )
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


def one_process_loaders(data: Any, replicas: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders whose batch k holds the samples that `replicas` ranks together see in their batch k.

    Lightning gives replica d the samples d, d + replicas, ... of one shuffled order (`DistributedSampler` with the
    global seed); one sampler over the whole order with the `replicas`-fold batch size deals the same sets.
    """
    data.setup("fit")
    batch = data.batch_size * replicas
    order: Any = DistributedSampler(data.train, num_replicas=1, rank=0, shuffle=True, seed=SEED)
    train: DataLoader[Any] = DataLoader(data.train, batch_size=batch, sampler=order, drop_last=True)
    return train, DataLoader(data.validation, batch_size=batch, drop_last=True)


def train(mode: str, layout: Layout, microbatches: int, folder: Path, steps: int, *, fast: bool) -> None:
    """Run one of the two trainings: `mode` is "one" (process) or "layout"."""
    example = load_example()
    L.seed_everything(SEED, verbose=False)
    size = {"width": 32, "layers": 2, "sequence": 32} if fast else {"width": 128, "layers": 4, "sequence": 128}
    module = example.GPTModule(**size, decay_steps=steps)
    data = example.StandardLibraryText(batch_size=BATCH_PER_REPLICA, sequence=size["sequence"])
    measure = Measure(folder, BATCH_PER_REPLICA * layout.dp * size["sequence"])
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "limit_train_batches": steps,
        "limit_val_batches": VALIDATION_BATCHES,
        "val_check_interval": max(1, steps // VALIDATIONS),
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "callbacks": [measure],
    }
    if mode == "one":
        trainer = L.Trainer(devices=1, **settings)
        trainer.fit(module, *one_process_loaders(data, layout.dp))
        return
    from lightning_3d import ThreeDStrategy

    schedule: Any = layout.schedule
    strategy = ThreeDStrategy(
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        data_parallel_size=layout.dp,
        zero_stage=layout.zero,
        pipeline_schedule=schedule,
        num_microbatches=microbatches,
        record_timeline=True,
    )
    L.Trainer(devices=layout.world_size, strategy=strategy, **settings).fit(module, data)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["one", "layout"], required=True)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--fast", action="store_true")
    args = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # hints to users that the demo cannot follow: it has no workers, and averages over replicas itself
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*sync_dist=True.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
    train(args.mode, Layout.parse(args.layout), args.microbatches, args.output, args.steps, fast=args.fast)


if __name__ == "__main__":
    main()
