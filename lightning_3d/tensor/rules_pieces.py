"""Pieces: split, chunk, slice, index, assign, cat, stack. Along the cut dim only on the borders of its segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.collectives import reduce_out
from lightning_3d.tensor.operands import align, derive, held_together, localize
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, argument, first, register_rule
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded, merged_sources


def _cuts_of(cut: Placement, sizes: Sequence[int], ranks: int) -> list[Placement]:
    """How each of the consecutive `sizes` of the cut dim is cut: the segments that make it up."""
    if cut.padding:
        raise NoRule("slicing a padded dim", kind="layout")
    pieces: list[Placement] = []
    position = 0
    for n in sizes:
        first = position
        taken: list[int] = []
        while sum(taken) < n and position < len(cut.segments):
            taken.append(cut.segments[position])
            position += 1
        if sum(taken) != n:
            possible = all(s % ranks == 0 for s in sizes)
            shares = "" if possible else f", and {ranks} ranks cannot share each of them equally"
            raise NoRule(
                f"it is cut into pieces of {', '.join(map(str, sizes))} (dim {cut.dim}), where the ranks' parts do not "
                f"end{shares}",
                hints=[tuple(sizes)] if possible else [],
                kind="layout",
            )
        pieces.append(cut.cut(tuple(taken), shares=cut.shares[first:position]))
    return pieces


def _pieces(x: ShardedTensor, dim: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Consecutive pieces of `x` along `dim`."""
    cut = x.placement
    if dim != cut.dim:
        return tuple(derive(part, cut, x) for part in x.local.split(list(sizes), dim))
    chunks = cut.chunks(x.group.size)
    cuts = _cuts_of(cut, sizes, chunks)
    parts = x.local.split([n // chunks for n in sizes], dim)
    return tuple(held_together(derive(part, c, x)) for part, c in zip(parts, cuts, strict=True))


@first("split", "split_with_sizes", "unsafe_split")
def _split(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    n: Any = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size"))
    dim = argument(args, kwargs, 2, "dim", 0) % x.ndim
    total = x.shape[dim]
    sizes = [min(n, total - i) for i in range(0, total, n)] if isinstance(n, int) else list(n)
    return _pieces(x, dim, sizes)


@first("chunk", "unsafe_chunk")
def _chunk(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    dim = argument(args, kwargs, 2, "dim", 0) % x.ndim
    total = x.shape[dim]
    n = -(-total // argument(args, kwargs, 1, "chunks"))
    return _pieces(x, dim, [min(n, total - i) for i in range(0, total, n)])


@first("tensor_split")
def _tensor_split(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    where = argument(args, kwargs, 1, "indices_or_sections", kwargs.get("sections", kwargs.get("indices")))
    dim = argument(args, kwargs, 2, "dim", 0) % x.ndim
    total = x.shape[dim]
    if isinstance(where, Tensor):
        raise NoRule("tensor_split at positions given by a tensor")
    if isinstance(where, int):
        sizes = [total // where + (i < total % where) for i in range(where)]
    else:
        borders = [0, *(min(total, w % total if w < 0 else w) for w in where), total]
        sizes = [b - a for a, b in pairwise(borders)]
    if min(sizes) <= 0:
        raise NoRule("tensor_split into empty pieces")
    return _pieces(x, dim, sizes)


@first("narrow")
def _narrow(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    dim = argument(args, kwargs, 1, "dim") % x.ndim
    start, length = argument(args, kwargs, 2, "start"), argument(args, kwargs, 3, "length")
    return x[(*(slice(None),) * dim, slice(start, start + length))]


@first("select")
def _select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    dim = argument(args, kwargs, 1, "dim") % x.ndim
    return x[(*(slice(None),) * dim, argument(args, kwargs, 2, "index"))]


@first("index_select")
def _index_select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, index = args[0], argument(args, kwargs, 2, "index")
    if is_sharded(index):
        raise NoRule("indexing by a cut tensor")
    dim = argument(args, kwargs, 1, "dim") % x.ndim
    if dim == x.placement.dim:
        raise NoRule(f"indexing into the cut dim {dim}", kind="layout")
    return derive(x.local.index_select(dim, index), x.placement, x)


@first("unbind", "iter")
def _unbind(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, cut = args[0], args[0].placement
    dim = argument(args, kwargs, 1, "dim", 0) % x.ndim
    if dim == cut.dim:
        raise NoRule(f"unbind of the cut dim {dim} (size {cut.length})", kind="layout")
    parts = tuple(derive(part, cut.at(cut.dim - (dim < cut.dim)), x) for part in x.local.unbind(dim))
    return iter(parts) if func.__name__ == "__iter__" else parts


# ---------------------------------------------------------------- indexing
def _width(entry: Any) -> int:
    """How many dims of the tensor an index entry consumes."""
    if entry is None or entry is Ellipsis:
        return 0
    return entry.ndim if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


def _full_index(x: ShardedTensor, index: Any) -> tuple[Any, ...]:
    """The index as one entry per consumed dim, without an ellipsis."""
    entries = index if isinstance(index, tuple) else (index,)
    if any(is_sharded(e) for e in entries):
        raise NoRule("indexing by a cut tensor")
    if any(isinstance(e, bool) for e in entries):
        raise NoRule("indexing by True or False")
    fill = (slice(None),) * (x.ndim - sum(_width(e) for e in entries))
    dots = [i for i, e in enumerate(entries) if e is Ellipsis]
    if dots:
        return (*entries[: dots[0]], *fill, *entries[dots[0] + 1 :])
    return (*entries, *fill)


def _slice_of_cut_dim(x: ShardedTensor, entry: slice) -> tuple[slice, Placement]:
    """The local slice and the placement of a slice along the cut dim."""
    cut = x.placement
    ranks = cut.chunks(x.group.size)
    total = cut.length
    start, stop, step = entry.indices(total)
    if (start, stop, step) == (0, total, 1):
        return slice(None), cut
    if step != 1:  # every step-th element: interleaved gate and up
        if cut.padding or step < 1 or stop != total or start >= step or any(n % (ranks * step) for n in cut.segments):
            raise NoRule(f"slice {start}:{stop}:{step} of the cut dim", kind="layout")
        return entry, cut.cut(tuple(n // step for n in cut.segments))
    if stop <= start:
        raise NoRule("empty slice of the cut dim")
    sizes = [n for n in (start, stop - start, total - stop) if n]
    taken = _cuts_of(cut, sizes, ranks)[1 if start else 0]
    begin = start // ranks
    return slice(begin, begin + taken.length // ranks), taken


def _local_index(x: ShardedTensor, index: Any) -> tuple[tuple[Any, ...], Placement, int]:
    """(index into the shard, placement of the result, number of its dims)."""
    entries = _full_index(x, index)
    cut = x.placement
    advanced = [i for i, e in enumerate(entries) if isinstance(e, (Tensor, list))]
    if any(b - a != 1 for a, b in pairwise(advanced)):
        raise NoRule("index tensors that are not neighbours")
    tensors = [torch.as_tensor(entries[i]) for i in advanced]
    # neighbouring index tensors are replaced by their common (broadcast) dims, a mask by one dim
    is_mask = any(t.dtype == torch.bool for t in tensors)
    index_dims = 0 if not tensors else 1 if is_mask else max(t.ndim for t in tensors)
    out: list[Any] = []
    result = cut
    source_dim = result_dim = 0
    for i, entry in enumerate(entries):
        width = _width(entry)
        touches = source_dim <= cut.dim < source_dim + width
        if entry is None:
            result_dim += 1
        elif isinstance(entry, slice):
            if touches:
                entry, result = _slice_of_cut_dim(x, entry)
                result = result.at(result_dim)
            result_dim += 1
        elif touches:
            raise NoRule(f"indexing into the cut dim {cut.dim}", kind="layout")
        elif advanced and i == advanced[0]:
            result_dim += index_dims
        out.append(entry)
        source_dim += width
    return tuple(out), result, result_dim


def _one_position(x: ShardedTensor, index: Any) -> Tensor | None:
    """`table[7]` on the cut dim: the rank that owns it gives it to all.

    Not while planning, where another segmentation (q, k and v of a fused weight) is the better answer.
    Collectives: one all-reduce of the result (backward: none).
    """
    entries, cut, group = _full_index(x, index), x.placement, x.group
    if group.on_gather is not None or cut.copies > 1 or any(isinstance(e, (Tensor, list)) for e in entries):
        return None
    at = [i for i, e in enumerate(entries) if e is not None][cut.dim]
    if not isinstance(entries[at], int):
        return None
    owner, row = _owner(cut, range(cut.length)[entries[at]], group.size)
    part = x.local[(*entries[:at], row, *entries[at + 1 :])]
    if owner != group.rank:  # zeros, but part of the graph as on the owner
        part = part.masked_fill(torch.ones((), dtype=torch.bool, device=part.device), 0)
    group.conversions += 1
    return reduce_out(part, group)


def _owner(cut: Placement, position: int, ranks: int) -> tuple[int, int]:
    """(rank, index into its shard) of a position of the cut dim."""
    start = local = 0
    for n in cut.segments:
        chunk = (n + cut.padding) // ranks
        if position < start + n:
            rank, offset = divmod(position - start, chunk)
            return rank, local + offset
        start, local = start + n, local + chunk
    raise IndexError(position)


@register_rule("getitem")
def _getitem(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, index = args
    if not is_sharded(x):
        raise NoRule("indexing by a cut tensor")
    position = _one_position(x, index)
    if position is not None:
        return position
    local_index, cut, _ = _local_index(x, index)
    return held_together(derive(x.local[local_index], cut, x))


@register_rule("setitem")
def _setitem(func: Any, args: Args, kwargs: Kwargs) -> None:
    x, index, value = args
    if not is_sharded(x):
        raise NoRule("it writes a cut tensor into a whole one, or through a cut index")
    local_index, cut, ndim = _local_index(x, index)
    if isinstance(value, Tensor):
        from_right = cut.dim - ndim
        if isinstance(value, ShardedTensor) and (
            value.placement.dim - value.ndim != from_right or not value.placement.like(cut)
        ):
            raise NoRule("the assigned tensor is cut differently")
        x.sources = merged_sources([x, value])
        value = localize(value, from_right, cut, x.group)
    x.local[local_index] = value


# ---------------------------------------------------------------- joining
@register_rule("cat", "concat", "concatenate")
def _cat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensors = [t for t in argument(args, kwargs, 0, "tensors") if not (t.ndim == 1 and t.numel() == 0)]
    dim = argument(args, kwargs, 1, "dim", kwargs.get("axis", 0))
    sharded = [t for t in tensors if is_sharded(t)]
    head = sharded[0]
    dim %= head.ndim
    if len(tensors) == 1:
        return head.clone()
    if dim == head.placement.dim:
        if len(sharded) != len(tensors) or any(
            t.placement.dim != dim or t.placement.padding or t.placement.copies != head.placement.copies
            for t in sharded
        ):
            raise NoRule("cat of cut and whole tensors along the cut dim")
        segments = tuple(n for t in sharded for n in t.placement.segments)
        return derive(torch.cat([t.local for t in sharded], dim), head.placement.cut(segments), *sharded)
    from_right, cut = align(sharded)
    parts = [localize(t, from_right, cut, head.group) for t in tensors]
    return derive(torch.cat(parts, dim), cut, *sharded)


@register_rule("stack")
def _stack(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensors = list(argument(args, kwargs, 0, "tensors"))
    sharded = [t for t in tensors if is_sharded(t)]
    head = sharded[0]
    dim = argument(args, kwargs, 1, "dim", 0) % (head.ndim + 1)
    from_right, cut = align(sharded)
    parts = [localize(t, from_right, cut, head.group) for t in tensors]
    return derive(torch.stack(parts, dim), cut.at(cut.dim + (dim <= cut.dim)), *sharded)
