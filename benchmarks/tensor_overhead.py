"""HOW much Python does tensor parallelism add?  CPU time of one rank's step on tiny tensors, without communication."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.common import Progress, Result, Table
from benchmarks.setup_time import example_gpt
from benchmarks.tensor_parallel import PLAN, Blocks
from lightning_3d.comm import Communicator
from lightning_3d.probe import call_step, intercept_functions
from lightning_3d.tensor import TensorGroup, function_guard, plan_tensor_parallel, rewrite
from lightning_3d.tensor.recorded.recording import Recording

PARTS = 4
PLAIN, RULES, RECORDED, DTENSOR = "plain module", "rules", "recorded programs", "DTensor"
VOCABULARY = 128
Step = Callable[[Any], Tensor]


class Alone(Communicator):
    """Rank 0 of two, whose peer is not there: every collective returns what this rank has."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.size

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.size, dim)[self.rank].contiguous()


def blocks(layers: int) -> tuple[nn.Module, Step]:
    values = torch.randn(1, 8, 64)
    return Blocks(64, layers), lambda model: call_step(model, "training_step", [values, values], 0)


def gpt(layers: int) -> tuple[nn.Module, Step]:
    model = example_gpt(layers)
    ids = torch.randint(VOCABULARY, (1, 8))
    return model, lambda m: nn.functional.cross_entropy(m.model(ids).flatten(0, 1), ids.flatten())


def llama(layers: int) -> tuple[nn.Module, Step]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return _language_model(LlamaForCausalLM(config))


def gpt2(layers: int) -> tuple[nn.Module, Step]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=64, n_head=4, n_positions=64, vocab_size=VOCABULARY, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _language_model(GPT2LMHeadModel(config))


def _language_model(model: nn.Module) -> tuple[nn.Module, Step]:
    ids = torch.randint(VOCABULARY, (1, 8))
    return model, lambda m: m(input_ids=ids, labels=ids).loss


def variants(model: nn.Module, step: Step) -> dict[str, Callable[[], Tensor]]:
    """The same model three ways: each a function that runs the forward and returns the loss."""
    plan = plan_tensor_parallel(model, step, 2)
    found: dict[str, Callable[[], Tensor]] = {PLAIN: _backward_of(model, lambda: step(model))}
    for name in (RULES, RECORDED):
        group = TensorGroup(Alone("tp", 0, 2))
        cut = copy.deepcopy(model)
        rewrite(cut, plan, group)
        recording = Recording(cut, group) if name == RECORDED else None
        found[name] = _parallel(cut, step, recording)
    return found


def _backward_of(model: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        loss = forward()
        loss.backward()
        return loss.detach()

    run.model = model  # type: ignore[attr-defined]
    return run


def _parallel(model: nn.Module, step: Step, recording: Recording | None) -> Callable[[], Tensor]:
    """As the strategy runs it: the contexts of a step are part of the cost."""

    def run() -> Tensor:
        with intercept_functions(function_guard, 1):
            if recording is None:
                loss = step(model)
                loss.backward()
            else:
                with recording.running(begins=True):
                    loss = step(model)
                    loss.backward()
        return loss.detach()

    run.model, run.recording = model, recording  # type: ignore[attr-defined]
    return run


def by_dtensor(layers: int) -> Callable[[], Tensor]:
    """The blocks cut by `parallelize_module`, over a process group that does not send anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model, step = blocks(layers)
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, init_device_mesh("cpu", (2,)), {name: style() for name, style in PLAN.items()})
    return _backward_of(model, lambda: step(model))


def race(runs: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Least CPU seconds of a forward and backward, all variants in turns."""
    least = dict.fromkeys(runs, float("inf"))
    for number in range(rounds + 6):
        for name, run in runs.items():
            run.model.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
            began = time.thread_time()
            run()
            if number >= 6:  # before: recording, caches
                least[name] = min(least[name], time.thread_time() - began)
    return least


def run(smoke: bool, progress: Progress) -> Result:
    """Blocks, also by DTensor, and three whole language models."""
    rounds = 3 if smoke else 300
    models = {"blocks": blocks, "examples/train_gpt.py": gpt, "Hugging Face Llama": llama, "Hugging Face GPT-2": gpt2}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows, data = [], {}
    try:
        for name, build in models.items():
            progress(f"overhead: {name}")
            layers = 2 if smoke else 4 if build is blocks else 12
            torch.manual_seed(0)
            runs = variants(*build(layers))
            if build is blocks:
                runs[DTENSOR] = by_dtensor(layers)
            least = race(runs, rounds)
            for variant, seconds in least.items():
                ratio = "1" if variant == PLAIN else f"{seconds / least[PLAIN]:.2f}"
                rows.append([name, str(layers), variant, f"{1e6 * seconds / layers:.0f}", ratio])
            recorded = runs[RECORDED].recording  # type: ignore[attr-defined]
            data[name] = {
                "layers": layers,
                "seconds": least,
                "programs": {path: len(b.programs) for path, b in recorded.blocks.items()},
            }
    finally:
        torch.set_num_threads(threads)
        if dist.is_initialized():
            dist.destroy_process_group()
    setting = (
        "Forward and backward of one rank of two, width 64 (128 in examples/train_gpt.py), one sample of 8 tokens, "
        "float32, one thread; no communication (collectives return at once; for DTensor a process group that sends "
        "nothing), so what is left is the cost of the calls. Plain module: the whole model in one process, without any "
        "parallelism. "
        f"Least CPU time of {rounds} runs, all variants in turns."
    )
    columns = ["model", "layers", "run by", "us per layer", "ratio to plain"]
    return Result("tensor_overhead", setting, [Table("CPU time of a step on tiny tensors", columns, rows)], data)
