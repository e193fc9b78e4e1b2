"""HOW long until the first step?  Seconds of planning, proving, cutting and tracing, in one process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from benchmarks.common import Progress, Result, Table
from lightning_3d.demo_run import load_example
from lightning_3d.pipeline import Trace, trace
from lightning_3d.pipeline.planning import make_plan
from lightning_3d.probe import call_step
from lightning_3d.proof import is_small, prove_plan
from lightning_3d.tensor import TensorGroup, ThreadCommunicator, plan_tensor_parallel, rewrite
from lightning_3d.testing import run_distributed

PARTS = 6
VOCABULARY = 256


class Wrapped(L.LightningModule):
    """The usual wrapper of a Hugging Face language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


def example_gpt(layers: int) -> L.LightningModule:
    return load_example().GPTModule(width=128, layers=layers, heads=4, sequence=128)


def llama(layers: int) -> L.LightningModule:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return Wrapped(LlamaForCausalLM(config))


def gpt2_small(layers: int) -> L.LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):  # 124 million parameters that need no memory
        return Wrapped(GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False)))


def llama3(layers: int, width: int, inner: int, heads: int) -> L.LightningModule:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return Wrapped(LlamaForCausalLM(config))


def measure(build: Callable[[], L.LightningModule], tp: int) -> dict[str, float]:
    """Seconds of every part of the set-up for `tp` and pp=2, and the peak memory of the process in MB.

    A model on the meta device is planned and proved by its operations; another one also run, cut and traced.
    """
    torch.manual_seed(0)
    module = build()
    ids = torch.randint(VOCABULARY, (2, 64))
    batch = (ids, ids)

    def step(model: nn.Module) -> Any:
        return call_step(model, "training_step", batch, 0)

    out = {"parameters": float(sum(p.numel() for p in module.parameters()))}
    begin = time.perf_counter()
    plan = plan_tensor_parallel(module, step, tp)
    out["plan"] = time.perf_counter() - begin
    out["cut fraction"] = plan.sharded_fraction
    run = is_small(module)
    begin = time.perf_counter()
    report = prove_plan(module, plan, lambda m, b: call_step(m, "training_step", b, 0), batch, run=run)
    out["proof"] = time.perf_counter() - begin
    report.raise_if_wrong()
    out["MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    if not run:
        return out
    group = TensorGroup(ThreadCommunicator.ring(tp)[0])
    begin = time.perf_counter()
    rewrite(module, plan, group)
    out["rewrite"] = time.perf_counter() - begin

    def tracer(atoms: Any) -> Trace:
        return trace(module, atoms, partial(call_step, module, "training_step", batch, 0), group)

    begin = time.perf_counter()
    make_plan(module, 2, "auto", tracer)
    out["trace"] = time.perf_counter() - begin
    return out


def repeated(build: Callable[[], L.LightningModule], tp: int, times: int) -> list[dict[str, float]]:
    """`measure`, several times in one process."""
    torch.set_num_threads(1)
    return [measure(build, tp) for _ in range(times)]


def run(smoke: bool, progress: Progress) -> Result:
    """Every model several times, in a process of its own."""
    small = 2 if smoke else 4
    models: list[tuple[str, Callable[[int], L.LightningModule], int, int]] = [
        ("examples/train_gpt.py", example_gpt, small, 2),
        ("Hugging Face Llama, width 128", llama, small, 2),
        ("GPT-2 small, meta", gpt2_small, 2 if smoke else 12, 2),
        ("Llama-3-8B, meta", partial(llama3, width=4096, inner=14336, heads=32), 2 if smoke else 32, 8),
        ("Llama-3-8B, meta", partial(llama3, width=4096, inner=14336, heads=32), 2 if smoke else 32, 16),
        ("Llama-3-70B, meta", partial(llama3, width=8192, inner=28672, heads=64), 2 if smoke else 80, 8),
    ]
    rows, data = [], {}
    for name, build, layers, tp in models:
        progress(f"set-up: {name}, tp={tp}")
        times = 1 if smoke else 4
        (runs,) = run_distributed(repeated, 1, partial(build, layers), tp, times, init_process_group=False, timeout=600)
        first, rest = runs[0], runs[1:] or runs
        middle = {key: median(r[key] for r in rest) for key in first}
        names = ("plan", "proof", "rewrite", "trace")
        seconds = [f"{middle[key]:.2f}" if key in middle else "-" for key in names]
        counts = [f"{middle['parameters'] / 1e6:,.1f} M", str(tp)]
        rows.append([name, *counts, *seconds, f"{first['plan']:.2f}", f"{middle['MB']:.0f}"])
        data[f"{name}, tp={tp}"] = {"layers": layers, "first": first, "median": middle}
    setting = (
        "One process per model on one thread, pp=2, a batch of 2 x 64 tokens. Plan: follow the step and decide every "
        "cut; proof: original against simulated ranks in float64 (on the meta device: every kind of operation); "
        "rewrite: cut the parameters; trace: follow the rewritten step and cut it into stages. Median of 3 after a "
        "first time, which also pays for imports and rule look-ups and is shown for the plan. Memory: peak of the "
        "process after plan and proof, with torch and transformers."
    )
    columns = ["model", "parameters", "tp", "plan, s", "proof, s", "rewrite, s", "trace, s", "first plan, s", "MB"]
    return Result("setup_time", setting, [Table("seconds of set-up", columns, rows)], data)
