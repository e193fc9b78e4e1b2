"""WHICH operations can be left out, or done cheaper?  The same numbers and gradients with fewer autograd nodes.

| recorded | becomes | if |
|---|---|---|
| an operation that returned its argument | nothing | it is known to be pure |
| `reduce_out` of a matmul | the all-reduce in place, on the matmul's result | nobody else uses that result |
| `copy_in`, `column_linear` of x | x with one gradient hook, and an ordinary linear | x enters sharded regions only |

A node of a custom `autograd.Function` costs several times what a hook does. On a GPU, a column layer on a large tensor
keeps its own backward all the same: it computes the weight's gradient while the all-reduce runs. In a backward that
builds a graph (`create_graph`) the hooks use the differentiable pairs, so second derivatives stay right.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor import collectives
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.recorded.operations import is_in_place
from lightning_3d.tensor.recorded.tape import Constant, Operation, Ref, Tape, Text, names, renamed, with_names
from lightning_3d.tensor.registry import words

_copy_in: Any = collectives.copy_in.__wrapped__  # type: ignore[attr-defined]
_column_linear: Any = collectives.column_linear.__wrapped__  # type: ignore[attr-defined]
_reduce_out: Any = collectives.reduce_out.__wrapped__  # type: ignore[attr-defined]

_PURE = frozenset(
    words("dropout contiguous to float double half bfloat16 type_as reshape view view_as expand flatten copy_in")
)
_MATMULS = frozenset(words("linear matmul mm bmm __matmul__ __rmatmul__ addmm baddbmm grouped_mm _grouped_mm"))


def simplified(tape: Tape) -> Tape:
    """The tape with cheaper operations."""
    operations = [o for o in tape.operations if not _is_idle(o)]
    operations = _reduced_in_place(operations, tape)
    return _entered_by_hook(tape.with_operations(operations))


Hooks = OrderedDict[int, Callable[[Tensor], "Tensor | None"]]


class _GradientHooks(NamedTuple):
    """What `copy_in` (of any gradient, and of one that matmuls made and nobody else has) and `reduce_out` become."""

    entered: Hooks
    entered_fresh: Hooks
    reduced: Hooks


def _hooks(group: TensorGroup) -> _GradientHooks:
    """The gradient hooks, made once."""
    hooks: _GradientHooks | None = group.__dict__.get("gradient_hooks")
    if hooks is None:
        hooks = group.__dict__["gradient_hooks"] = _make_hooks(group)
    return hooks


def _make_hooks(group: TensorGroup) -> _GradientHooks:
    reduce: Any = group.comm.all_reduce

    def entered(fresh: bool) -> Hooks:
        def enter(grad: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                return collectives.reduce_out(grad, group)
            mine = grad.contiguous() if fresh else grad.clone(memory_format=torch.contiguous_format)
            total: Tensor = reduce(mine)
            return total

        return OrderedDict({0: enter})

    def reduced(grad: Tensor) -> Tensor | None:
        return collectives.copy_in(grad, group) if torch.is_grad_enabled() else None

    return _GradientHooks(entered(False), entered(True), OrderedDict({0: reduced}))


def _attach(x: Tensor, hooks: Hooks) -> None:
    """`x.register_hook` of hooks that are never removed: all tensors share the dictionary."""
    x._backward_hooks = hooks
    x.grad_fn._register_hook_dict(x)  # type: ignore[union-attr]


def _is_idle(operation: Operation) -> bool:
    """It returned its argument, and always will for this signature."""
    if operation.result is not None or operation.name not in _PURE:
        return False
    inplace = operation.kwargs.get("inplace", Text("False"))
    return bool(inplace == Text("False")) and not (operation.name == "dropout" and len(operation.args) > 3)


def _uses(operations: list[Operation], tape: Tape) -> Counter[str]:
    uses = Counter(names(tape.output))
    for operation in operations:
        uses.update(operation.reads())
    return uses


def _producers(operations: list[Operation]) -> dict[str, Operation]:
    """Tensor -> the operation that makes it, where it makes just this one."""
    return {o.result.name: o for o in operations if isinstance(o.result, Ref)}


# ---------------------------------------------------------------- partial sums
def reduce_in_place(y: Tensor, group: TensorGroup, hooks: Hooks) -> Tensor:
    """`reduce_out` of a fresh `y` that autograd has not saved: no copy, no node."""
    detached = y.detach()
    if detached.is_contiguous():
        group.comm.all_reduce(detached)
    else:
        detached.copy_(group.comm.all_reduce(detached.contiguous()))
    if y.requires_grad:
        _attach(y, hooks)
    return y


def _reduced_in_place(operations: list[Operation], tape: Tape) -> list[Operation]:
    uses, makers = _uses(operations, tape), _producers(operations)
    out = []
    for operation in operations:
        partial = operation.args[0] if operation.args else None
        if operation.function is _reduce_out and isinstance(partial, Ref) and uses[partial.name] == 1:
            maker = makers.get(partial.name)
            if maker is not None and maker.name in _MATMULS and maker.ambient == operation.ambient:
                hooks = Constant(_hooks(operation.args[1].value).reduced)
                operation = operation.replaced(reduce_in_place, partial, operation.args[1], hooks)
        out.append(operation)
    return out


# ---------------------------------------------------------------- whole tensors that enter
def enter_by_hook(x: Tensor, hooks: Hooks) -> None:
    """`copy_in` for all consumers of `x` at once: the all-reduce of its gradient, without a node."""
    _attach(x, hooks)


def _entered_by_hook(tape: Tape) -> Tape:
    """Replace entries of tensors that are used by entries only."""
    operations = tape.operations
    if any(is_in_place(o.name) and tape.tracked & set(o.reads()) for o in operations):
        return tape  # a view might get another history, without the hook
    uses, makers = _uses(operations, tape), _producers(operations)
    entries = Counter(o.args[0].name for o in operations if _is_entry(o, tape))
    hooked = {n for n, count in entries.items() if count == uses[n] and n in makers and n not in tape.large}
    # matmuls give their input a gradient nobody else has; anything else may pass on one that another tensor gets, too
    products = Counter(o.args[0].name for o in operations if _is_entry(o, tape) and o.function is _column_linear)
    multiplied = {n for n in hooked if products[n] == uses[n]}
    out: list[Operation] = []
    aliases: dict[str, Ref] = {}
    entered: set[str] = set()
    for operation in operations:
        operation = renamed(operation, aliases)
        x = operation.args[0] if _is_entry(operation, tape) else None
        if x is None or x.name not in hooked:
            untracked = operation.function is _column_linear and operation.args[0].name not in tape.tracked
            out.append(operation.replaced(F.linear, *operation.args[:3]) if untracked else operation)
            continue
        if x.name not in entered:
            entered.add(x.name)
            found = _hooks(operation.args[-1].value)
            hooks = Constant(found.entered_fresh if x.name in multiplied else found.entered)
            out.append(Operation(enter_by_hook, (x, hooks), {}, None, None, operation.ambient))
        if operation.function is _copy_in:
            aliases[operation.result.name] = x
        else:
            out.append(operation.replaced(F.linear, *operation.args[:3]))
    return tape.with_operations(out, with_names(tape.output, aliases))


def _is_entry(operation: Operation, tape: Tape) -> bool:
    """A tracked whole tensor enters a sharded region, and nothing but the group follows from it."""
    entry = operation.function is _copy_in or operation.function is _column_linear
    return (
        entry
        and isinstance(operation.result, Ref)
        and not operation.kwargs
        and isinstance(operation.args[0], Ref)
        and operation.args[0].name in tape.tracked
        and isinstance(operation.args[-1], Constant)
        and operation.stream is None
        and (operation.ambient is None or operation.ambient.grad)
    )
