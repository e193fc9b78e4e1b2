"""WHICH operations does a planned step do on cut tensors?  A list of kinds, each with what is needed to repeat it.

Two calls are of one kind if the same function gets tensors of the same shapes, cut alike, and the same other arguments.
A model of 80 equal blocks has a few dozen kinds.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_3d.probe import FakeParameters, PythonState, intercept_functions, own_parameters, retry
from lightning_3d.tensor.decisions import TensorPlan
from lightning_3d.tensor.facts import Facts
from lightning_3d.tensor.follow import Beliefs, Follow
from lightning_3d.tensor.functions import function_guard
from lightning_3d.tensor.group import dry_group, is_shape_only
from lightning_3d.tensor.placement import Placement
from lightning_3d.tensor.registry import Args, Kwargs
from lightning_3d.tensor.search import FATAL, Step
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded, local, operation_name
from lightning_3d.tensor.untouched import quiet_failures, untouched

_LARGEST_VALUE = 1 << 22  # elements of a mask or an index that is kept


@dataclass(frozen=True)
class Operand:
    """A tensor argument.

    Args:
        number: The same for two arguments that are one tensor.
        shape: Global shape.
        dtype: Its type.
        order: Its dims from the largest stride to the smallest.
        cut: How it is cut, or None.
        requires_grad: A gradient flows into it.
        value: Its values, if they do not depend on parameters (a mask, an index).
        digest: Stands for the values in comparisons.
    """

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    cut: Placement | None
    requires_grad: bool
    value: Tensor | None = field(compare=False, hash=False, repr=False)
    digest: str = ""


@dataclass
class Operation:
    """A kind of call.

    Args:
        func: The torch function, or the class of a custom `autograd.Function`.
        args: Positional arguments, tensors as `Operand`.
        kwargs: Keyword arguments, likewise.
        sources: Parameters whose cut reaches its first call.
        count: Number of calls in one step.
    """

    func: Any
    args: Args
    kwargs: Kwargs
    sources: tuple[str, ...]
    count: int = 1

    @property
    def name(self) -> str:
        return operation_name(self.func)

    def __str__(self) -> str:
        found = [a for a in _leaves((self.args, self.kwargs)) if isinstance(a, Operand)]
        shapes = ", ".join(_describe(a) for a in found)
        return f"{self.name}({shapes}) near {', '.join(self.sources[:2]) or 'the sequence cut'}"


def _describe(operand: Operand) -> str:
    shape = "x".join(map(str, operand.shape)) or "scalar"
    return shape if operand.cut is None else f"{shape} cut along dim {operand.cut.dim}"


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


class Operations:
    """Collects the kinds of operations that a followed step does on cut tensors.

    Attributes:
        kinds: All that were seen, in the order of their first call.
        gathers: How often an operation without a rule gathered its operands.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, Operation] = {}
        self.gathers = 0

    def __call__(self, func: Any, args: Args, kwargs: Kwargs) -> None:
        """Note a call, before it happens (it may change its arguments)."""
        numbers: dict[int, int] = {}
        sources: set[str] = set()

        def operand(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if is_sharded(value):
                sources.update(value.sources)  # type: ignore[attr-defined]
            return _operand(value, numbers.setdefault(id(value), len(numbers)))

        held = tree_map(operand, (tuple(args), kwargs))
        name = operation_name(func)
        key = f"{name} {getattr(func, '__qualname__', '')} {id(func) if isinstance(func, type) else ''} {held!r}"
        if key in self.kinds:
            self.kinds[key].count += 1
        else:
            self.kinds[key] = Operation(func, held[0], held[1], tuple(sorted(sources)))


def _operand(tensor: Tensor, number: int) -> Operand:
    here = local(tensor)
    strides: tuple[int, ...] = here.stride()
    order = tuple(sorted(range(here.ndim), key=lambda d: (-strides[d], d)))
    cut = tensor.placement if isinstance(tensor, ShardedTensor) else None
    value = None
    if cut is None and not is_shape_only(tensor) and not tensor.requires_grad and not isinstance(tensor, nn.Parameter):
        value = tensor.detach()
    digest = ""
    if value is not None and value.numel() <= _LARGEST_VALUE:
        value = value.cpu().clone()
        digest = hashlib.sha256(value.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return Operand(number, tuple(tensor.shape), tensor.dtype, order, cut, bool(here.requires_grad), value, digest)


def operations_of(module: nn.Module, plan: TensorPlan, step: Step) -> Operations:
    """Follow the step once under the plan, without values, and list what it does on cut tensors.

    Args:
        module: The model the plan was made for, whole, on any device.
        plan: Its plan.
        step: Runs the user's step.

    Raises:
        Exception: Whatever the step raises; torch's own error if its shapes depend on values that are not there.
    """
    device = next((p.device for p in own_parameters(module) if not p.is_meta), torch.device("cpu"))
    on_meta = any(p.is_meta for p in own_parameters(module))
    try:
        with untouched(module) as start, quiet_failures(), FakeParameters(module, device) as fakes:
            return _follow(module, plan, step, fakes.names, start)
    except Exception:
        if on_meta or not plan.used_values:
            raise
    with untouched(module) as start:
        return _follow(module, plan, step, {id(p): n for n, p in module.named_parameters()}, start)


def _follow(module: nn.Module, plan: TensorPlan, step: Step, names: dict[int, str], start: PythonState) -> Operations:
    facts = Facts(dict(module.named_parameters(remove_duplicate=False)), dict(plan.patterns))
    facts.shapes = dict(plan.shapes)
    beliefs = Beliefs()
    beliefs.pinned = dict(plan.decisions)
    found = Operations()

    def once(answers: Any) -> None:
        found.kinds.clear()
        start.restore()
        group = dry_group(plan.size, sequence_dim=-2 if plan.sequence else None)
        follow = Follow(facts, beliefs, names, group, 0, answers)
        follow.observe = found
        with warnings.catch_warnings(), intercept_functions(_observed(found), 1), follow:
            warnings.simplefilter("ignore")
            step(module)
        found.gathers = group.gathers

    retry(once, FATAL)
    return found


def _observed(found: Operations) -> Callable[..., Any]:
    """`function_guard`, which also notes what it sees."""

    def guard(proceed: Callable[..., Any], function: type, args: Args, kwargs: Kwargs) -> Any:
        if any(is_sharded(a) for a in (*args, *kwargs.values())):
            found(function, args, kwargs)
        return function_guard(proceed, function, args, kwargs)

    return guard
