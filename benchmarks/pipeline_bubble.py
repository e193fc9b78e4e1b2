"""HOW long do stages stand idle?  Sleeping stages, ours against `torch.distributed.pipelining` and the formula.

Sleeping costs no core, so eight stages show their schedule on any machine: what the makespan has beyond the formula is
what the runner itself costs (Python, messages, late wake-ups).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from benchmarks.common import Progress, Result, Spread, Table, quiet
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline import PipelineRunner
from lightning_3d.pipeline.timing import formula_bubble
from lightning_3d.pipeline.training_schedule import TrainingSchedule
from lightning_3d.testing import relative_error, run_distributed

PARTS = 1
WIDTH, SAMPLES = 16, 2
OURS, TORCH = "lightning_3d", "torch.distributed.pipelining"
THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
}
_slept = [0.0]


class Case(NamedTuple):
    """A schedule, the windows per stage, and the microbatches."""

    schedule: str
    virtual: int
    count: int

    def __str__(self) -> str:
        return f"{self.schedule}/v{self.virtual}/{self.count}"


def cases(counts: list[int], stages: int) -> list[Case]:
    """Every schedule with every number of microbatches it is made for."""
    kinds = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2)]
    return [Case(name, v, m) for name, v in kinds for m in counts if name != "zb_v" or m >= 2 * stages]


def _sleep(seconds: float) -> None:
    begin = time.perf_counter()
    time.sleep(seconds)
    _slept[0] += time.perf_counter() - begin


class Sleep(torch.autograd.Function):
    """Identity that sleeps: as much in its backward as in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        if forward:
            _sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        _sleep(ctx.seconds)
        return gradients[0], None, None


class Block(nn.Module):
    """One window's work: a unit of time in forward, one for the gradient of the input, one for that of the weight.

    Args:
        seconds: The unit.
        pieces: The two gradients are nodes of their own in autograd's graph, so that a zero-bubble schedule can divide
            them. Otherwise they come together, as a plain product's do.
    """

    def __init__(self, seconds: float, pieces: bool) -> None:
        super().__init__()
        self.linear, self.seconds, self.pieces = nn.Linear(WIDTH, WIDTH), seconds, pieces

    def forward(self, x: Tensor) -> Tensor:
        if not self.pieces:
            return Sleep.apply(self.linear(x), self.seconds, 2 * self.seconds)
        weight = Sleep.apply(self.linear.weight, 0.0, self.seconds)
        return Sleep.apply(nn.functional.linear(x, weight, self.linear.bias), self.seconds, self.seconds)


class Model(nn.Module):
    """One block per window, and a step as a LightningModule has it."""

    def __init__(self, windows: int, seconds: float, pieces: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seconds, pieces) for _ in range(windows))

    def block(self, window: int) -> Block:
        block = self.blocks[window]
        assert isinstance(block, Block)
        return block

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def _ours(model: Model, mesh: Mesh, case: Case, batch: tuple[Tensor, Tensor]) -> tuple[Callable[[], Any], list[int]]:
    split = [f"blocks.{i}" for i in range(1, len(model.blocks))]
    schedule = TrainingSchedule(case.schedule, mesh.layout.pp, case.virtual)
    runner = PipelineRunner(model, mesh, schedule=schedule, num_microbatches=case.count, split=split)
    runner.setup("training_step", batch)
    return lambda: runner.train_step(batch, 0), [w for w, s in enumerate(schedule.owners) if s == mesh.at.pp]


def _torch(
    model: Model, rank: int, stages: int, case: Case, batch: tuple[Tensor, Tensor]
) -> tuple[Callable[[], Any], list[int]]:
    windows = len(model.blocks)
    mine = [rank + stages * k for k in range(case.virtual)]
    if case.schedule == "zb_v":
        mine = [rank, windows - 1 - rank]

    def part(window: int) -> PipelineStage:
        # all shapes given: otherwise they are inferred by an extra forward
        given = torch.zeros(SAMPLES, WIDTH, requires_grad=window > 0)
        made = torch.zeros(SAMPLES, WIDTH, requires_grad=True)
        return PipelineStage(
            model.block(window), window, windows, torch.device("cpu"), input_args=given, output_args=made
        )

    parts: Any = [part(window) for window in mine]
    kind = getattr(pipelining.schedules, THEIRS[case.schedule])
    single = case.schedule in ("gpipe", "1f1b")
    plan = kind(parts[0] if single else parts, case.count, loss_fn=nn.functional.mse_loss)
    args = (batch[0],) if 0 in mine else ()
    kwargs = {"target": batch[1], "return_outputs": False} if windows - 1 in mine else {}
    return lambda: plan.step(*args, **kwargs), mine


def _timed(step: Callable[[], Any]) -> tuple[float, float, float]:
    """Seconds from a start all ranks have agreed on to this rank's end; of these asleep in its stage; CPU seconds."""
    dist.barrier()  # everybody is done with the step before, or the start would lie in its tail
    start: list[Any] = [time.monotonic() + 0.02]
    dist.broadcast_object_list(start, 0)
    _slept[0] = 0.0
    time.sleep(max(0.0, start[0] - time.monotonic()))
    cpu = time.process_time()
    step()
    return time.monotonic() - start[0], _slept[0], time.process_time() - cpu


def stage_rank(stages: int, counts: list[int], seconds: float, repeats: int, peer: bool) -> dict[str, Any]:
    """One of the stages: every system, schedule and number of microbatches in turn, `repeats` times."""
    quiet()
    mesh = Mesh(Layout(pp=stages), torch.device("cpu"))
    torch.manual_seed(0)
    runs: dict[str, tuple[Callable[[], Any], Model, list[int]]] = {}
    for case in cases(counts, stages):
        original = Model(stages * case.virtual, seconds, case.schedule.startswith("zb"))
        batch = (torch.randn(case.count * SAMPLES, WIDTH), torch.randn(case.count * SAMPLES, WIDTH))
        mine, theirs = copy.deepcopy(original), copy.deepcopy(original)
        runs[f"{case}/{OURS}"] = _swapped(mine, _ours(mine, mesh, case, batch))
        if peer:  # our last stage is rank 0, torch's is the last rank
            runs[f"{case}/{TORCH}"] = _swapped(theirs, _torch(theirs, mesh.rank, stages, case, batch))
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    gradients: dict[str, dict[int, Tensor | None]] = {}
    for repeat in range(repeats + 1):
        for name in sorted(runs, reverse=repeat % 2 == 0):  # neither system always comes after the other
            step, model, windows = runs[name]
            for window in windows:
                model.block(window).linear.weight.grad = None
            measured = _timed(step)
            gradients[name] = {w: model.block(w).linear.weight.grad for w in windows}
            if repeat:  # the first round warms up
                times[name].append(measured)
    return {"times": times, "gradients": gradients}


def _swapped(model: Model, made: tuple[Callable[[], Any], list[int]]) -> tuple[Callable[[], Any], Model, list[int]]:
    return made[0], model, made[1]


def run(smoke: bool, progress: Progress) -> Result:
    """All schedules: four stages in one launch, eight in another; long stages without the peer."""
    settings = [(4, [8], 0.002, 2, True)] if smoke else [
        (4, [8, 16, 32], 0.02, 5, True), (8, [8, 16, 32], 0.02, 4, True),
        (4, [8, 16, 32], 0.05, 2, False), (8, [8, 16, 32], 0.05, 2, False),
    ]  # fmt: skip
    progress("pipeline: sleeping stages")
    rows: list[list[str]] = []
    data: dict[str, Any] = {}
    for stages, counts, seconds, repeats, peer in settings:
        ranks = run_distributed(stage_rank, stages, stages, counts, seconds, repeats, peer, timeout=600)
        for case in cases(counts, stages):
            formula = formula_bubble(case.schedule, stages, case.count, case.virtual)
            found = {s: _figures(ranks, f"{case}/{s}", stages) for s in ((OURS, TORCH) if peer else (OURS,))}
            texts = [found[s]["bubble"].text(1, 3) if s in found else "" for s in (OURS, TORCH)]
            cpu = [found[s]["cpu"].text(1e3, 0) if s in found else "" for s in (OURS, TORCH)]
            name = f"{case.schedule} v={case.virtual}" if case.virtual > 1 else case.schedule
            rows.append([f"{1e3 * seconds:g}", str(stages), name, str(case.count), f"{formula:.3f}", *texts, *cpu])
            data[f"{1e3 * seconds:g}ms/p{stages}/{case}"] = {
                "formula": formula,
                **{system: {key: spread.plain() for key, spread in found[system].items()} for system in found},
                **({"gradient_error": _gradient_error(ranks, str(case))} if peer else {}),
            }
    setting = (
        "One process per stage, one block per window that sleeps one unit of time in forward and two in backward, for "
        "zero bubble one for the gradient of its input and one for that of its weight (both systems run the same "
        "modules). `PipelineRunner.train_step` against the schedules of `torch.distributed.pipelining` (shapes given, "
        "no extra forward; for zb_h1 its ScheduleInterleavedZeroBubble with one window per stage), in one launch, in "
        "turns, from a start time all ranks agree on. Bubble = 1 - slept / (p x makespan). CPU: ms per rank and step. "
        "Median (quartiles)."
    )
    header = ["unit, ms", "p", "schedule", "m", "formula", "ours", "torch", "CPU: ours", "CPU: torch"]
    return Result("pipeline_bubble", setting, [Table("bubble", header, rows)], data)


def _figures(ranks: list[dict[str, Any]], name: str, stages: int) -> dict[str, Spread]:
    bubbles, cpu = [], []
    for measured in zip(*(r["times"][name] for r in ranks), strict=True):
        makespan = max(end for end, _, _ in measured)
        bubbles.append(1 - sum(slept for _, slept, _ in measured) / (stages * makespan))
        cpu.append(sum(used for _, _, used in measured) / stages)
    return {"bubble": Spread.of(bubbles), "cpu": Spread.of(cpu)}


def _gradient_error(ranks: list[dict[str, Any]], case: str) -> float:
    """Largest relative difference between the two systems' gradients, over the windows."""
    both = [
        {w: g for rank in ranks for w, g in rank["gradients"][f"{case}/{system}"].items()} for system in (OURS, TORCH)
    ]
    return max(relative_error(both[0][w], both[1][w]) for w in both[0])
