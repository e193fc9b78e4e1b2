"""IS the planner right about this library?  Layouts of the example GPT on 8 processes: bytes, memory, order of times.

python -m benchmarks.planner_self
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import machine, quiet
from benchmarks.planner_scores import spearman
from lightning_3d import ThreeDStrategy
from lightning_3d.comm import FIRST_STEPS_ONLY
from lightning_3d.layout import Layout
from lightning_3d.planner.calibrate import measured_cluster
from lightning_3d.planner.candidate import Job, candidate_for
from lightning_3d.planner.memory import memory
from lightning_3d.planner.step_time import Run, step_time
from lightning_3d.planner.user_model import chain_of_module, traffic
from lightning_3d.testing import run_distributed

PROCESSES, GLOBAL_BATCH, SEQUENCE, WIDTH, LAYERS = 8, 32, 64, 256, 8
LAYOUTS = [
    "tp1-pp1-zero0", "tp1-pp1-zero1", "tp2-pp1-zero1", "tp4-pp1-zero1", "tp1-pp2-zero1", "tp2-pp2-zero1",
    "tp1-pp4-zero1", "tp2-pp4-zero1", "tp4-pp2-zero1", "tp1-pp8-zero1",
]  # fmt: skip
STEPS = 6
AXES = ("tp", "pp", "dp")


def gpt_module(**sizes: int) -> Any:
    """The example's module, logging nothing (a logged value is one more all-reduce)."""
    file = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", file)
    assert spec is not None
    assert spec.loader is not None
    namespace = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(namespace)
    base: Any = namespace.GPTModule

    class Quiet(base):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self._loss(batch)

    return Quiet(**{"width": WIDTH, "layers": LAYERS, "heads": 8, "sequence": SEQUENCE, **sizes})


class Watch(L.Callback):
    """Traffic of the last step and seconds of all but the first."""

    def __init__(self) -> None:
        self.traffic: dict[str, float] = {}
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.ledger.reset()
        trainer.strategy.barrier()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        kept = [(k, t) for k, t in trainer.strategy.ledger.traffic.items() if k[0] not in FIRST_STEPS_ONLY]
        self.traffic = {axis: sum(t.wire for (_, a, _), t in kept if a == axis) for axis in AXES}


def train(layouts: list[str]) -> list[dict[str, Any]]:
    """On one rank: what every layout sent, held and took."""
    quiet()
    out = []
    for text in layouts:
        layout = Layout.parse(text).with_world_size(PROCESSES)
        samples = GLOBAL_BATCH // layout.dp
        strategy = ThreeDStrategy(
            tensor_parallel_size=layout.tp,
            pipeline_parallel_size=layout.pp,
            zero_stage=layout.zero,
            **({"num_microbatches": samples} if layout.pp > 1 else {}),
        )
        watch = Watch()
        trainer = L.Trainer(
            accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=STEPS, max_epochs=-1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[watch], use_distributed_sampler=True,
        )  # fmt: skip
        torch.manual_seed(0)
        ids = torch.randint(256, (GLOBAL_BATCH * STEPS, SEQUENCE + 1))
        trainer.fit(gpt_module(), DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=samples))
        out.append({"traffic": watch.traffic, "seconds": min(watch.seconds[1:]), "memory": strategy.memory_report()})
    return out


def predict(text: str, chain: Any, cluster: Any) -> tuple[Run, Layout]:
    """The run that `train` makes of a layout: all samples of a replica at once, or one by one through a pipeline."""
    layout = Layout.parse(text).with_world_size(PROCESSES)
    job = Job(GLOBAL_BATCH, SEQUENCE, "fp32", "32-true", "lightning_3d-cpu")
    micro = 1 if layout.pp > 1 else GLOBAL_BATCH // layout.dp
    return Run(chain, cluster, job, candidate_for(layout, job, micro)), layout


def main() -> int:
    """Print the table."""
    batch = (torch.zeros(2, SEQUENCE, dtype=torch.long), torch.zeros(2, SEQUENCE, dtype=torch.long))
    chain = chain_of_module(gpt_module(), batch)
    cluster = measured_cluster(PROCESSES)
    ranks = run_distributed(train, PROCESSES, LAYOUTS, init_process_group=False, timeout=1200)
    print(f"{machine()}\n")
    print(
        "| layout | bytes tp, pp, dp (all ranks) | predicted | states MB (largest) | predicted | s/step | predicted |"
    )
    print("|---|---|---|---:|---:|---:|---:|")
    pairs, exact = [], 0
    for number, text in enumerate(LAYOUTS):
        run, layout = predict(text, chain, cluster)
        sent = {axis: sum(rank[number]["traffic"][axis] for rank in ranks) for axis in AXES}
        told = traffic(run, 4)
        each = layout.tp * layout.dp
        said = {axis: each * sum(getattr(stage, axis) for stage in told) for axis in AXES}
        held = max(sum(rank[number]["memory"].values()) for rank in ranks)
        states = max(stage.states for stage in memory(run).stages)
        seconds = max(rank[number]["seconds"] for rank in ranks)
        predicted = step_time(run).total
        pairs.append((seconds, predicted))
        exact += sent == said
        cells = [", ".join(f"{table[axis]:,.0f}" for axis in AXES) for table in (sent, said)]
        print(
            f"| {text} | {cells[0]} | {cells[1]} | {held / 1e6:.2f} | {states / 1e6:.2f} "
            f"({100 * (states / held - 1):+.1f} %) | {seconds:.3f} | {predicted:.3f} |"
        )
    print(f"\nbytes equal in {exact} of {len(LAYOUTS)}; rank correlation of times {spearman(pairs):.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
