"""HOW MUCH memory does it take to begin?  Peak resident bytes of a rank until the first step, of a model of 1 GB."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import Progress, Result, Table, quiet
from benchmarks.memory_of_process import return_memory_at_once, status
from lightning_3d import ThreeDStrategy
from lightning_3d.testing import run_distributed

PARTS = 5
RANKS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp4": {"tensor_parallel_size": 4},
    "pp4": {"pipeline_parallel_size": 4},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp4, ZeRO-3": {"zero_stage": 3},
}
FULLY_SHARD = "ModelParallelStrategy (fully_shard, on meta)"
IN_INIT, IN_HOOK, FROM_FILE = "built in __init__", "in configure_model", "from a safetensors file"


class GPT(nn.Module):
    """With the usual initialisation over all layers after they were made."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = width // 64

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Module(L.LightningModule):
    """Args: sizes of the GPT; how: where its values come from; file: with weights."""

    def __init__(self, sizes: tuple[int, int, int], how: str, file: str) -> None:
        super().__init__()
        self.sizes, self.how, self.file = sizes, how, file
        self.net: Any = GPT(*sizes) if how == IN_INIT else None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        if self.how != FULLY_SHARD:
            self.net = GPT(*self.sizes)
            if self.how == FROM_FILE:
                self.net.load_state_dict(load_file(self.file))
            return
        with torch.device("meta"):
            self.net = GPT(*self.sizes)
        for part in [*self.net.blocks, self.net]:
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = batch[0]
        return F.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class FirstStep(L.Callback):
    """When training begins: the largest resident memory so far, the time, and this rank's part of the parameters."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.peak, self.at = status("VmHWM"), time.perf_counter()
        if isinstance(trainer.strategy, ThreeDStrategy):
            self.part = trainer.strategy.memory_report()["parameters"]
        else:
            self.part = sum(p.to_local().nbytes for p in module.parameters())


def measure(sizes: tuple[int, int, int], how: str, layout: dict[str, Any], file: str) -> tuple[int, int, float]:
    """(peak bytes, bytes of this rank's parameters, seconds until the first step)."""
    quiet()
    return_memory_at_once()
    strategy: Any = ModelParallelStrategy(RANKS, 1) if how == FULLY_SHARD else ThreeDStrategy(**layout)
    watch = FirstStep()
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=1, callbacks=[watch], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(0)
    began = time.perf_counter()
    tokens = torch.randint(0, sizes[2], (RANKS * 4, 17))
    trainer.fit(Module(sizes, how, file), DataLoader(TensorDataset(tokens), batch_size=4))
    return watch.peak, watch.part, watch.at - began


def run(smoke: bool, progress: Progress) -> Result:
    """Every layout and source in processes of its own, beside the same run with a model of no size."""
    sizes = (64, 4, 512) if smoke else (2048, 4, 16384)
    none = (64, 4, 64)
    with torch.device("meta"):
        model = GPT(*sizes)
    whole, largest = (f(p.nbytes for p in model.parameters()) for f in (sum, max))
    rows, data = [], {"whole": whole, "largest": largest}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "weights.safetensors")
        _write(sizes, file)
        cases = dict.fromkeys(LAYOUTS, (IN_INIT, IN_HOOK, FROM_FILE)) | {"dp4": (FULLY_SHARD,)}
        for name, how in [(n, h) for n, hows in cases.items() for h in hows]:
            if how == cases[name][0]:
                progress(f"start-up: {name}")
            if smoke and (name, how) not in (("pp4", IN_HOOK), ("dp4", FULLY_SHARD)):
                continue
            layout, model_free = LAYOUTS.get(name, {}), IN_HOOK if how == FROM_FILE else how
            ranks = run_distributed(measure, RANKS, sizes, how, layout, file, timeout=300)
            empty = run_distributed(measure, RANKS, none, model_free, layout, file, timeout=300)
            base = max(r[0] for r in empty)
            peak, part, seconds = (max(r[i] for r in ranks) for i in range(3))
            data[f"{name}/{how}"] = {"peak": peak, "empty": base, "part": part, "seconds": seconds}
            cells = [f"{x / 2**20:,.0f}" for x in (peak - base, part)]
            rows.append([f"{name}, {how}", *cells, f"{(peak - base - part) / largest:.2f}", f"{seconds:.1f}"])
    setting = (
        f"A GPT of {whole / 2**30:.2f} GiB (float32, {sizes[1]} blocks of width {sizes[0]}, vocabulary {sizes[2]:,}, "
        f"tied; largest tensor {largest / 2**20:.0f} MiB) on {RANKS} ranks of one machine. Peak resident memory of a "
        "rank until the first step (the largest of the ranks), less that of the same run with a model of no size; the "
        "rank's part of the parameters; what the peak has beyond that, in largest tensors; and the seconds from the "
        "Trainer to the first step."
    )
    columns = ["layout, source of the values", "peak, MiB", "part, MiB", "beyond, tensors", "seconds"]
    return Result("start_up_memory", setting, [Table("memory until the first step", columns, rows)], data)


def _write(sizes: tuple[int, int, int], file: str) -> None:
    torch.manual_seed(1)
    model = GPT(*sizes)
    save_file({n: p.detach() for n, p in model.named_parameters()} | {"head.weight": model.head.weight.clone()}, file)
