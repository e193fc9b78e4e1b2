"""One step on simulated ranks, by recorded programs, against one process and against the rules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.comm import Communicator
from lightning_3d.probe import intercept_functions
from lightning_3d.tensor import (
    TensorGroup,
    TensorPlan,
    function_guard,
    plan_tensor_parallel,
    rewrite,
    run_simulated,
)
from lightning_3d.tensor.recorded.recording import Recording
from lightning_3d.testing import relative_error

STEPS = 4  # rules, recording, and two by programs
Step = Callable[[Any], Tensor]


@dataclass
class Run:
    """What one rank got in every step."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    recording: Recording | None
    random: Tensor


def train(
    model: nn.Module,
    plan: TensorPlan,
    step: Step,
    comm: Communicator,
    recorded: bool = True,
    steps: int = STEPS,
    change: Callable[[nn.Module, int], None] | None = None,
) -> Run:
    """Some steps of a copy of `model`, cut over `comm`."""
    model, group = copy.deepcopy(model), TensorGroup(comm)
    rewrite(model, plan, group)
    recording = Recording(model, group) if recorded else None
    run = Run([], [], recording, torch.empty(0))
    for number in range(steps):
        if change is not None:
            change(model, number)
        model.zero_grad()
        torch.manual_seed(number)
        with recording.running(begins=True) if recording is not None else nullcontext():
            loss = step(model)
        with recording.running() if recording is not None else nullcontext():
            if loss.requires_grad:
                loss.backward()
        run.losses.append(loss.detach())
        run.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
    run.random = torch.get_rng_state()
    return run


def both(build: Callable[[], nn.Module], step: Step, size: int = 2, sequence: bool = False, **options: Any) -> Any:
    """(original, plan, runs by recorded programs, runs under the rules) on simulated ranks."""
    torch.manual_seed(0)
    model = build().double()
    plan = plan_tensor_parallel(model, step, size, sequence=sequence)
    with intercept_functions(function_guard, 1):
        recorded = run_simulated(size, lambda comm: train(model, plan, step, comm, True, **options))
        rules = run_simulated(size, lambda comm: train(model, plan, step, comm, False, **options))
    return model, plan, recorded, rules


def check_against_rules(recorded: list[Run], rules: list[Run], tolerance: float = 1e-9) -> None:
    """Losses and random states bit for bit (sums of the backward may be formed in another order)."""
    for ours, theirs in zip(recorded, rules, strict=True):
        assert all(map(torch.equal, ours.losses, theirs.losses))
        assert torch.equal(ours.random, theirs.random)
        for got, want in zip(ours.gradients, theirs.gradients, strict=True):
            assert got.keys() == want.keys()
            for name in got:
                assert (got[name] is None) == (want[name] is None), name
                assert relative_error(got[name], want[name]) < tolerance, name


def check_against_one_process(model: nn.Module, plan: TensorPlan, step: Step, runs: list[Run], bound: float) -> None:
    """Loss and every gradient of the last step, which ran by programs."""
    model.zero_grad()
    want = step(model)
    want.backward()
    for rank, run in enumerate(runs):
        assert relative_error(run.losses[-1], want) < bound
        for name, parameter in model.named_parameters():
            cut, gradient = plan.decisions[name].placement, parameter.grad
            if gradient is not None and cut is not None:
                gradient = cut.to_local(gradient, rank, plan.size)
            assert relative_error(run.gradients[-1][name], gradient) < bound, name


def replays(runs: list[Run]) -> int:
    """Calls that ran by a program, on the first rank; the same on all."""
    counts = {sum(b.replays for b in run.recording.blocks.values()) for run in runs if run.recording is not None}
    assert len(counts) == 1, "ranks do not agree"
    return counts.pop()


def reasons(runs: list[Run]) -> str:
    """Why calls of the first rank were not recorded."""
    assert runs[0].recording is not None
    return "; ".join(why for b in runs[0].recording.blocks.values() for why, _ in b.refusals.values())
