"""WHAT does activation checkpointing save, and cost?  Bytes kept after a forward, and time of forward and backward."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Progress, Result, Table
from lightning_3d.recompute import Recompute

PARTS = 1
MODES: dict[str, Any] = {"nothing recomputed": None, "selective": "selective", "full": "full"}


class Block(nn.Module):
    """A transformer block as most are written."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


def _kept(model: nn.Module, x: Tensor, recompute: Recompute) -> int:
    """Bytes a forward leaves allocated, besides its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, recompute.active():
        out = model(x)
    events = profiler.events() or []
    return sum(event.self_cpu_memory_usage for event in events) - out.nbytes


def _seconds(model: nn.Module, x: Tensor, recompute: Recompute) -> float:
    start = time.perf_counter()
    with recompute.active():
        out = model(x)
    out.sum().backward()
    return time.perf_counter() - start


def run(smoke: bool, progress: Progress) -> Result:
    """One model in every mode, in turns."""
    width, depth, batch, length, repeats = (32, 2, 2, 16, 2) if smoke else (512, 4, 4, 256, 9)
    progress("activation checkpointing")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, 8) for _ in range(depth)))
    x = torch.randn(batch, length, width, requires_grad=True)
    recomputes = {name: Recompute(model, mode) for name, mode in MODES.items()}
    kept = {name: _kept(model, x, r) for name, r in recomputes.items()}
    times: dict[str, list[float]] = {name: [] for name in MODES}
    for _ in range(repeats):
        for name, recompute in recomputes.items():
            times[name].append(_seconds(model, x, recompute))
    base_kept, base = kept["nothing recomputed"], median(times["nothing recomputed"])
    unit = batch * length * width * 4
    rows = [
        [name, f"{kept[name] / depth / unit:.1f}", f"{kept[name] / base_kept:.2f}", f"{median(times[name]) / base:.2f}"]
        for name in MODES
    ]
    setting = (
        f"{depth} transformer blocks of width {width}, {batch} x {length} tokens, float32. Kept: bytes the "
        "forward leaves allocated, per block, in units of one activation (batch x length x width). Time: "
        "forward and backward, median, in turns."
    )
    data = {name: {"kept": kept[name], "seconds": median(times[name])} for name in MODES}
    table = Table("activation checkpointing", ["", "kept per block", "ratio", "time"], rows)
    return Result("activation_memory", setting, [table], data)
