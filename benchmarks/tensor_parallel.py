"""WHAT does a tensor-parallel step cost beside DTensor?  tp=2 against Lightning's `ModelParallelStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import Progress, Result, Table, quiet
from benchmarks.interleave import Measured, Variant, compare, take_turns
from lightning_3d import ThreeDStrategy
from lightning_3d.testing import run_distributed

PARTS = 3
DTENSOR, OURS = "ModelParallelStrategy", "ThreeDStrategy"
HEAD = 32
PLAN: dict[str, Callable[[], ParallelStyle]] = {
    "qkv": ColwiseParallel,
    "out": RowwiseParallel,
    "fc": ColwiseParallel,
    "projection": RowwiseParallel,
}
"""What the author writes for DTensor; our planner finds the same (tests/benchmarks)."""


class Block(nn.Module):
    """Attention with an explicit softmax, and an MLP; q, k, v packed per head, so that both systems can cut it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.projection = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence = x.shape[:2]
        # -1: the number of heads, which under DTensor is that of this rank
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, -1, 3, HEAD).transpose(1, 2).unbind(3)
        weights = (q @ k.transpose(-2, -1) * HEAD**-0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, sequence, -1))
        return x + self.projection(nn.functional.gelu(self.fc(self.norm2(x))))


class Blocks(L.LightningModule):
    """A stack of blocks on values; nothing else."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.blocks(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ByHand(Blocks):
    """The same, with the plan `ModelParallelStrategy` asks the author to write."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for block in self.blocks:
            parallelize_module(
                block, self.device_mesh["tensor_parallel"], {name: style() for name, style in PLAN.items()}
            )


def ranks(sizes: dict[str, int], rounds: int, turn: int) -> dict[str, Measured]:
    """One of two ranks."""
    quiet()

    def loader() -> Any:
        generator = torch.Generator().manual_seed(1)
        count = sizes["batch"] * ((rounds + 1) * turn + 1)
        x, y = (torch.randn(count, sizes["sequence"], sizes["width"], generator=generator) for _ in range(2))
        return DataLoader(TensorDataset(x, y), sizes["batch"])

    def ours() -> tuple[L.LightningModule, Any, Any]:
        return Blocks(sizes["width"], sizes["layers"]), loader(), ThreeDStrategy(tensor_parallel_size=2)

    def dtensor() -> tuple[L.LightningModule, Any, Any]:
        strategy = ModelParallelStrategy(tensor_parallel_size=2, data_parallel_size=1)
        return ByHand(sizes["width"], sizes["layers"]), loader(), strategy

    variants = [Variant(DTENSOR, dtensor), Variant(OURS, ours)]
    return take_turns(variants, devices=2, rounds=rounds, turn=turn, sampler=False)


def run(smoke: bool, progress: Progress) -> Result:
    """All widths."""
    rounds, turn = (2, 2) if smoke else (10, 6)
    rest = {"layers": 1, "sequence": 8, "batch": 2} if smoke else {"layers": 2, "sequence": 128, "batch": 4}
    rows, data = [], {}
    for width in (64, 128, 192) if smoke else (256, 512, 1024):
        sizes = {"width": width, **rest}
        progress(f"tensor parallel: width {width}")
        found = compare(run_distributed(ranks, 2, sizes, rounds, turn, timeout=300), DTENSOR)
        for name, c in found.items():
            rows.append([name, str(width), *c.texts(name == DTENSOR)])
        data[str(width)] = {"sizes": sizes, **{name: c.plain() for name, c in found.items()}}
    setting = (
        f"{rest['layers']} blocks of attention and MLP (heads of {HEAD}, explicit softmax in both, sequence "
        f"{rest['sequence']}, {rest['batch']} samples, AdamW, float32), cut over 2 processes with one thread each: "
        "`ModelParallelStrategy` is DTensor by `ColwiseParallel` / `RowwiseParallel`, written by hand in "
        "`configure_model`; for `ThreeDStrategy(tensor_parallel_size=2)` the planner finds the same cut. "
        f"{rounds} rounds of {turn - 1} measured steps per variant. Median (quartiles)."
    )
    columns = ["strategy", "width", "step, ms", "ratio to DTensor", "CPU per rank, ms", "CPU ratio"]
    return Result("tensor_parallel", setting, [Table("tp=2: a step of the whole loop", columns, rows)], data)
