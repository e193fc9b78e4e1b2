"""WHAT does a data-parallel step cost beside Lightning's own strategies?  dp=2 against DDP, and one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import Progress, Result, Table, quiet
from benchmarks.interleave import Comparison, Measured, Variant, compare, take_turns
from lightning_3d import ThreeDStrategy
from lightning_3d.demo_run import load_example
from lightning_3d.testing import run_distributed

PARTS = 2
DDP, SINGLE = "Lightning DDPStrategy", "Lightning SingleDeviceStrategy"
FULLY_SHARD = "ModelParallelStrategy (fully_shard)"
ZERO_0, ZERO_1 = "ThreeDStrategy(zero_stage=0)", "ThreeDStrategy() (ZeRO-1)"
ZERO_2, ZERO_3 = "ThreeDStrategy(zero_stage=2)", "ThreeDStrategy(zero_stage=3)"


class Tiny(L.LightningModule):
    """Two small layers: a step is nearly all framework."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def gpt_ranks(sizes: dict[str, int], rounds: int, turn: int) -> dict[str, Measured]:
    """One of two ranks: DDP, all stages of ZeRO, and `fully_shard`, in turns."""
    quiet()
    example = load_example()

    class Sharded(example.GPTModule):
        """What Lightning asks its user to write for `fully_shard`."""

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def build(strategy: Callable[[], Any], kind: Any = example.GPTModule) -> tuple[L.LightningModule, Any, Any]:
        module = kind(
            width=sizes["width"], layers=sizes["layers"], heads=4, sequence=sizes["sequence"], decay_steps=1000
        )
        samples = sizes["batch"] * 2 * ((rounds + 1) * turn + 1)
        ids = torch.randint(example.VOCABULARY, (samples, sizes["sequence"] + 1))
        return module, DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), sizes["batch"]), strategy()

    variants = [
        Variant(DDP, lambda: build(DDPStrategy)),
        Variant(ZERO_0, lambda: build(lambda: ThreeDStrategy(zero_stage=0))),
        Variant(ZERO_1, lambda: build(ThreeDStrategy)),
        Variant(ZERO_2, lambda: build(lambda: ThreeDStrategy(zero_stage=2))),
        Variant(ZERO_3, lambda: build(lambda: ThreeDStrategy(zero_stage=3))),
        Variant(FULLY_SHARD, lambda: build(lambda: ModelParallelStrategy(2, 1), Sharded)),
    ]
    return take_turns(variants, devices=2, rounds=rounds, turn=turn)


def tiny_rank(rounds: int, turn: int) -> dict[str, Measured]:
    """The only rank: one device, with and without the strategy."""
    quiet()

    def build(strategy: Callable[[], Any]) -> tuple[L.LightningModule, Any, Any]:
        data = TensorDataset(torch.randn(4 * ((rounds + 1) * turn + 1), 8))
        return Tiny(), DataLoader(data, 4), strategy()

    variants = [
        Variant(SINGLE, lambda: build(lambda: SingleDeviceStrategy(device="cpu"))),
        Variant(ZERO_1, lambda: build(ThreeDStrategy)),
    ]
    return take_turns(variants, devices=1, rounds=rounds, turn=turn)


def run(smoke: bool, progress: Progress) -> Result:
    """Both comparisons."""
    sizes = {"width": 256, "layers": 4, "sequence": 128, "batch": 8}
    rounds, turn, tiny_rounds, tiny_turn = 10, 5, 15, 101
    if smoke:
        sizes = {"width": 32, "layers": 1, "sequence": 16, "batch": 2}
        rounds, turn, tiny_rounds, tiny_turn = 2, 2, 2, 3
    progress("data parallel: dp=2 against DDP")
    gpt = compare(run_distributed(gpt_ranks, 2, sizes, rounds, turn, timeout=420), DDP)
    progress("data parallel: one process")
    tiny = compare(run_distributed(tiny_rank, 1, tiny_rounds, tiny_turn, timeout=120, init_process_group=False), SINGLE)
    setting = (
        f"The GPT of `examples/train_gpt.py` (width {sizes['width']}, {sizes['layers']} layers, sequence "
        f"{sizes['sequence']}, {sizes['batch']} samples per rank, AdamW, float32) in 2 processes with one thread each, "
        f"each variant a `Trainer.fit`; {rounds} rounds of {turn - 1} measured steps per variant. Below it a module of "
        f"two 8 x 8 layers in one process ({tiny_rounds} rounds of {tiny_turn - 1} steps): what is left is the "
        "framework. Median (quartiles); a ratio is that of two neighbouring turns."
    )
    tables = [_gpt_table(gpt), _tiny_table(tiny)]
    data = {
        "sizes": sizes,
        "gpt": {k: v.plain() for k, v in gpt.items()},
        "one_process": {k: v.plain() for k, v in tiny.items()},
    }
    return Result("data_parallel", setting, tables, data)


def _gpt_table(rows: dict[str, Comparison]) -> Table:
    return Table(
        "dp=2: a step of the whole loop",
        ["strategy", "step, ms", "ratio to DDP", "CPU per rank, ms", "CPU ratio"],
        [[name, *c.texts(name == DDP)] for name, c in rows.items()],
    )


def _tiny_table(rows: dict[str, Comparison]) -> Table:
    base = rows[SINGLE].wall.middle
    lines = []
    for name, c in rows.items():
        more = ["1", "-"] if name == SINGLE else [c.ratio.text(1, 2), f"{1e6 * base * (c.ratio.middle - 1):+.0f}"]
        lines.append([name, c.wall.text(1e6, 0), *more])
    return Table("one process, tiny module", ["strategy", "step, us", "ratio", "more per step, us"], lines)
