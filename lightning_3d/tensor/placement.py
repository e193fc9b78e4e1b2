"""HOW is one tensor cut over the tensor-parallel ranks?  Placements and their arithmetic (no communication here).

A placement cuts one dim of a *global* tensor. The dim is a sequence of segments; each segment is cut into `size` equal
chunks, and rank r owns chunk r of every segment (its local dim is those chunks in order):

    (N,)         one segment: plain contiguous cut
    (E, E, E)    a fused q|k|v projection: every rank gets its heads of q, of k and of v
    (Q, K, K)    the same with fewer key/value heads
    (n,) * k     what a view or a permute leaves of a cut dim that has an outer factor k

With `copies` c, neighbouring ranks share a chunk: there are size / c chunks and rank r owns chunk r // c of every
segment (8 key/value heads over 16 ranks). The copies hold equal values, but each only *its part of the gradient*: the
gradient of the global tensor is the sum over the copies. So every operation may go on with what its rank has, and the
sum is formed once, at the parameter.

With `shares` the ranks hold no copies yet, but will need some: (Q, K, K) with shares (1, 4, 4) is a fused projection
with fewer key/value heads than ranks. It is divided as without shares (the weight, too), so a rank's part of K may be a
part of a head. A piece that is split off and belongs to several ranks is gathered by these (`held_together`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(offset in the global tensor, offset in the shard, sizes) of one rectangle."""


class NoRule(Exception):
    """This operation has no sharded form for these placements.

    Raised by a rule; at run time the operands are then gathered, while planning the assumption is refuted.

    Args:
        message: What could not be done, in the user's terms.
        hints: Segmentations of the cut dim with which it would work.
        kind: "layout" if another segmentation could help, "op" if not.
        fatal: Gathering would not be right either (`out=`, storage access): an error at run time.
        partner: The whole activation it was to be combined with.
        heads: Number of parts (attention heads) the code splits the cut dim into, if the ranks cannot share them.
    """

    def __init__(
        self,
        message: str,
        hints: Sequence[tuple[int, ...]] = (),
        kind: str = "op",
        fatal: bool = False,
        partner: Tensor | None = None,
        heads: int | None = None,
    ) -> None:
        super().__init__(message)
        self.hints, self.kind, self.fatal, self.partner, self.heads = tuple(hints), kind, fatal, partner, heads


@dataclass(frozen=True)
class Placement:
    """How one global tensor is cut.

    Args:
        dim: The dim that is cut.
        segments: Sizes of the consecutive parts of that dim; each is cut into equal chunks.
        padding: Rows added at the end so that the dim can be cut (only with one segment). The global size excludes
            them; they are zero, get zero gradient and never reach a checkpoint.
        axis: "tp", or "sequence" for an activation that is cut along the sequence (sequence parallelism).
        copies: Neighbouring ranks that hold the same chunk; divides the number of ranks.
        shares: For each segment the neighbouring ranks that have to hold it together once it is alone; empty if none.
    """

    dim: int
    segments: tuple[int, ...]
    padding: int = 0
    axis: str = "tp"
    copies: int = 1
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert not self.padding or len(self.segments) == 1, "only a dim of one segment can be padded"
        assert not self.padding or self.copies == 1, "a padded dim is not shared by ranks"
        if self.shares:
            assert len(self.shares) == len(self.segments), "each segment has its number of ranks"
            assert self.copies == 1, "what ranks hold copies of need not be gathered"
            assert not self.padding, "a padded dim is not shared by ranks"

    @property
    def length(self) -> int:
        """Global size of the cut dim (without padding)."""
        return sum(self.segments)

    @property
    def uniform(self) -> bool:
        """All segments have one size."""
        return len(set(self.segments)) == 1

    def at(self, dim: int) -> Placement:
        """The same cut on another dim."""
        return self if dim == self.dim else replace(self, dim=dim)

    def like(self, other: Placement) -> bool:
        """Same cut of a dim (of whatever index): equal segments, padding and copies."""
        mine, theirs = (self.segments, self.padding, self.copies), (other.segments, other.padding, other.copies)
        return mine == theirs

    def chunks(self, size: int) -> int:
        """Number of different chunks over `size` ranks."""
        return size // self.copies

    def cut(self, segments: tuple[int, ...], dim: int | None = None, shares: tuple[int, ...] = ()) -> Placement:
        """Other segments, same axis and copies, no padding."""
        shares = shares if any(n > 1 for n in shares) else ()
        return Placement(self.dim if dim is None else dim, segments, 0, self.axis, self.copies, shares)

    @property
    def shared_by(self) -> int:
        """Ranks that have to hold this piece together; 1 for none, or while its segments differ in that."""
        return self.shares[0] if self.shares and len(set(self.shares)) == 1 else 1

    def of_neighbours(self, size: int) -> Placement:
        """How the `shared_by` neighbours that have to hold a piece together divide it now."""
        return Placement(self.dim, tuple(n * self.shared_by // size for n in self.segments))

    def local_length(self, size: int) -> int:
        """Local size of the cut dim."""
        return (self.length + self.padding) // self.chunks(size)

    def local_shape(self, global_shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Shape of every rank's shard."""
        shape = list(global_shape)
        shape[self.dim] = self.local_length(size)
        return tuple(shape)

    def global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the global tensor a shard of this shape belongs to."""
        shape = list(local_shape)
        shape[self.dim] = self.length
        return tuple(shape)

    def to_local(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """Shard of `rank`: a view where possible, so clone before you keep it."""
        dim = self.dim
        if self.padding:
            shape = list(tensor.shape)
            shape[dim] = self.padding
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
        rank, size = rank // self.copies, self.chunks(size)
        if len(self.segments) == 1:
            chunk = tensor.shape[dim] // size
            return tensor.narrow(dim, rank * chunk, chunk)
        if self.uniform:
            inner = self.segments[0] // size
            cut = tensor.unflatten(dim, (len(self.segments), size, inner)).select(dim + 1, rank)
            return cut.flatten(dim, dim + 1)
        return torch.cat([part.chunk(size, dim)[rank] for part in tensor.split(list(self.segments), dim)], dim)

    def to_global(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """The global tensor from the shards of all ranks, in order of rank (of copies the first one's)."""
        dim = self.dim
        parts, size = parts[:: self.copies], self.chunks(size)
        if len(self.segments) == 1:
            whole = torch.cat(list(parts), dim)
            return whole.narrow(dim, 0, self.length) if self.padding else whole
        chunks = [part.split([n // size for n in self.segments], dim) for part in parts]
        return torch.cat([chunks[r][i] for i in range(len(self.segments)) for r in range(size)], dim)

    def to_global_gradient(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """The global gradient from the ranks' gradients: copies are summed."""
        if self.copies > 1:
            sums = [sum(parts[i + 1 : i + self.copies], parts[i]) for i in range(0, size, self.copies)]
            parts = [part for part in sums for _ in range(self.copies)]
        return self.to_global(parts, size)

    def rectangles(self, global_shape: Sequence[int], rank: int, size: int) -> list[Box]:
        """The shard of `rank` as boxes of the global tensor, padding excluded.

        Every element of the global tensor is in exactly one box of exactly one rank (with copies: of each of them), so
        a checkpoint written box by box can be read by any other layout.
        """
        boxes: list[tuple[int, int, int]] = []  # (global start, local start, length) along the dim
        if self.padding:
            chunk = self.local_length(size)
            valid = max(0, min(chunk, self.length - rank * chunk))
            boxes = [(rank * chunk, 0, valid)]
        else:
            rank, size = rank // self.copies, self.chunks(size)
            start = local = 0
            for n in self.segments:
                chunk = n // size
                boxes.append((start + rank * chunk, local, chunk))
                start, local = start + n, local + chunk
        merged: list[tuple[int, int, int]] = []
        for begin, local, length in boxes:
            if merged and merged[-1][0] + merged[-1][2] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1], merged[-1][2] + length)
            elif length:
                merged.append((begin, local, length))
        return [self._box(global_shape, *box) for box in merged]

    def _box(self, global_shape: Sequence[int], begin: int, local: int, length: int) -> Box:
        zeros = (0,) * len(global_shape)

        def put(values: Sequence[int], value: int) -> tuple[int, ...]:
            return (*values[: self.dim], value, *values[self.dim + 1 :])

        return put(zeros, begin), put(zeros, local), put(tuple(global_shape), length)


def valid_rows(placement: Placement, rank: int, size: int) -> int:
    """How many of a rank's rows along the cut dim are not padding."""
    chunk = placement.local_length(size)
    return max(0, min(chunk, placement.length - rank * chunk)) if placement.padding else chunk


def view_placement(old: Sequence[int], placement: Placement, new: Sequence[int], size: int) -> Placement:
    """Where the cut sits after a row-major reshape from `old` to `new` (both global shapes).

    One chunk of a uniform placement is a run of `stride` consecutive elements, repeated `size` times. The cut survives
    iff one new dim holds whole repetitions: then its rank index is a digit of that dim alone.

    Raises:
        NoRule: No dim of the result holds whole chunks; `hints` are segmentations for which one would.
    """
    size = placement.chunks(size)
    tail = math.prod(old[placement.dim + 1 :])
    if placement.padding or not placement.uniform:
        for dim in range(len(new)):
            if new[dim] == old[placement.dim] and math.prod(new[dim + 1 :]) == tail:
                return placement.at(dim)
            inner, odd = divmod(math.prod(new[dim + 1 :]), max(tail, 1))
            if placement.padding or odd or new[dim] * inner != old[placement.dim]:
                continue
            if all(n % (size * inner) == 0 for n in placement.segments):  # heads of a fused q, k, v
                return placement.cut(tuple(n // inner for n in placement.segments), dim)
        raise NoRule(
            f"view {tuple(old)} -> {tuple(new)} splits or merges dim {placement.dim}, which is cut unevenly "
            f"{placement.segments}",
            kind="layout",
        )
    stride = placement.segments[0] // size * tail
    after = 1
    for dim in range(len(new) - 1, -1, -1):
        n = new[dim]
        if n >= size and stride % after == 0 and (after * n) % (stride * size) == 0 and after <= stride:
            inner = stride // after
            return placement.cut((inner * size,) * (n // (inner * size)), dim)
        after *= n
    heads = _undealt_heads(old, placement, new, size)
    why = "" if heads is None else f"{heads} is not divisible by {size}, "
    raise NoRule(
        f"view {tuple(old)} -> {tuple(new)} would split the chunks of dim {placement.dim} over {size} ranks: "
        f"{why}no dim of the result holds whole chunks of {stride} elements",
        hints=_view_hints(old, placement, new, size, tail),
        kind="layout",
        heads=heads,
    )


def _undealt_heads(old: Sequence[int], placement: Placement, new: Sequence[int], size: int) -> int | None:
    """The number of heads that cannot be dealt, if the view splits the dim into (heads, size of a head)."""
    for outer, inner in pairwise(new):
        if outer * inner == old[placement.dim] and outer % size:
            return outer
    return None


def _view_hints(
    old: Sequence[int], placement: Placement, new: Sequence[int], size: int, tail: int
) -> list[tuple[int, ...]]:
    """Segmentations of the old dim that put the rank index at the head of one of the new dims, outermost first."""
    hints: list[tuple[int, ...]] = []
    after = 1
    for n in reversed(new):
        block = after * n
        segment = block // tail
        whole = n % size == 0 and block % tail == 0 and segment
        if whole and old[placement.dim] % segment == 0 and old[placement.dim] // segment <= 8:
            hints.append((segment,) * (old[placement.dim] // segment))
        after = block
    return hints[::-1]
