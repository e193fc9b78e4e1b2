"""WHAT does the pipeline's interpreter cost?  Recording a step, and every event of glue code it routes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Progress, Result, Spread, Table
from lightning_3d.pipeline.atom_memory import AtomMemory
from lightning_3d.pipeline.atoms import find_atoms
from lightning_3d.pipeline.execution import Program, forward
from lightning_3d.pipeline.glue_state import GlueState
from lightning_3d.pipeline.partition import make_partition, windows_from_starts
from lightning_3d.pipeline.rng import Randomness, Seeds
from lightning_3d.pipeline.trace import trace

PARTS = 2


class Chain(nn.Module):
    """Two layers with many small operations between them, all of them glue code."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.first, self.last, self.operations = nn.Linear(8, 8), nn.Linear(8, 8), operations

    def glue(self, x: Tensor) -> Tensor:
        for _ in range(self.operations // 2):
            x = (x * 0.5).transpose(0, 1)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(self.glue(self.first(batch))).sum()


def _per_event(operations: int, repeats: int) -> dict[str, Spread]:
    """Microseconds per event: skipped (before the window), and executed (beyond the operation itself)."""
    module, x = Chain(operations), torch.randn(8, 8)

    def step() -> Tensor:
        return module.training_step(x, 0)

    atoms = {"first": module.first, "last": module.last}
    found = trace(module, atoms, step)
    starts = [n for n, _ in found.calls()]
    partition = make_partition(found, windows_from_starts(found, [0, starts[1]]))
    program = Program(module, atoms, Randomness(torch.device("cpu")), None, _nothing, GlueState(module, 0))
    received = {vid: torch.randn(8, 8, requires_grad=True) for vids in partition.receives[1].values() for vid in vids}
    times: dict[str, list[float]] = {"skipped": [], "executed": [], "plain": []}
    with program.run():
        for _ in range(repeats):
            times["skipped"].append(_time(lambda: forward(program, partition, 1, received, step, Seeds())))
            times["executed"].append(_time(lambda: forward(program, partition, 0, {}, step, Seeds())))
            times["plain"].append(_time(step))
    beyond = [a - b for a, b in zip(times["executed"], times["plain"], strict=True)]
    return {
        "skipped": Spread.of([t / operations for t in times["skipped"]]),
        "executed": Spread.of([t / operations for t in beyond]),
    }


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def _time(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _models(depth: int) -> dict[str, tuple[nn.Module, Callable[[int], Any]]]:
    import transformers

    from benchmarks.activation_memory import Block

    transformers.logging.set_verbosity_error()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(128, 64), nn.Linear(64, 128)
            self.blocks = nn.ModuleList(Block(64, 4) for _ in range(depth))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = self.embed(batch["input_ids"])
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    class Hugging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    hidden_size=64, intermediate_size=128, num_hidden_layers=depth, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=128, use_cache=False,
                )
            )  # fmt: skip

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

    def batch(length: int) -> Any:
        ids = torch.randint(1, 128, (2, length))
        return {"input_ids": ids, "labels": ids}

    return {"GPT": (Plain(), batch), "Hugging Face Llama": (Hugging(), batch)}


def _recording(depth: int, repeats: int) -> dict[str, dict[str, Spread]]:
    """Seconds to record a step: the first time, and for another length of the sequences."""
    found = {}
    for name, (module, batch) in _models(depth).items():
        atoms = find_atoms(module, 4)

        def record(
            length: int, memory: AtomMemory, module: Any = module, atoms: Any = atoms, batch: Any = batch
        ) -> float:
            data = batch(length)
            return _time(lambda: trace(module, atoms, lambda: module.training_step(data, 0), memory=memory))

        record(8, AtomMemory())  # imports
        first, other = [], []
        for k in range(repeats):
            memory = AtomMemory()
            first.append(record(12, memory))
            memory.learn(atoms)
            other.append(record(16 + k, memory))
        found[name] = {"first": Spread.of(first), "other": Spread.of(other)}
    return found


def run(smoke: bool, progress: Progress) -> Result:
    """Both, in one process."""
    depth, operations, repeats = (4, 40, 2) if smoke else (48, 400, 15)
    progress("pipeline: events of glue code")
    events = _per_event(operations, repeats)
    progress(f"pipeline: recording {depth} blocks")
    recorded = _recording(depth, 2 if smoke else 5)
    tables = [
        Table(
            "glue code, us per event", ["skipped (before the window)", "executed, beyond the operation"],
            [[events["skipped"].text(1e6, 1), events["executed"].text(1e6, 1)]],
        ),
        Table(
            f"recording a step of {depth} blocks, s", ["", "first", "another length"],
            [[name, times["first"].text(1, 2), times["other"].text(1, 2)] for name, times in recorded.items()],
        ),
    ]  # fmt: skip
    setting = (
        f"One process. Events: {operations} small operations between two layers, routed by the interpreter of a stage "
        "that skips them, and of one that runs them. Recording: `pipeline.trace` of a training step on the CPU, "
        "parameters without data; for another length equal blocks are recorded once. Median (quartiles)."
    )
    data = {
        "events": {name: spread.plain() for name, spread in events.items()},
        "recording": {n: {k: s.plain() for k, s in times.items()} for n, times in recorded.items()},
    }
    return Result("pipeline_glue", setting, tables, data)
