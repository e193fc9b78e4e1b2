"""HOW can a compiler follow a program?  The pairs of collectives once more, of operations `torch.compile` can trace.

A compiler sees nothing of a communicator: collectives become custom operations on (tensor, number of the group), inside
autograd Functions it traces. Nothing else changes: `pairs` is to `collectives` what a translation is to its original.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor import collectives
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.placement import Placement
from lightning_3d.tensor.recorded.observe import rank_stream

_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[int, TensorGroup] = weakref.WeakValueDictionary()


def number_of(group: TensorGroup) -> int:
    """The number by which compiled code names a group."""
    number = group.__dict__.get("number_when_compiled")
    if number is None:
        number = group.__dict__["number_when_compiled"] = next(_numbers)
        _groups[number] = group
    return int(number)


# ---------------------------------------------------------------- operations
_library = torch.library.Library("lightning_3d", "FRAGMENT")
_library.define("all_reduce(Tensor x, int group) -> Tensor")
_library.define("all_gather(Tensor x, int group, int size) -> Tensor")
_library.define("reduce_scatter(Tensor x, int group, int size, int dim) -> Tensor")
_library.define("sum_copies(Tensor x, int copies, int group) -> Tensor")
_library.define("gather_copies(Tensor x, int copies, int group) -> Tensor")
_library.define("dropout_mask(Tensor x, float p, int group) -> Tensor")
_library.impl("all_reduce", lambda x, group: _all_reduce(x, group), "CompositeExplicitAutograd")
_library.impl("all_gather", lambda x, group, size: _all_gather(x, group), "CompositeExplicitAutograd")
_library.impl("reduce_scatter", lambda x, group, size, dim: _reduce_scatter(x, group, dim), "CompositeExplicitAutograd")
_library.impl("sum_copies", lambda x, copies, group: _sum_copies(x, copies, group), "CompositeExplicitAutograd")
_library.impl("gather_copies", lambda x, copies, group: _gather_copies(x, copies, group), "CompositeExplicitAutograd")
_library.impl("dropout_mask", lambda x, p, group: _dropout_mask(x, p, group), "CompositeExplicitAutograd")
torch.library.register_fake("lightning_3d::all_reduce", lambda x, group: _contiguous_like(x), lib=_library)
torch.library.register_fake(
    "lightning_3d::all_gather", lambda x, group, size: x.new_empty((size, *x.shape)), lib=_library
)
torch.library.register_fake(
    "lightning_3d::reduce_scatter", lambda x, group, size, dim: _chunk_like(x, size, dim), lib=_library
)
torch.library.register_fake("lightning_3d::sum_copies", lambda x, copies, group: _contiguous_like(x), lib=_library)
torch.library.register_fake(
    "lightning_3d::gather_copies", lambda x, copies, group: x.new_empty((copies, *x.shape)), lib=_library
)
torch.library.register_fake("lightning_3d::dropout_mask", lambda x, p, group: _contiguous_like(x), lib=_library)
_ops = torch.ops.lightning_3d


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _chunk_like(x: Tensor, size: int, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= size
    return x.new_empty(shape)


def _all_reduce(x: Tensor, group: int) -> Tensor:
    return _groups[group].all_reduce(x.clone(memory_format=torch.contiguous_format))


def _all_gather(x: Tensor, group: int) -> Tensor:
    return torch.stack(_groups[group].all_gather(x.contiguous()))


def _reduce_scatter(x: Tensor, group: int, dim: int) -> Tensor:
    return _groups[group].reduce_scatter(x, dim).clone(memory_format=torch.contiguous_format)


def _sum_copies(x: Tensor, copies: int, group: int) -> Tensor:
    return _groups[group].sum_copies(x.contiguous(), copies)


def _gather_copies(x: Tensor, copies: int, group: int) -> Tensor:
    return torch.stack(_groups[group].gather_copies(x.contiguous(), copies))


def _dropout_mask(x: Tensor, p: float, group: int) -> Tensor:
    with rank_stream(_groups[group], x):
        return F.dropout(torch.ones_like(x, memory_format=torch.contiguous_format), p)


# ---------------------------------------------------------------- pairs
class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        ctx.group = group
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _ops.all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        return _ops.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, group: int, rank: int, size: int) -> Tensor:
        ctx.settings = (placement, rank, size)
        return placement.to_global_gradient(list(_ops.all_gather(x, group, size).unbind(0)), size).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        placement, rank, size = ctx.settings
        return placement.to_local(grad, rank, size), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, group: int, rank: int, size: int) -> Tensor:
        ctx.settings = (placement, group, size)
        return placement.to_local(x, rank, size).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        placement, group, size = ctx.settings
        parts = list(_ops.all_gather(grad, group, size).unbind(0))
        return placement.to_global_gradient(parts, size), None, None, None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int, group: int) -> Tensor:
        ctx.settings = (copies, group)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _ops.sum_copies(grad, *ctx.settings), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, group: int, rank: int, size: int) -> Tensor:
        ctx.settings = (placement, group, rank, size)
        copies = placement.shared_by
        parts = list(_ops.gather_copies(x, copies, group).unbind(0))
        return placement.of_neighbours(size).to_global(parts, copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        placement, group, rank, size = ctx.settings
        copies = placement.shared_by
        total = _ops.sum_copies(grad, copies, group)
        part = placement.of_neighbours(size).to_local(total, rank % copies, copies)
        return part, None, None, None, None


class _SequenceGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: int, size: int) -> Tensor:
        ctx.settings = (dim, group, size)
        return torch.cat(list(_ops.all_gather(x, group, size).unbind(0)), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        dim, group, size = ctx.settings
        return _ops.reduce_scatter(grad, group, size, dim), None, None, None


class _SequenceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: int, size: int) -> Tensor:
        ctx.settings = (dim, group, size)
        return _ops.reduce_scatter(x, group, size, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        dim, group, size = ctx.settings
        return torch.cat(list(_ops.all_gather(grad, group, size).unbind(0)), dim), None, None, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, group: int) -> Tensor:
        mask = _ops.dropout_mask(x, p, group)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.saved_tensors[0], None, None


def enter(x: Tensor, group: int) -> Tensor:
    """`collectives.copy_in`."""
    return _Enter.apply(x, group)


def reduce_out(x: Tensor, group: int) -> Tensor:
    """`collectives.reduce_out`."""
    return _Sum.apply(x, group)


def gather(x: Tensor, placement: Placement, group: int, rank: int, size: int) -> Tensor:
    """`collectives.gather`."""
    if rank % placement.copies:
        x = x * 0
    return _Gather.apply(x, placement, group, rank, size)


def scatter(x: Tensor, placement: Placement, group: int, rank: int, size: int) -> Tensor:
    """`collectives.scatter`."""
    return _Scatter.apply(x, placement, group, rank, size)


def sum_copies(x: Tensor, copies: int, group: int, size: int) -> Tensor:
    """`collectives.sum_copies`."""
    return _SumCopies.apply(x, copies, group)


def share(x: Tensor, placement: Placement, group: int, rank: int, size: int) -> Tensor:
    """`collectives.share`."""
    return _Share.apply(x, placement, group, rank, size)


def sequence_gather(x: Tensor, dim: int, group: int, size: int) -> Tensor:
    """`collectives.sequence_gather`."""
    return _SequenceGather.apply(x, dim, group, size)


def sequence_scatter(x: Tensor, dim: int, group: int, size: int) -> Tensor:
    """`collectives.sequence_scatter`."""
    return _SequenceScatter.apply(x, dim, group, size)


def dropout(x: Tensor, p: float, group: int) -> Tensor:
    """Dropout with this rank's own mask (`rules_random.dropout`)."""
    return _Dropout.apply(x, p, group)


PAIRS: dict[Any, Any] = {
    collectives.gather.__wrapped__: gather,  # type: ignore[attr-defined]
    collectives.scatter.__wrapped__: scatter,  # type: ignore[attr-defined]
    collectives.share.__wrapped__: share,  # type: ignore[attr-defined]
    collectives.sum_copies.__wrapped__: sum_copies,  # type: ignore[attr-defined]
    collectives.sequence_gather.__wrapped__: sequence_gather,  # type: ignore[attr-defined]
    collectives.sequence_scatter.__wrapped__: sequence_scatter,  # type: ignore[attr-defined]
}
"""Pairs that become another function of the same arguments; entries and sums are handled by `compiled`."""
