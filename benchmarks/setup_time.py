"""HOW long until the first step?  Seconds of planning, proving, cutting and tracing, in one process."""

from __future__ import annotations

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
from lightning_3d.tensor import TensorGroup, ThreadCommunicator, plan_tensor_parallel, rewrite, verify_tensor_plan

PARTS = 3
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


def measure(build: Callable[[], L.LightningModule], whole: bool) -> dict[str, float]:
    """Seconds of every part of the set-up for tp=2 and pp=2.

    Args:
        build: Makes the module.
        whole: Also prove, cut and trace; False: plan only (a model on the meta device).
    """
    torch.manual_seed(0)
    module = build()
    ids = torch.randint(VOCABULARY, (2, 64))
    batch = (ids, ids)

    def step(model: nn.Module) -> Any:
        return call_step(model, "training_step", batch, 0)

    out = {"parameters": float(sum(p.numel() for p in module.parameters()))}
    begin = time.perf_counter()
    plan = plan_tensor_parallel(module, step, 2)
    out["plan"] = time.perf_counter() - begin
    out["cut fraction"] = plan.sharded_fraction
    if not whole:
        return out
    begin = time.perf_counter()
    report = verify_tensor_plan(module, plan, step)
    out["proof"] = time.perf_counter() - begin
    report.raise_if_wrong()
    group = TensorGroup(ThreadCommunicator.ring(2)[0])
    begin = time.perf_counter()
    rewrite(module, plan, group)
    out["rewrite"] = time.perf_counter() - begin

    def tracer(atoms: Any) -> Trace:
        return trace(module, atoms, partial(call_step, module, "training_step", batch, 0), group)

    begin = time.perf_counter()
    make_plan(module, 2, "auto", tracer)
    out["trace"] = time.perf_counter() - begin
    return out


def run(smoke: bool, progress: Progress) -> Result:
    """Three models, each several times."""
    models: list[tuple[str, Callable[[int], L.LightningModule], int, bool]] = [
        ("examples/train_gpt.py", example_gpt, 2 if smoke else 4, True),
        ("Hugging Face Llama, width 128", llama, 2 if smoke else 4, True),
        ("Hugging Face GPT-2 small, meta device", gpt2_small, 2 if smoke else 12, False),
    ]
    rows, data = [], {}
    for name, build, layers, whole in models:
        progress(f"set-up: {name}")
        runs = [measure(partial(build, layers), whole) for _ in range(1 if smoke else 4)]
        first, rest = runs[0], runs[1:] or runs
        middle = {key: median(r[key] for r in rest) for key in first}
        times = [f"{middle[key]:.3f}" if key in middle else "-" for key in ("plan", "proof", "rewrite", "trace")]
        rows.append([name, str(layers), f"{middle['parameters']:,.0f}", *times, f"{first['plan']:.3f}"])
        data[name] = {"layers": layers, "first": first, "median": middle}
    setting = (
        "One process, tp=2 and pp=2, a batch of 2 x 64 tokens. Plan: follow the step and decide every cut; proof: "
        "original against two simulated ranks in float64; rewrite: cut the parameters; trace: follow the rewritten "
        "step and cut it into stages. Median of 3 after a first time, which also pays for imports and rule look-ups "
        "and is shown for the plan."
    )
    columns = ["model", "layers", "parameters", "plan, s", "proof, s", "rewrite, s", "trace, s", "first plan, s"]
    return Result("setup_time", setting, [Table("seconds of set-up", columns, rows)], data)
