"""IS the rewritten model the same function?  Original against rewritten, on simulated ranks, in float64.

The plan is not trusted: loss and the gradient of every parameter must agree before training starts. A step that calls
`manual_backward` itself is compared by the losses it passes to it, and by the sums of the gradients they give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.comm import Ledger
from lightning_3d.errors import ParityError, TensorPlanError
from lightning_3d.probe import intercept_functions, own_parameters, python_state
from lightning_3d.tensor.decisions import TensorPlan
from lightning_3d.tensor.exact import Exactly, experiment, relative_difference
from lightning_3d.tensor.functions import function_guard
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.replica import exact_copy, optimization_untouched, redraw
from lightning_3d.tensor.rewrite import rewrite
from lightning_3d.tensor.search import Step
from lightning_3d.tensor.sharded import whole
from lightning_3d.tensor.simulate import ThreadCommunicator, must_run


@dataclass
class TensorReport:
    """What a proof found.

    Args:
        size: Number of simulated ranks.
        tolerance: Largest relative error that passes.
        loss: The original's loss.
        loss_error: Relative error of the worst rank's loss.
        errors: Parameter name -> relative error of the worst rank's gradient, in the order of the model.
        ledger: What rank 0 communicated in one forward and backward.
        gathers: How often rank 0 had to gather for an operation without a rule.
    """

    size: int
    tolerance: float
    loss: float
    loss_error: float
    errors: dict[str, float] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    gathers: int = 0

    @property
    def worst(self) -> float:
        """Largest error of all; infinite if there is a NaN."""
        errors = [self.loss_error, *self.errors.values()]
        return max(float("inf") if math.isnan(e) else e for e in errors)

    @property
    def ok(self) -> bool:
        return self.worst <= self.tolerance

    @property
    def advice(self) -> str:
        """What to do about a proof that failed."""
        name = self.first_difference
        if name is not None:
            module = name.rpartition(".")[0] or name
            return f"Leave the module around {name} whole with tensor_parallel_plan={{{module!r}: 'replicate'}}."
        return (
            "All gradients agree, so it is a term of the loss without a gradient, or one that reads parameters in a "
            "way that slips past the sharding rules. Leave what it reads whole with "
            "tensor_parallel_plan={'<module>': 'replicate'}."
        )

    @property
    def first_difference(self) -> str | None:
        """The first parameter (in the model's order) whose gradient differs."""
        return next((name for name, error in self.errors.items() if not error <= self.tolerance), None)

    def __str__(self) -> str:
        if self.ok:
            return f"tensor-parallel proof over {self.size} ranks: equal, largest relative error {self.worst:.1e}"
        wrong = [name for name, error in self.errors.items() if not error <= self.tolerance]
        text = f"tensor-parallel proof over {self.size} ranks FAILED: "
        parts = [f"loss off by {self.loss_error:.1e} (relative)"] if not self.loss_error <= self.tolerance else []
        if wrong:
            parts.append(
                f"the gradient of {wrong[0]} is off by {self.errors[wrong[0]]:.1e} (tolerance {self.tolerance:.0e}), "
                f"and {len(wrong) - 1} more of {len(self.errors)} differ"
            )
        return text + "; ".join(parts)

    def raise_if_wrong(self) -> None:
        """Raises `ParityError` unless everything agrees."""
        if not self.ok:
            raise ParityError(
                f"{self}. This is a fault of a sharding rule, not of your model. {self.advice} And please report it."
            )


def verify_tensor_plan(
    module: nn.Module, plan: TensorPlan, step: Step, *, tolerance: float = 1e-6, seed: int = 0
) -> TensorReport:
    """Compare the original with the rewritten model: loss, and the gradient of every parameter.

    Copies of the module run in float64 with redrawn weights, dropout off; what the model's code casts to a lower
    precision is lifted to float64, so only real differences are seen. The module itself is not touched.

    Args:
        module: The whole model (not rewritten); it may be attached to a trainer.
        plan: Its plan.
        step: Runs the user's step and returns the loss (a tensor, a dict with "loss", or an object with `.loss`).
        tolerance: Largest relative error that passes (relative to the largest entry of the gradient).
        seed: For the weights and for random numbers the step draws.

    Raises:
        ParityError: The step runs on the original but not on the rewritten model.
        NothingToProve: The step returns no loss (with manual optimization: it calls no backward either).
        TensorPlanError: The model cannot be copied.
        Exception: Whatever the step raises on the copy of the original.

    Memory: about (2 + plan.size * (1 - sharded fraction) + sharded fraction) float64 copies of the model.
    Collectives: none (ranks are simulated).
    """
    with experiment(seed), python_state(module) as start, optimization_untouched(module):
        original = exact_copy(module)
        redraw(original, seed)
        copies = [_rewritten(original, plan, comm) for comm in ThreadCommunicator.ring(plan.size)]
        with Exactly():
            torch.manual_seed(seed)
            losses = _run(original, step)
        start.narrow()
        start.restore()  # the ranks find what the original found

        def body(comm: ThreadCommunicator) -> tuple[list[Tensor], TensorGroup]:
            model, group = copies[comm.rank]
            group.comm = comm
            torch.manual_seed(seed)
            with Exactly():
                values = _run(model, step)
            return values, group

        with intercept_functions(function_guard, 1):
            ranks = must_run("the step runs on the original model but not on the one cut over", plan.size, body)
    group = ranks[0][1]
    report = TensorReport(
        plan.size,
        tolerance,
        losses[-1].sum().item(),
        max(_losses_error(values, losses) for values, _ in ranks),
        ledger=group.comm.ledger,
        gathers=group.gathers,
    )
    parts = [dict(model.named_parameters(remove_duplicate=False)) for model, _ in copies]
    for name, parameter in original.named_parameters():
        got = [rank[name].grad for rank in parts]
        report.errors[name] = _gradient_error(parameter, got, plan, name)
    return report


class NothingToProve(TensorPlanError):
    """This batch gives nothing to compare."""


def _run(module: nn.Module, step: Step) -> list[Tensor]:
    """The step's losses; their gradients are in the module's parameters afterwards.

    With manual optimization these are the losses given to `manual_backward`, and the gradients are the sums of what
    their backwards gave. What the step does to gradients in between (zeroes, clips, scales them by a norm, which here
    is a rank's own) is not compared.
    """
    losses: list[Tensor] = []
    sums: dict[nn.Parameter, Tensor] = {}
    manual = not getattr(module, "automatic_optimization", True)

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(whole(loss.detach()))
        before = {p: p.grad for p in own_parameters(module)}
        for parameter in before:
            parameter.grad = None
        loss.backward(*args, **kwargs)
        for parameter, old in before.items():
            new = parameter.grad
            if new is None:
                parameter.grad = old
                continue
            sums[parameter] = sums[parameter] + new if parameter in sums else new.clone()
            parameter.grad = new if old is None else old.add_(new)

    if manual:
        module.__dict__["manual_backward"] = manual_backward
    output = step(module)
    if losses:
        for parameter in own_parameters(module):
            parameter.grad = sums.get(parameter)
        return losses
    if manual and any(p.grad is not None for p in module.parameters()):  # it called `loss.backward()`
        returned = _loss_in(output)
        return [torch.zeros(())] if returned is None else [whole(returned.detach())]
    loss = whole(loss_of(output))
    if not loss.requires_grad:
        raise NothingToProve("the loss the step returned depends on no trainable parameter (is it detached?)")
    loss.backward()
    return [loss.detach()]


def _losses_error(got: list[Tensor], want: list[Tensor]) -> float:
    if len(got) != len(want):
        return float("inf")
    return max(relative_difference(g, w) for g, w in zip(got, want, strict=True))


def _rewritten(original: nn.Module, plan: TensorPlan, comm: ThreadCommunicator) -> tuple[nn.Module, TensorGroup]:
    group = TensorGroup(comm, exact_dropout=True)  # what the step draws on cut tensors is what one process draws
    model = exact_copy(original)
    rewrite(model, plan, group)
    return model, group


def _gradient_error(parameter: nn.Parameter, got: list[Tensor | None], plan: TensorPlan, name: str) -> float:
    """Error of the worst rank; for a cut parameter of the gathered gradient."""
    if not parameter.requires_grad:
        return 0.0 if all(g is None for g in got) else float("inf")
    want = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    cut = plan.decisions[name].placement
    if cut is None:
        return max(relative_difference(g if g is not None else torch.zeros_like(want), want) for g in got)
    shape = cut.local_shape(parameter.shape, plan.size)
    shards = [g if g is not None else want.new_zeros(shape) for g in got]
    if any(tuple(s.shape) != shape for s in shards):
        return float("inf")
    if cut.padding:  # padding rows must get no gradient
        filled = torch.cat(shards, cut.dim).narrow(cut.dim, cut.length, cut.padding)
        if bool(filled.count_nonzero()):
            return float("inf")
    return max(relative_difference(s, cut.to_local(want, rank, plan.size)) for rank, s in enumerate(shards))


def loss_of(output: Any) -> Tensor:
    """The loss in what a step returns."""
    loss = _loss_in(output)
    if loss is None:
        raise NothingToProve(
            f"the step returned {type(output).__name__} without a loss tensor; a tensor, a dict with 'loss' or an "
            "object with `.loss` is needed to prove the plan."
        )
    return loss


def _loss_in(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None
