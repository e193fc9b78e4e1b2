"""WHAT does a rule do with its operands?  Shards, parts of whole tensors, partial sums: the vocabulary of the rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor import collectives
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.placement import NoRule, Placement, valid_rows
from lightning_3d.tensor.registry import Args, Kwargs
from lightning_3d.tensor.sharded import ShardedTensor, merged_sources, storage_of, whole


def derive(local: Tensor, placement: Placement, *origins: ShardedTensor) -> ShardedTensor:
    """A result cut as given, in the group of its first origin."""
    return ShardedTensor(local, placement, origins[0].group, merged_sources(origins))


def tensors_in(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """All tensors among the arguments, one level of lists deep."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [v for v in value if isinstance(v, Tensor)]
    return found


def take(x: Tensor, cut: Placement, group: TensorGroup) -> Tensor:
    """This rank's part of a whole tensor (backward: all-gather)."""
    if x.requires_grad and torch.is_grad_enabled():
        group.conversions += 1
    return collectives.scatter(x, cut, group)


def align(operands: list[ShardedTensor]) -> tuple[int, Placement]:
    """The common cut of operands that broadcast together: its dim counted from the right, and its placement.

    Where only some hold copies, all are cut finer (`localize` does it): one rank's part of each.
    """
    head = operands[0]
    from_right, cut = head.placement.dim - head.ndim, head.placement
    for other in operands[1:]:
        if other.placement.copies != cut.copies:
            cut = replace(cut, copies=1)
        if other.placement.dim - other.ndim != from_right or not replace(other.placement, copies=cut.copies).like(cut):
            hints = [cut.segments, other.placement.segments]
            raise NoRule(f"operands are cut differently: {head!r} and {other!r}", hints, kind="layout")
        if other.placement.axis == "sequence":
            cut = Placement(cut.dim, cut.segments, cut.padding, "sequence")
        if other.placement.shares and not cut.shares and cut.copies == 1:
            cut = replace(cut, shares=other.placement.shares)
    return from_right, cut


def localize(x: Tensor, from_right: int, cut: Placement, group: TensorGroup) -> Tensor:
    """The part of an operand that meets the shards of a broadcasting operation."""
    if type(x) is ShardedTensor:
        return x.local if x.placement.copies == cut.copies else finer(x).local
    length = x.shape[from_right] if x.ndim >= -from_right else 1
    if length == 1:
        return collectives.copy_in(x, group)
    if length != cut.length:  # the cut dim has size 1 (and padding)
        raise NoRule("the cut dim of size 1 would be broadcast", kind="layout")
    stream = from_right == -1 and x.requires_grad and x.ndim > 1 and not _from_parameter(x)
    if group.on_gather is not None and stream:
        # legal, but a bad plan: the residual stream would become cut along the features
        raise NoRule("it is combined with a whole activation along the features (a residual stream)", partner=x)
    return take(x, cut.at(x.ndim + from_right), group)


def finer(x: ShardedTensor) -> ShardedTensor:
    """Of a chunk that several ranks hold copies of, each rank's own part; no communication, also not backward.

    Raises:
        NoRule: The parts would be unequal.
    """
    cut, size = x.placement, x.group.size
    if cut.copies == 1:
        return x
    if any(n % size for n in cut.segments):
        raise NoRule(f"{cut.segments} cannot be cut over {size} ranks: some of them hold copies", kind="layout")
    mine, dim = x.group.rank % cut.copies, cut.dim
    pieces = x.local.split([n // cut.chunks(size) for n in cut.segments], dim)
    parts = [piece.chunk(cut.copies, dim)[mine] for piece in pieces]
    local = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return derive(local, replace(cut, copies=1), x)


def held_together(x: ShardedTensor) -> Tensor:
    """A piece of a fused projection whose heads are fewer than the ranks: gathered by the ranks that share each head.

    If all ranks share it, it becomes whole. User code has a view of the projection here, and a write into it would be
    lost for the shards: while planning that is refuted, later autograd refuses it.

    Collectives: one all-gather of x over the ranks that share it (backward: one sum of as many elements over them).
    """
    cut, group = x.placement, x.group
    copies = cut.shared_by
    if copies == 1:
        return x
    if copies == group.size:
        out = held = collectives.lend(whole(x))
    else:
        group.conversions += 1
        held = collectives.lend(collectives.share(x.local, cut, group))
        out = derive(held, replace(cut, copies=copies, shares=()), x)
    if group.on_gather is not None:
        group.lent[storage_of(held)] = held, x.sources
        group.lent[storage_of(x.local)] = x.local, x.sources
    return out


def no_copies(cut: Placement, what: str) -> None:
    """Refuse what would count (or draw) a chunk once for every rank that holds it."""
    if cut.copies > 1:
        raise NoRule(f"{what} dim {cut.dim}, of which {cut.copies} ranks each hold a copy", kind="layout")


def _from_parameter(x: Tensor) -> bool:
    return isinstance(x, torch.nn.Parameter) or isinstance(x._base, torch.nn.Parameter)


def partial_to_whole(x: Tensor, group: TensorGroup) -> Tensor:
    """The sum of all ranks' partial results `x` (fresh, held by nobody else).

    Collectives: one all-reduce of x (backward: none); with sequence parallelism a reduce-scatter (backward: all-gather)
    that leaves the sum cut along the sequence.
    """
    dim = group.sequence_dim
    if dim is not None and x.ndim >= 3 and x.shape[dim] % group.size == 0:
        dim %= x.ndim
        cut = Placement(dim, (x.shape[dim],), 0, "sequence")
        return ShardedTensor(collectives.sequence_scatter(x, dim, group), cut, group)
    return collectives.reduce_out(x, group, fresh=True)


def along_sequence(x: Any) -> bool:
    """Cut along the sequence by sequence parallelism."""
    return type(x) is ShardedTensor and x.placement.axis == "sequence"


def sequence_to_whole(x: ShardedTensor) -> Tensor:
    """The whole input of a column layer from its sequence shards, shared by all layers that read it.

    Collectives: one all-gather of x (backward: reduce-scatter).
    """
    memo: Tensor | None = getattr(x, "_gathered", None)
    tracked = x.local.requires_grad and torch.is_grad_enabled()
    if memo is None or memo.requires_grad != tracked:
        dim, count = x.placement.dim, len(x.placement.segments)
        if count == 1:
            memo = collectives.sequence_gather(x.local, dim, x.group)
        else:  # flattened with an outer dim, (batch * sequence)
            memo = collectives.sequence_gather(x.local.unflatten(dim, (count, -1)), dim + 1, x.group)
            memo = memo.flatten(dim, dim + 1)
        x._gathered = memo  # type: ignore[attr-defined]
    return memo


def unpadded_rows(x: ShardedTensor) -> int:
    """How many of this rank's rows along the cut dim are not padding."""
    return valid_rows(x.placement, x.group.rank, x.group.size)
