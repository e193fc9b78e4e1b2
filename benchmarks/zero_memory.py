"""HOW MUCH memory does a rank need?  Resident bytes per parameter for every stage, beside DDP and `fully_shard`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import Progress, Result, Table, quiet
from benchmarks.memory_of_process import forget_peak, return_memory_at_once, status, trim
from lightning_3d import ThreeDStrategy
from lightning_3d.testing import run_distributed

PARTS = 2
DDP, FULLY_SHARD = "DDPStrategy", "ModelParallelStrategy (fully_shard)"
VARIANTS = [DDP, *(f"ThreeDStrategy(zero_stage={stage})" for stage in range(4)), FULLY_SHARD]
STEPS = 3


class Blocks(L.LightningModule):
    """Wide layers and a short batch: parameters, and hardly any activations."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Sharded(Blocks):
    """What Lightning asks its user to write for `fully_shard`."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


class Resident(L.Callback):
    """Resident bytes: the most since training began, and what is left once gradients are gone."""

    def __init__(self) -> None:
        self.peak = self.rest = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trim()
        forget_peak()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.peak = status("VmHWM")
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        trim()
        self.rest = status("VmRSS")


def measure(variant: str, world: int, accumulate: int, width: int, layers: int) -> tuple[int, int, int]:
    """(parameters, most bytes while training, bytes at rest) of one rank, beyond what it had without a model."""
    quiet()
    return_memory_at_once()
    before = status("VmRSS")
    strategy: Any
    if variant == FULLY_SHARD:
        strategy, module = ModelParallelStrategy(world, 1), Sharded(width, layers)
    else:
        strategy, module = DDPStrategy(), Blocks(width, layers)
        if variant != DDP:
            strategy = ThreeDStrategy(zero_stage=int(variant[-2]))
    count = sum(p.numel() for p in module.parameters())
    watch = Resident()
    trainer = L.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_steps=STEPS, accumulate_grad_batches=accumulate,
        callbacks=[watch], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.randn(world * STEPS * accumulate, width))
    trainer.fit(module, DataLoader(data, batch_size=1))
    return count, watch.peak - before, watch.rest - before


def run(smoke: bool, progress: Progress) -> Result:
    """Every variant in processes of its own."""
    width, layers = (64, 2) if smoke else (640, 8)
    rows, data = [], {}
    for world in (2, 4):
        progress(f"memory: dp={world}")
        for variant in VARIANTS if not smoke or world == 2 else ():
            cells, count = [], 0
            for accumulate in (1, 2):
                ranks = run_distributed(measure, world, variant, world, accumulate, width, layers, timeout=120)
                count = ranks[0][0]
                peak, rest = (max(r[i] for r in ranks) / count for i in (1, 2))
                data[f"{variant}/dp{world}/accumulate{accumulate}"] = {"peak": peak, "rest": rest}
                cells += [f"{peak:.1f}", f"{rest:.1f}"]
            rows.append([variant, str(world), *cells])
    setting = (
        f"{layers} blocks of LayerNorm, {width} x {4 * width} and {4 * width} x {width} matrices "
        f"({count / 1e6:.0f} million parameters), float32, AdamW, one sample per rank, {STEPS} steps. Resident memory "
        "of a rank per parameter, beyond what the process had before there was a model (the largest of the ranks): the "
        "most while training, and what is left when gradients are gone. a: batches accumulated per step."
    )
    columns = ["strategy", "dp", "a=1: peak", "a=1: rest", "a=2: peak", "a=2: rest"]
    return Result("zero_memory", setting, [Table("bytes per parameter", columns, rows)], data)
