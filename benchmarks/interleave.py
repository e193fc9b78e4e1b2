"""HOW do several `Trainer.fit` run side by side, so that a busy machine disturbs all of them alike?

Every variant is a `Trainer.fit` in a thread of its own; only the thread that holds the baton runs. It is passed on at
the beginning of a batch, after a *turn* of some steps: all variants are alive in one launch and take turns in rounds.
The first round, and the first step of every turn (cold caches), are not measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist

from benchmarks.common import Spread


@dataclass(frozen=True)
class Variant:
    """One side of a comparison: `build()` gives the module, its loader and the strategy."""

    name: str
    build: Callable[[], tuple[L.LightningModule, Any, Any]]


@dataclass
class Measured:
    """Seconds and CPU seconds of every measured step of a variant on one rank: one list per turn."""

    wall: list[list[float]] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Baton:
    """Lets one of `count` threads run at a time, in a fixed order."""

    def __init__(self, count: int) -> None:
        self._count, self._turn = count, 0
        self._changed = threading.Condition()
        self.error: BaseException | None = None

    def wait(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == index or self.error is not None)
        if self.error is not None:
            raise RuntimeError("another variant failed")

    def pass_on(self, index: int) -> None:
        with self._changed:
            self._turn = (index + 1) % self._count
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()


class TakeTurns(L.Callback):
    """Passes the baton at the first batch and after every `turn` steps; measures from batch start to batch start."""

    def __init__(self, baton: Baton, index: int, turn: int) -> None:
        self._baton, self._index, self._turn = baton, index, turn
        self._mark = (0.0, 0.0)
        self.measured = Measured()
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        now = (time.perf_counter(), time.process_time())
        if batch_idx:
            self._wall.append(now[0] - self._mark[0])
            self._cpu.append(now[1] - self._mark[1])
        if batch_idx % self._turn == 0:
            if batch_idx > self._turn:  # the first round warms up
                self.measured.wall.append(self._wall[1:])
                self.measured.cpu.append(self._cpu[1:])
            self._wall, self._cpu = [], []
            self._baton.pass_on(self._index)
            self._baton.wait(self._index)
            if dist.is_initialized():
                dist.barrier()
        self._mark = (time.perf_counter(), time.process_time())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step in (1, self._turn):  # a few are enough to see that all variants compute the same
            self.measured.losses.append(float(outputs["loss"]))


def take_turns(
    variants: Sequence[Variant], *, devices: int, rounds: int, turn: int, sampler: bool = True
) -> dict[str, Measured]:
    """Run all variants in this process, one of the ranks of a launch.

    Args:
        variants: Built in their threads, with the same seed each.
        devices: Processes of the launch.
        rounds: Measured turns of every variant; one more warms up.
        turn: Steps of a turn; all but the first are measured.
        sampler: Let Lightning put in its distributed sampler, which shuffles (also with a single replica).
    """
    baton = Baton(len(variants))
    recorders = [TakeTurns(baton, i, turn) for i in range(len(variants))]

    def body(index: int) -> None:
        torch.set_num_threads(1)  # a new thread would start with the machine's cores
        try:
            baton.wait(index)
            torch.manual_seed(0)
            module, loader, strategy = variants[index].build()
            trainer = L.Trainer(
                accelerator="cpu", devices=devices, strategy=strategy, max_steps=(rounds + 1) * turn + 1,
                callbacks=[recorders[index]], logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, use_distributed_sampler=sampler,
            )  # fmt: skip
            trainer.fit(module, loader)
            baton.pass_on(index)
        except BaseException as error:
            baton.fail(error)

    threads = [threading.Thread(target=body, args=(i,), name=v.name) for i, v in enumerate(variants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if baton.error is not None:
        raise baton.error
    return {v.name: recorder.measured for v, recorder in zip(variants, recorders, strict=True)}


@dataclass
class Comparison:
    """One variant over all ranks and rounds, beside the base: every spread is median and quartiles.

    Attributes:
        wall: Seconds a step takes on the slowest rank.
        cpu: CPU seconds a step costs one rank (mean over ranks), helper threads included.
        ratio, cpu_ratio: To the base, both of the same round.
        losses: First and last loss of the first turn, per rank.
    """

    wall: Spread
    cpu: Spread
    ratio: Spread
    cpu_ratio: Spread
    losses: list[list[float]]

    def texts(self, base: bool) -> list[str]:
        """Cells of a table, in ms: step, ratio, CPU, ratio of CPU."""
        ratios = ["1", "1"] if base else [self.ratio.text(1, 2), self.cpu_ratio.text(1, 2)]
        return [self.wall.text(1e3, 0), ratios[0], self.cpu.text(1e3, 0), ratios[1]]

    def plain(self) -> dict[str, Any]:
        return {
            **{k: getattr(self, k).plain() for k in ("wall", "cpu", "ratio", "cpu_ratio")},
            "losses": self.losses,
        }


def compare(ranks: Sequence[dict[str, Measured]], base: str) -> dict[str, Comparison]:
    """Put the ranks' measurements together; `base` is what ratios are taken to."""
    wall: dict[str, list[list[float]]] = {}
    cpu: dict[str, list[list[float]]] = {}
    for name in ranks[0]:
        turns = range(len(ranks[0][name].wall))
        wall[name] = [[max(steps) for steps in zip(*(r[name].wall[t] for r in ranks), strict=True)] for t in turns]
        cpu[name] = [
            [sum(steps) / len(ranks) for steps in zip(*(r[name].cpu[t] for r in ranks), strict=True)] for t in turns
        ]
    return {
        name: Comparison(
            Spread.of([s for turn in wall[name] for s in turn]),
            Spread.of([s for turn in cpu[name] for s in turn]),
            Spread.of(_ratios(wall[name], wall[base])),
            Spread.of(_ratios(cpu[name], cpu[base])),
            [r[name].losses for r in ranks],
        )
        for name in ranks[0]
    }


def _ratios(turns: list[list[float]], base: list[list[float]]) -> list[float]:
    return [median(a) / median(b) for a, b in zip(turns, base, strict=True)]
