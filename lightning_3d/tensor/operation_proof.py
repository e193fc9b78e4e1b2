"""IS every operation on shards the one on the whole tensor?  A proof for models that are too large to be run.

Every kind of operation that the planned step does on cut tensors is tried alone, in float64, with random values: the
global operation against the simulated ranks. A whole tensor must be whole on every rank, and so must its gradient; a
cut one must be the ranks' shards, and so must its gradient. What holds for every operation holds for the step, by the
chain rule. Each is also tried with a second reader of its operands, since readers of a whole tensor share the sum of
its gradient. Not seen: what goes past torch's functions (see docs/tensor.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_3d.errors import ParityError
from lightning_3d.probe import intercept_functions
from lightning_3d.tensor.decisions import TensorPlan
from lightning_3d.tensor.exact import Exactly, experiment, relative_difference, widest
from lightning_3d.tensor.functions import function_guard
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.operations import Operand, Operation, operations_of
from lightning_3d.tensor.placement import Placement
from lightning_3d.tensor.reduced import reduced
from lightning_3d.tensor.search import Step
from lightning_3d.tensor.sharded import ShardedTensor, local, placement, whole
from lightning_3d.tensor.simulate import ThreadCommunicator, must_run

_LARGEST = 1 << 25
"""Elements of the largest operand that is tried."""

_DRAWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda u: 4 * u - 2,
    lambda u: u + 0.5,  # for functions of positive numbers
    lambda u: 0.8 * u + 0.1,  # for functions of numbers below one
)


@dataclass
class OperationReport:
    """What a proof by operations found.

    Args:
        size: Number of simulated ranks.
        tolerance: Largest relative error that passes.
        errors: Operation -> relative error of the worst rank's result or gradient.
        calls: Number of calls in one step that the operations stand for.
        unproved: Operation -> why it could not be tried alone.
        gathers: How often an operation without a rule gathers its operands.
    """

    size: int
    tolerance: float
    errors: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    unproved: dict[str, str] = field(default_factory=dict)
    gathers: int = 0

    @property
    def worst(self) -> float:
        """Largest error of all; infinite if there is a NaN."""
        return max((math.inf if math.isnan(e) else e for e in self.errors.values()), default=0.0)

    @property
    def ok(self) -> bool:
        return self.worst <= self.tolerance

    @property
    def first_difference(self) -> str | None:
        """The first operation that differs."""
        return next((name for name, error in self.errors.items() if not error <= self.tolerance), None)

    @property
    def advice(self) -> str:
        """What to do about a proof that failed."""
        return (
            "Leave the layer it comes from whole with tensor_parallel_plan={'<module>': 'replicate'}, or correct the "
            "rule if it is yours (register_rule)."
        )

    def __str__(self) -> str:
        count = f"{len(self.errors)} kinds of operations ({self.calls} calls a step)"
        if self.ok:
            text = f"tensor-parallel proof by operations over {self.size} ranks: {count} equal, largest relative error "
            text += f"{self.worst:.1e}"
        else:
            wrong = [name for name, error in self.errors.items() if not error <= self.tolerance]
            text = (
                f"tensor-parallel proof by operations over {self.size} ranks FAILED: {wrong[0]} is off by "
                f"{self.errors[wrong[0]]:.1e} (tolerance {self.tolerance:.0e}); {len(wrong)} of {count} differ"
            )
        if self.unproved:
            text += f"; not proved: {len(self.unproved)} kinds, first {next(iter(self.unproved.items()))}"
        return text

    def raise_if_wrong(self) -> None:
        """Raises `ParityError` unless everything agrees."""
        if not self.ok:
            raise ParityError(f"{self}. This is a fault of a sharding rule, not of your model. {self.advice}")


def prove_operations(
    module: nn.Module, plan: TensorPlan, step: Step, *, tolerance: float = 1e-6, seed: int = 0
) -> OperationReport:
    """Try every kind of operation of the planned step on simulated ranks, values and gradients.

    No parameter is touched or copied: time and memory depend on the number of kinds, not on the size of the model
    (weights are tried at a smaller size; products do not depend on it).

    Args:
        module: The whole model, on any device (also meta).
        plan: Its plan.
        step: Runs the user's step, on a batch that should be small.
        tolerance: Largest relative error that passes.
        seed: For the values.

    Raises:
        Exception: Whatever the step raises when it is followed.

    Collectives: none (ranks are simulated).
    """
    found = operations_of(module, plan, step)
    report = OperationReport(plan.size, tolerance, gathers=found.gathers)
    with experiment(seed), intercept_functions(function_guard, 1):
        for operation in found.kinds.values():
            try:
                report.errors[str(operation)] = _try(reduced(operation, plan.size), plan)
                report.calls += operation.count
            except _Unproved as reason:
                report.unproved[str(operation)] = str(reason)
    return report


class _Unproved(Exception):
    """The operation cannot be tried alone."""


def _try(operation: Operation, plan: TensorPlan) -> float:
    try:
        return _try_ordered(operation, plan)
    except _Unproved:
        # the order of strides is not known where a shard has a size of one
        plain = tree_map_only(
            Operand, lambda a: replace(a, order=tuple(range(len(a.shape)))), (operation.args, operation.kwargs)
        )
        return _try_ordered(replace(operation, args=plain[0], kwargs=plain[1]), plan)


def _try_ordered(operation: Operation, plan: TensorPlan) -> float:
    operands = {a.number: a for a in tree_leaves((operation.args, operation.kwargs)) if isinstance(a, Operand)}
    largest = max(math.prod(a.shape) for a in operands.values())
    if largest > _LARGEST:
        raise _Unproved(f"an operand has {largest:,} elements")
    reason = "its results are not numbers"
    for draw in _DRAWS:
        values = {number: _values(a, draw, operands) for number, a in operands.items()}
        try:
            want = [_run(operation, values, readers) for readers in (1, 2)]
        except Exception as error:
            reason = f"{type(error).__name__} on random values: {error}"
            continue
        if not any(bool(r.isnan().any()) for r in want[0].results if r.is_floating_point()):
            return max(_compare(operation, operands, values, w, plan) for w in want)
    raise _Unproved(reason)


def _values(operand: Operand, draw: Callable[[Tensor], Tensor], operands: dict[int, Operand]) -> Tensor:
    """Values for a global operand, strides in the order they had."""
    if operand.value is not None:
        return operand.value.cpu().to(widest(operand.dtype))
    shape = [operand.shape[d] for d in operand.order]
    back = sorted(range(len(shape)), key=lambda d: operand.order[d])
    if operand.dtype == torch.bool:
        made = torch.rand(shape) < 0.5
    elif operand.dtype.is_floating_point or operand.dtype.is_complex:
        made = draw(torch.rand(shape, dtype=widest(operand.dtype)))
    else:  # an index, most likely: valid for every dim of the others
        sizes = [n for a in operands.values() if a.dtype.is_floating_point for n in a.shape if n > 1]
        made = torch.randint(0, min(sizes, default=2), shape, dtype=operand.dtype)
    return made.permute(back)


@dataclass
class _Outcome:
    results: list[Tensor]
    gradients: dict[int, Tensor | None]
    weights: list[Tensor]
    readers: int


def _run(
    operation: Operation,
    values: dict[int, Tensor],
    readers: int,
    group: TensorGroup | None = None,
    weights: list[Tensor] | None = None,
) -> _Outcome:
    """The operation and its backward; on a rank of `group` with this rank's shards.

    Args:
        operation: What to do.
        values: Number of the operand -> its global values.
        readers: How often it is done with the same operands.
        group: None for the global operation.
        weights: What to multiply the global results with before they are summed; drawn if None.
    """
    leaves: dict[int, Tensor] = {}
    shown: dict[int, Tensor] = {}
    for operand in tree_leaves((operation.args, operation.kwargs)):
        if isinstance(operand, Operand) and operand.number not in leaves:
            leaf = _leaf(operand, values[operand.number], group)
            leaves[operand.number] = leaf
            # not a leaf itself, so that it may be changed in place
            inner = leaf.clone()
            shown[operand.number] = inner
            if group is not None and operand.cut is not None:
                shown[operand.number] = ShardedTensor(inner, operand.cut, group)
    args, kwargs = tree_map_only(Operand, lambda a: shown[a.number], (operation.args, operation.kwargs))
    function: Any = operation.func
    torch.manual_seed(readers)  # random values are those of one process
    if isinstance(function, type):  # a custom autograd.Function
        function = function.apply  # type: ignore[attr-defined]
    with Exactly():
        out = [function(*args, **kwargs) for _ in range(readers)]
    results = [r for r in tree_leaves((out, args, kwargs)) if isinstance(r, Tensor)]
    if weights is None:
        weights = [torch.rand(r.shape, dtype=r.dtype) for r in results if _differentiable(r)]
    _backward([r for r in results if _differentiable(r)], weights, group)
    return _Outcome([r.detach() for r in results], {n: leaf.grad for n, leaf in leaves.items()}, weights, readers)


def _differentiable(result: Tensor) -> bool:
    return result.is_floating_point() or result.is_complex()


def _backward(results: list[Tensor], weights: list[Tensor], group: TensorGroup | None) -> None:
    roots, gradients = [], []
    for result, weight in zip(results, weights, strict=True):
        here = local(result)
        if here.requires_grad:
            cut = placement(result)
            shard = weight if cut is None or group is None else _gradient_shard(weight, cut, group)
            roots.append(here)
            gradients.append(shard)
    if roots:
        torch.autograd.backward(roots, gradients)


def _gradient_shard(gradient: Tensor, cut: Placement, group: TensorGroup) -> Tensor:
    """This rank's shard; ranks that hold copies have unequal parts of the gradient, whose sum is all of it."""
    shard = cut.to_local(gradient, group.rank, group.size).clone()
    parts = cut.copies * (cut.copies + 1) // 2
    return shard * ((group.rank % cut.copies + 1) / parts) if cut.copies > 1 else shard


def _leaf(operand: Operand, value: Tensor, group: TensorGroup | None) -> Tensor:
    """An independent copy with the operand's order of strides; this rank's shard if the operand is cut."""
    if group is not None and operand.cut is not None:
        value = operand.cut.to_local(value, group.rank, group.size)
    back = sorted(range(value.ndim), key=lambda d: operand.order[d])
    leaf = value.permute(operand.order).contiguous().clone().permute(back)
    return leaf.requires_grad_(operand.requires_grad and _differentiable(leaf))


def _compare(
    operation: Operation, operands: dict[int, Operand], values: dict[int, Tensor], want: _Outcome, plan: TensorPlan
) -> float:
    """The largest error over results and gradients."""

    def body(comm: ThreadCommunicator) -> _Outcome:
        group = TensorGroup(comm, sequence_dim=-2 if plan.sequence else None, exact_dropout=True)
        return _run(operation, values, want.readers, group, want.weights)

    ranks = must_run(f"{operation} runs on whole tensors but not over", plan.size, body)
    if any(len(rank.results) != len(want.results) for rank in ranks):
        return math.inf
    errors = [_error([rank.results[i] for rank in ranks], whole_result) for i, whole_result in enumerate(want.results)]
    for number, operand in operands.items():
        gradient = want.gradients[number]
        parts = [rank.gradients[number] for rank in ranks]
        if operand.requires_grad:
            errors.append(_gradient_error(parts, gradient, operand, plan.size))
    return max(errors, default=0.0)


def _error(parts: list[Tensor], want: Tensor) -> float:
    """Of a result; a cut one is put together."""
    cut = placement(parts[0])
    if cut is not None:
        size = len(parts)
        if any(placement(p) != cut for p in parts):
            return math.inf
        if cut.padding:
            return relative_difference(cut.to_global([local(p) for p in parts], size), want)
        return max(relative_difference(local(p), cut.to_local(want, r, size)) for r, p in enumerate(parts))
    return max(relative_difference(whole(p), want) for p in parts)


def _gradient_error(parts: list[Tensor | None], want: Tensor | None, operand: Operand, size: int) -> float:
    if want is None:
        want = torch.zeros(operand.shape, dtype=widest(operand.dtype))
    cut = operand.cut
    if cut is None:
        return max(relative_difference(torch.zeros_like(want) if p is None else p, want) for p in parts)
    shape = cut.local_shape(operand.shape, size)
    shards = [torch.zeros(shape, dtype=want.dtype) if p is None else p for p in parts]
    if cut.padding and bool(torch.cat(shards, cut.dim).narrow(cut.dim, cut.length, cut.padding).count_nonzero()):
        return math.inf  # padding must get no gradient
    return relative_difference(cut.to_global_gradient(shards, size), want)
