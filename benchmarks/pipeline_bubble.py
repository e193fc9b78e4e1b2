"""HOW long do stages stand idle?  Sleeping stages, ours against `torch.distributed.pipelining` and the formula.

Sleeping costs no core, so four stages show their schedule on any machine: what the makespan has beyond the formula is
what the runner itself costs (Python, messages, late wake-ups).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.common import Progress, Result, Spread, Table, quiet
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline import PipelineRunner
from lightning_3d.testing import relative_error, run_distributed

PARTS = 1
STAGES, WIDTH, SAMPLES = 4, 16, 2
OURS, TORCH = "lightning_3d", "torch.distributed.pipelining"
_slept = [0.0]


def _sleep(seconds: float) -> None:
    begin = time.perf_counter()
    time.sleep(seconds)
    _slept[0] += time.perf_counter() - begin


class Sleep(torch.autograd.Function):
    """Identity: forward sleeps `seconds`, backward twice as long, as matrices would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _sleep(2 * ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    """One stage's work."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.linear(x), self.seconds)


class Model(nn.Module):
    """One block per stage, and a step as a LightningModule has it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seconds) for _ in range(STAGES))

    def block(self, stage: int) -> Block:
        block = self.blocks[stage]
        assert isinstance(block, Block)
        return block

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def _ours(model: Model, mesh: Mesh, schedule: str, batch: tuple[Tensor, Tensor], count: int) -> Callable[[], Any]:
    split = [f"blocks.{i}" for i in range(1, STAGES)]
    runner = PipelineRunner(model, mesh, schedule=schedule, num_microbatches=count, split=split)
    runner.setup("training_step", batch)
    return lambda: runner.train_step(batch, 0)


def _torch(model: Model, stage: int, schedule: str, batch: tuple[Tensor, Tensor], count: int) -> Callable[[], Any]:
    # all shapes given: otherwise they are inferred by an extra forward
    inputs, outputs = (
        torch.zeros(SAMPLES, WIDTH, requires_grad=stage > 0),
        torch.zeros(SAMPLES, WIDTH, requires_grad=True),
    )
    part = PipelineStage(model.block(stage), stage, STAGES, torch.device("cpu"), input_args=inputs, output_args=outputs)
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    plan = kind(part, count, loss_fn=nn.functional.mse_loss)
    if stage == 0:
        return lambda: plan.step(batch[0])
    if stage == STAGES - 1:
        return lambda: plan.step(target=batch[1], return_outputs=False)
    return lambda: plan.step()


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


def stage_rank(counts: list[int], seconds: float, repeats: int) -> dict[str, Any]:
    """One of the four stages: every system, schedule and number of microbatches in turn, `repeats` times."""
    quiet()
    mesh = Mesh(Layout(pp=STAGES), torch.device("cpu"))
    torch.manual_seed(0)
    original = Model(seconds)
    runs: dict[str, tuple[Callable[[], Any], Tensor]] = {}
    for schedule in ("1f1b", "gpipe"):
        for count in counts:
            batch = (torch.randn(count * SAMPLES, WIDTH), torch.randn(count * SAMPLES, WIDTH))
            mine, theirs = copy.deepcopy(original), copy.deepcopy(original)
            # our last stage is rank 0, torch's is the last rank
            runs[f"{schedule}/{count}/{OURS}"] = (
                _ours(mine, mesh, schedule, batch, count),
                mine.block(mesh.at.pp).linear.weight,
            )
            runs[f"{schedule}/{count}/{TORCH}"] = (
                _torch(theirs, mesh.rank, schedule, batch, count),
                theirs.block(mesh.rank).linear.weight,
            )
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    gradients: dict[str, Tensor | None] = {}
    for repeat in range(repeats + 1):
        for name in sorted(runs, reverse=repeat % 2 == 0):  # neither system always comes after the other
            step, weight = runs[name]
            weight.grad = None
            measured = _timed(step)
            gradients[name] = weight.grad
            if repeat:  # the first round warms up
                times[name].append(measured)
    return {"stage": {OURS: mesh.at.pp, TORCH: mesh.rank}, "times": times, "gradients": gradients}


def run(smoke: bool, progress: Progress) -> Result:
    """All schedules in one launch."""
    counts, seconds, repeats = ([4], 0.002, 2) if smoke else ([8, 16], 0.02, 8)
    progress(f"pipeline: {STAGES} sleeping stages")
    ranks = run_distributed(stage_rank, STAGES, counts, seconds, repeats, timeout=240)
    bubbles: list[list[str]] = []
    overheads: list[list[str]] = []
    data: dict[str, Any] = {}
    for schedule in ("1f1b", "gpipe"):
        for count in counts:
            formula = (STAGES - 1) / (count + STAGES - 1)
            ideal = 3 * seconds * (count + STAGES - 1)
            found = {system: _figures(ranks, f"{schedule}/{count}/{system}", ideal) for system in (OURS, TORCH)}
            case = [schedule, str(count)]
            bubbles.append([*case, f"{formula:.3f}", *(figures["bubble"].text(1, 3) for figures in found.values())])
            overheads.append([*case, *(f[key].text(1e3, 0) for key in ("late", "cpu") for f in found.values())])
            data[f"{schedule}/{count}"] = {
                "formula": formula,
                **{system: {key: spread.plain() for key, spread in found[system].items()} for system in found},
                "gradient_error": _gradient_error(ranks, f"{schedule}/{count}"),
            }
    setting = (
        f"{STAGES} processes, one block per stage that sleeps {1e3 * seconds:g} ms in forward and {2e3 * seconds:g} ms "
        "in backward (both systems run the same modules). `PipelineRunner.train_step` against `Schedule1F1B.step` and "
        "`ScheduleGPipe.step` (shapes given, no extra forward), in one launch, in turns, from a start time all ranks "
        f"agree on; {repeats} repetitions. Bubble = 1 - slept / ({STAGES} x makespan), formula (p-1)/(m+p-1). Late: "
        "ms of makespan beyond the ideal (m+p-1) x 3 x t. CPU: ms per rank and step. Median (quartiles)."
    )
    tables = [
        Table("bubble", ["schedule", "m", "formula", "ours", "torch"], bubbles),
        Table("overhead, ms", ["schedule", "m", "late: ours", "late: torch", "CPU: ours", "CPU: torch"], overheads),
    ]
    return Result("pipeline_bubble", setting, tables, data)


def _figures(ranks: list[dict[str, Any]], name: str, ideal: float) -> dict[str, Spread]:
    bubbles, late, cpu = [], [], []
    for measured in zip(*(r["times"][name] for r in ranks), strict=True):
        makespan = max(end for end, _, _ in measured)
        bubbles.append(1 - sum(slept for _, slept, _ in measured) / (STAGES * makespan))
        late.append(makespan - ideal)
        cpu.append(sum(used for _, _, used in measured) / STAGES)
    return {"bubble": Spread.of(bubbles), "late": Spread.of(late), "cpu": Spread.of(cpu)}


def _gradient_error(ranks: list[dict[str, Any]], name: str) -> float:
    """Largest relative difference between the two systems' gradients, over the stages."""
    both = [
        {rank["stage"][system]: rank["gradients"][f"{name}/{system}"] for rank in ranks} for system in (OURS, TORCH)
    ]
    return max(relative_error(both[0][stage], both[1][stage]) for stage in range(STAGES))
