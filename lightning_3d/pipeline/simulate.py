"""DOES the cut model compute what the whole one does?  All stages in one process, one after the other, for proofs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.pipeline.absent import AbsentParameter, make_absent
from lightning_3d.pipeline.events import Vid
from lightning_3d.pipeline.execution import Live, Program, backward, forward, loss_of
from lightning_3d.pipeline.glue_state import GlueState
from lightning_3d.pipeline.microbatch import split_with_sizes
from lightning_3d.pipeline.partition import Partition, windows_from_starts
from lightning_3d.pipeline.planning import Plan, Split, cut, make_plan
from lightning_3d.pipeline.results import StepResult, collect
from lightning_3d.pipeline.rng import Randomness, Seeds
from lightning_3d.pipeline.stage import Logged
from lightning_3d.pipeline.trace import trace
from lightning_3d.probe import ModuleState, call_step, own_generators, probe_arguments


@dataclass
class Simulation:
    """What a simulated batch gave.

    Attributes:
        result: Loss, outputs and logs.
        gradients: Name -> gradient, of every parameter (None where there is none).
        partitions: Per microbatch, how it was cut.
        held: Per stage, the parameters it would hold.
    """

    result: StepResult
    gradients: dict[str, Tensor | None]
    partitions: list[Partition]
    held: list[set[str]]


def simulate(
    module: nn.Module,
    stages: int,
    batch: Any,
    *,
    num_microbatches: int = 1,
    split: Split = "auto",
    batch_idx: int = 0,
    seed: int = 0,
    step_number: int = 0,
    tensor_group: Any = None,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    owners: Sequence[int] | None = None,
) -> Simulation:
    """Run `training_step` as `stages` pipeline stages would, in this process; the module is left as it was.

    While a window runs, the parameters its stage does not hold are absent, so a wrong cut cannot go unnoticed. With
    `stages=1` this is the uncut step, drawing the same random numbers: the reference of a proof.

    Args:
        module: The root module with all its parameters; gradients it has are kept.
        stages: Number of stages.
        batch: One batch.
        num_microbatches, split, batch_idx, seed, step_number, tensor_group, forward_context: As in `PipelineRunner`.
        owners: Stage of every window; default: one window per stage.

    Raises:
        PipelineError: The step cannot be cut as asked.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    randomness = Randomness(device, own_generators(module))
    microbatches, sizes = split_with_sizes(batch, num_microbatches)
    step = getattr(module, "training_step")  # noqa: B009  (not every nn.Module has it)

    def traced(i: int, atoms: Any) -> Any:
        arguments = probe_arguments(step, microbatches[i])
        call = partial(call_step, module, "training_step", *arguments)
        seeds = Seeds(seed, step_number, i, 0)
        return trace(
            module, atoms, call, tensor_group, randomness=randomness, forward_context=forward_context, seeds=seeds
        )

    plan = make_plan(module, stages, split, lambda atoms: traced(0, atoms), owners)
    program = Program(module, plan.atoms, randomness, tensor_group, forward_context, GlueState(module, None))
    weights = [size / sum(sizes) for size in sizes]
    held = [{n for n, s in plan.held.holders.items() if stage in s} for stage in range(stages)]
    partitions, outputs, losses, logged = [], [], [], []
    state, buffers = ModuleState(module), _StageBuffers(module, stages)
    with _own_gradients(module) as gradients:
        for i, microbatch in enumerate(microbatches):
            partition = cut(plan.trace if i == 0 else traced(i, plan.atoms), plan.held, training=True)
            seeds = Seeds(seed, step_number, i, 0)

            run = partial(call_step, module, "training_step", microbatch, batch_idx)
            out, loss, log = _microbatch(program, partition, held, buffers, run, seeds, weights[i])
            partitions.append(partition)
            outputs.append(out)
            losses.append(loss)
            logged.append(log)
    state.restore()
    return Simulation(collect(outputs, losses, logged, sizes, weights), gradients, partitions, held)


def _microbatch(
    program: Program,
    partition: Partition,
    held: Sequence[set[str]],
    buffers: _StageBuffers,
    step: Callable[[], Any],
    seeds: Seeds,
    weight: float,
) -> tuple[Any, Tensor | None, list[Logged]]:
    values: dict[Vid, Tensor] = {}
    lives: list[Live] = []
    for window in partition.windows:
        received = {}
        for vid in (v for vids in partition.receives[window.number].values() for v in vids):
            meta = partition.trace.meta[vid]
            received[vid] = values[vid].detach().clone().requires_grad_(meta.requires_grad)
        with _only(program.module, held[window.stage]), buffers.of(window.stage):
            run, out = forward(program, partition, window.number, received, step, seeds)
        values.update(run.captured)
        lives.append(Live(partition, window.number, run))
    loss = loss_of(out, partition.trace.step)
    lives[-1].loss, lives[-1].factors = loss, (weight,)
    gradients: dict[Vid, Tensor] = {}
    logged = list(lives[-1].run.logged)
    for live in reversed(lives):
        wanted = {vid: gradients[vid] for vid in live.edges if vid in gradients}
        backward(live, wanted, partial(_add, gradients))
    return out, None if loss is None else loss.detach(), logged


def _add(gradients: dict[Vid, Tensor], more: Mapping[Vid, Tensor]) -> None:
    for vid, gradient in more.items():
        gradients[vid] = gradients[vid] + gradient if vid in gradients else gradient


class _StageBuffers:
    """Every stage has its own copy of the buffers, as it would in a process of its own."""

    def __init__(self, module: nn.Module, stages: int) -> None:
        self._buffers = list(module.buffers())
        self._copies = [[b.clone() for b in self._buffers] for _ in range(stages)]

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        with torch.no_grad():
            before = [b.clone() for b in self._buffers]
            for buffer, copy in zip(self._buffers, self._copies[stage], strict=True):
                buffer.data.copy_(copy)  # past the version counter: batch norm saves its buffers for the backward
        try:
            yield
        finally:
            with torch.no_grad():
                for i, buffer in enumerate(self._buffers):
                    self._copies[stage][i] = buffer.clone()
                    buffer.data.copy_(before[i])


@contextmanager
def _only(module: nn.Module, names: set[str]) -> Iterator[None]:
    """Make all other parameters absent for a while."""
    saved: list[tuple[Any, Tensor, type, dict[str, Any], Tensor | None]] = []
    for name, parameter in module.named_parameters():
        if name not in names:
            saved.append((parameter, parameter.data, parameter.__class__, dict(parameter.__dict__), parameter.grad))
            make_absent(parameter, name, ())
    try:
        yield
    finally:
        for parameter, data, kind, attributes, gradient in saved:
            assert isinstance(parameter, AbsentParameter)
            parameter.__class__ = kind
            parameter.data = data
            parameter.grad = gradient
            parameter.__dict__.clear()
            parameter.__dict__.update(attributes)


@contextmanager
def _own_gradients(module: nn.Module) -> Iterator[dict[str, Tensor | None]]:
    """Collect the gradients of what runs inside, and put the module's own back."""
    before = {name: p.grad for name, p in module.named_parameters()}
    gradients: dict[str, Tensor | None] = {}
    for p in module.parameters():
        p.grad = None
    try:
        yield gradients
    finally:
        for name, p in module.named_parameters():
            gradients[name] = p.grad
            p.grad = before[name]


__all__ = ["Plan", "Simulation", "simulate", "windows_from_starts"]
