"""WHICH collective belongs to which, forward and backward?  The conjugate pairs of tensor parallelism.

| pair                  | forward            | backward           | used for |
|-----------------------|--------------------|--------------------|----------|
| `copy_in`             | identity           | all-reduce         | a whole tensor enters a sharded region |
| `reduce_out`          | all-reduce         | identity           | partial sums become a whole tensor |
| `gather`              | all-gather         | slice              | a shard becomes the whole tensor |
| `scatter`             | slice              | all-gather         | a whole tensor becomes a shard |
| `sum_copies`          | identity           | sum over copies    | a parameter whose chunks several ranks hold |
| `share`               | copies gather      | sum over copies, slice | a piece of fewer heads than ranks (fused qkv) |
| `slice_overlapping`   | slice              | pad + all-reduce   | ranks take parts that may overlap (few kv heads) |
| `sequence_gather`     | all-gather         | reduce-scatter     | column layer under sequence parallelism |
| `sequence_scatter`    | reduce-scatter     | all-gather         | row layer under sequence parallelism |
| `column_linear`       | matmul             | all-reduce (*)     | column layer |

(*) of dX, shared with the other readers of X; started before dW is computed if there are none.

The first two are f and g of Megatron-LM (Shoeybi et al., 2019, section 3), the sequence pair is from Korthikanti et al.
(2022, section 4.2.2). The backward of each pair is the forward of its conjugate, so second derivatives are right too.
Outputs that share storage with an input are detached aliases, not views: they share its version counter (in-place
changes are noticed), form no reference cycle with it, and allow in-place operations of user code on them. What a
forward computes may be a view, too (`F.linear` of three dims with a bias): it is detached for the same reason.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.probe.intercept import original_apply
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.placement import Placement

C = TypeVar("C", bound=Callable[..., Any])

recording = threading.local()
"""`recording.observe(function, args, kwargs)` runs and notes a pair in a thread that records a block (`recorded/`)."""


def _pair(function: C) -> C:
    """A pair that a recording sees as one operation."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        observe = getattr(recording, "observe", None)
        return function(*args, **kwargs) if observe is None else observe(function, args, kwargs)

    return call  # type: ignore[return-value]


class _FanOut:
    """The consumers of one tensor that enters a sharded region; they share one all-reduce of its gradient."""

    __slots__ = ("consumers", "reduced_in")

    def __init__(self) -> None:
        self.consumers = 0
        self.reduced_in = -1  # id of the backward pass in which a sole column linear has done the all-reduce


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, fan: _FanOut) -> Tensor:
        ctx.group, ctx.fan = group, fan
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.fan.reduced_in == torch._C._current_graph_task_id():
            return grad, None, None
        return reduce_out(grad, ctx.group), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, fresh: bool) -> Tensor:
        ctx.group = group
        mine = x.detach() if fresh and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return group.all_reduce(mine).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return copy_in(grad, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, group: TensorGroup) -> Tensor:
        ctx.placement, ctx.group = placement, group
        return placement.to_global_gradient(group.all_gather(x), group.size).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return scatter(grad, ctx.placement, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, group: TensorGroup) -> Tensor:
        ctx.placement, ctx.group = placement, group
        return placement.to_local(x, group.rank, group.size).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return original_apply(_Gather, grad, ctx.placement, ctx.group), None, None


class _SliceOverlapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, start: int, length: int, group: TensorGroup) -> Tensor:
        ctx.arguments = (x.shape, dim, start, length, group)
        return x.narrow(dim, start, length).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        shape, dim, start, length, group = ctx.arguments
        before, after = list(shape), list(shape)
        before[dim], after[dim] = start, shape[dim] - start - length
        padded = torch.cat([grad.new_zeros(before), grad, grad.new_zeros(after)], dim)
        return reduce_out(padded, group, fresh=True), None, None, None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int, group: TensorGroup) -> Tensor:
        ctx.copies, ctx.group = copies, group
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.group.sum_copies(grad, ctx.copies), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, group: TensorGroup) -> Tensor:
        ctx.placement, ctx.group = placement, group
        copies = placement.shared_by
        return placement.of_neighbours(group.size).to_global(group.gather_copies(x, copies), copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return original_apply(_SumOfShares, grad, ctx.placement, ctx.group), None, None


class _SumOfShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, group: TensorGroup) -> Tensor:
        ctx.placement, ctx.group = placement, group
        copies = placement.shared_by
        total = group.sum_copies(x, copies)
        return placement.of_neighbours(group.size).to_local(total, group.rank % copies, copies).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return share(grad, ctx.placement, ctx.group), None, None


class WholeCopyOfACutTensor(torch.autograd.Function):
    """Its output is (a part of) a gathered copy. Autograd refuses to write into it: the shards would not see that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _SequenceGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(group.all_gather(x), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return sequence_scatter(grad, ctx.dim, ctx.group), None, None


class _SequenceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return group.reduce_scatter(x, dim).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return sequence_gather(grad, ctx.dim, ctx.group), None, None


class _ColumnLinear(torch.autograd.Function):
    """Y = X W^T + b with W cut over its rows; the all-reduce of dX runs while dW is computed.

    A zero-bubble pipeline puts a list into `weights_later` of the node: dW and db are then left to what is appended.
    """

    weights_can_wait = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup, fan: _FanOut) -> Tensor:
        # a frozen weight needs no input for its gradient
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group, ctx.fan = group, fan
        return F.linear(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # decided before the saved tensors are touched: a recomputation there makes new consumers
        again = torch.is_grad_enabled()  # create_graph: the graph of dW reads X, too, so it has one more consumer
        alone = ctx.fan.consumers == 1 and not again
        ctx.fan.consumers += again
        ctx.fan.reduced_in = torch._C._current_graph_task_id() if alone else -1
        x, weight = ctx.saved_tensors
        dx = torch.matmul(grad, weight)
        pending = None
        if alone:
            dx = dx.contiguous()
            pending = ctx.group.all_reduce_start(dx)

        def of_weights() -> tuple[Tensor | None, Tensor | None]:
            rows = grad.reshape(-1, grad.shape[-1])
            dw = torch.matmul(rows.t(), x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
            return dw, rows.sum(0) if ctx.needs_input_grad[2] else None

        later: list[Any] | None = getattr(ctx, "weights_later", None)
        if later is None:
            dw, db = of_weights()
        else:
            later.append((ctx, 1, of_weights))
            dw = db = None
        if pending is not None:
            pending.wait()
        return dx, dw, db, None, None


def _tracked(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _enter(x: Tensor, group: TensorGroup) -> tuple[Tensor, _FanOut]:
    """The alias of `x` inside the sharded region; one more consumer of it. Shared through a memo on `x`.

    Never on a leaf: a Parameter would keep the memo beyond the step.
    """
    assert not getattr(type(x), "shows_global_shape", False), "a cut tensor where a whole one is expected"
    if x.is_leaf and (together := group.shared_entries.enter(x, group)) is not None:
        return together, _FanOut()
    memo = None if x.is_leaf else x.__dict__.get("_tp_entry")
    if memo is not None and memo[1] == x._version and memo[2] is group:
        inside, fan = memo[0], memo[3]
    else:
        fan = _FanOut()
        group.entries += 1
        inside = original_apply(_Copy, x, group, fan)
        if not x.is_leaf:
            x.__dict__["_tp_entry"] = (inside, x._version, group, fan)
    fan.consumers += 1
    return inside, fan


@_pair
def copy_in(x: Tensor, group: TensorGroup) -> Tensor:
    """Identity forward, all-reduce backward; all consumers of one tensor (q, k, v) share the all-reduce."""
    return _enter(x, group)[0] if _tracked(x) else x


@_pair
def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup) -> Tensor:
    """Local part of a column-parallel linear layer on a whole input.

    Backward: one all-reduce of dX, shared with the other consumers of `x`; if there are none it overlaps dW.
    """
    if not _tracked(x):
        return F.linear(x, weight, bias)
    inside, fan = _enter(x, group)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        inside, weight = _autocast(inside, dtype), _autocast(weight, dtype)
        bias = None if bias is None else _autocast(bias, dtype)
    return original_apply(_ColumnLinear, inside, weight, bias, group, fan)


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast does to an operand of a matmul."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


@_pair
def reduce_out(x: Tensor, group: TensorGroup, fresh: bool = False) -> Tensor:
    """All-reduce forward, identity backward. `fresh`: nobody else holds `x`, so it is reduced in place."""
    if _tracked(x):
        return original_apply(_Reduce, x, group, fresh)
    return group.all_reduce(x if fresh and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format))


@_pair
def gather(x: Tensor, placement: Placement, group: TensorGroup) -> Tensor:
    """All-gather forward, slice backward (of copies the first one's value, and all of the gradient to it)."""
    if group.rank % placement.copies:
        x = x * 0
    return original_apply(_Gather, x, placement, group)


@_pair
def sum_copies(x: Tensor, copies: int, group: TensorGroup) -> Tensor:
    """A parameter that `copies` neighbouring ranks hold: identity forward, backward the sum over them."""
    return original_apply(_SumCopies, x, copies, group) if _tracked(x) else x


@_pair
def share(x: Tensor, placement: Placement, group: TensorGroup) -> Tensor:
    """A piece that neighbouring ranks have to hold together (`placement.shares`), gathered by them."""
    return original_apply(_Share, x, placement, group)


@_pair
def lend(x: Tensor) -> Tensor:
    """A copy of a part of a cut tensor, where user code has a view of it: read-only while gradients are followed."""
    return original_apply(WholeCopyOfACutTensor, x) if _tracked(x) else x


@_pair
def scatter(x: Tensor, placement: Placement, group: TensorGroup) -> Tensor:
    """Slice forward; backward an all-gather, if `x` needs a gradient."""
    if _tracked(x):
        return original_apply(_Scatter, x, placement, group)
    return placement.to_local(x, group.rank, group.size)


@_pair
def slice_overlapping(x: Tensor, dim: int, start: int, length: int, group: TensorGroup) -> Tensor:
    """Slice forward (ranks may take the same rows), all-reduce of the padded gradient backward."""
    return original_apply(_SliceOverlapping, x, dim, start, length, group)


@_pair
def sequence_gather(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """All-gather along `dim` forward, reduce-scatter backward."""
    return original_apply(_SequenceGather, x, dim, group)


@_pair
def sequence_scatter(x: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """Reduce-scatter along `dim` forward, all-gather backward."""
    return original_apply(_SequenceScatter, x, dim, group)
