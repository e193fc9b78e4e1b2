"""IS what `layout="auto"` chooses the fastest?  Its table's layouts of the example GPT, trained on 4 processes.

python -m benchmarks.auto_choice
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import machine, quiet
from benchmarks.planner_scores import spearman
from benchmarks.planner_self import gpt_module
from lightning_3d import ThreeDStrategy
from lightning_3d.testing import run_distributed

PROCESSES, BATCH, SEQUENCE, STEPS, ROUNDS = 4, 8, 128, 8, 2
SIZES = {"width": 128, "layers": 4, "heads": 4, "sequence": SEQUENCE}


class Watch(L.Callback):
    """Seconds of every step but the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.barrier()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def train(arguments: dict[str, Any]) -> tuple[ThreeDStrategy, float]:
    """Samples per second of the fastest step, of all replicas."""
    strategy, watch = ThreeDStrategy(**arguments), Watch()
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=STEPS, max_epochs=-1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[watch],
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(256, (BATCH * PROCESSES * STEPS, SEQUENCE + 1))
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(gpt_module(**SIZES), DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=BATCH))
    return strategy, BATCH * strategy.layout.dp / min(watch.seconds[1:])


def measure() -> list[tuple[str, float, float]]:
    """On one rank: name, predicted and measured samples per second; the first is the one that is chosen."""
    quiet()
    strategy, _ = train({"layout": "auto"})
    assert strategy.chosen is not None
    compared = strategy.chosen.compared
    speeds = [max(train(dict(arguments))[1] for _ in range(ROUNDS)) for _, _, arguments in compared]
    return [(name, predicted, speed) for (name, predicted, _), speed in zip(compared, speeds, strict=True)]


def main() -> int:
    """Print the table."""
    found = run_distributed(measure, PROCESSES, init_process_group=False, timeout=600)[0]
    print(f"{machine()}\n\n| layout | samples/s predicted | measured |\n|---|---:|---:|")
    for name, predicted, speed in found:
        print(f"| `{name}` | {predicted:.1f} | {speed:.1f} |")
    best = max(speed for _, _, speed in found)
    order = spearman([(speed, predicted) for _, predicted, speed in found])
    print(f"\nthe choice has {found[0][2] / best:.2f} of the fastest's speed; rank correlation {order:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
