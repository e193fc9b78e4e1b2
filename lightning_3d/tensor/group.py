"""WHO shares a cut tensor?  The tensor-parallel group every sharded tensor carries: a communicator plus its knobs."""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_3d.comm import DONE, Communicator, Pending, Reduction
from lightning_3d.tensor.entries import SharedEntries
from lightning_3d.tensor.placement import NoRule

if TYPE_CHECKING:
    from lightning_3d.tensor.sharded import ShardedTensor

OnGather = Callable[[frozenset[str], str, NoRule, "Sequence[ShardedTensor]"], None]
"""Called before an op without a rule gathers: (sources, name of the op, why, the sharded operands). May raise."""


class TensorGroup:
    """The tensor-parallel ranks as seen from one of them.

    All collectives of this room go through here. A group only answers *shapes*, without communication and uncounted,
    while it is `dry`, and always when it is given a FakeTensor or a meta tensor.

    Args:
        comm: The axis of the mesh.
        dry: Shapes only: for planning and probing.
        sequence_dim: Dim (negative) along which row layers leave their output cut (sequence parallelism), or None.
        exact_dropout: Draw the mask of the *global* tensor (or other random values of its shape) on every rank and use
            this rank's part, so that results equal one process. Costs the global mask; for tests and proofs.

    Attributes:
        strict: Planning only: refuse reductions over a cut feature dim (they cost a collective).
        on_gather: See `OnGather`.
        gathers: Number of times an op without a rule made this rank gather.
        conversions: Number of collectives that a hand-written tensor-parallel model would not have.
        entries: Number of whole tensors that entered a sharded region (each costs an all-reduce backward).
        on_whole: Planning only: told (sharded, gathered) of every gather.
        lent: Planning only: storage of a gathered copy that a view was taken of -> the copy, and its sources.
        parts: Number of neighbours that hold copies of a chunk -> their communicator; where there is none, the whole
            axis gathers.
        shared_entries: Parameters that enter sharded regions together.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        dry: bool = False,
        sequence_dim: int | None = None,
        exact_dropout: bool = False,
    ) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.dry, self.sequence_dim, self.exact_dropout = dry, sequence_dim, exact_dropout
        self.strict = False
        self.on_gather: OnGather | None = None
        self.on_whole: Callable[[ShardedTensor, Tensor], None] | None = None
        self.parts: dict[int, Communicator] = {}
        self.shared_entries = SharedEntries()
        self.lent: dict[int, tuple[Tensor, frozenset[str]]] = {}
        self.gathers = 0
        self.conversions = 0
        self.entries = 0
        self._warned: set[tuple[str, frozenset[str]]] = set()
        self._number = next(_numbers)
        _groups[self._number] = self

    def __repr__(self) -> str:
        return f"TensorGroup({self.comm!r}{', dry' if self.dry else ''})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorGroup:
        return self  # a copy of a model talks to the same ranks

    def __reduce__(self) -> Any:
        return _find, (os.getpid(), self._number, self.rank, self.size)

    def _shapes_only(self, tensor: Tensor) -> bool:
        return self.dry or isinstance(tensor, FakeTensor) or tensor.is_meta

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce in place where the tensor is contiguous; use the result."""
        if self._shapes_only(tensor):
            return tensor
        return self.comm.all_reduce(tensor.contiguous(), op)

    def all_reduce_start(self, tensor: Tensor) -> Pending:
        """Start to sum the contiguous `tensor` in place; it is valid after `wait()`."""
        if self._shapes_only(tensor):
            return DONE
        assert tensor.is_contiguous()
        return self.comm.all_reduce_start(tensor)

    def sum_copies(self, tensor: Tensor, copies: int) -> Tensor:
        """Sum over the `copies` neighbouring ranks that hold the same chunk."""
        if self._shapes_only(tensor):
            return tensor
        if copies in self.parts:
            return self.parts[copies].all_reduce(tensor.clone(memory_format=torch.contiguous_format))
        first = self.rank - self.rank % copies
        return torch.stack(self.all_gather(tensor)[first : first + copies]).sum(0)

    def gather_copies(self, tensor: Tensor, copies: int) -> list[Tensor]:
        """What the `copies` neighbouring ranks that are to hold the same chunk have of it, in order of rank."""
        if self._shapes_only(tensor):
            return [tensor] * copies
        if copies in self.parts:
            return self.parts[copies].all_gather(tensor.contiguous())
        first = self.rank - self.rank % copies
        return self.all_gather(tensor)[first : first + copies]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, in order of rank."""
        if self._shapes_only(tensor):
            return [tensor] * self.size
        return self.comm.all_gather(tensor.contiguous())

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Sum over the ranks, this rank's equal chunk along `dim`."""
        if self._shapes_only(tensor):
            return tensor.chunk(self.size, dim)[self.rank].contiguous()
        return self.comm.reduce_scatter(tensor.contiguous(), dim)

    def warn_once(self, op: str, sources: frozenset[str], message: str) -> None:
        """One warning per op and layers, from the first rank only."""
        key = (op, sources)
        if key not in self._warned:
            self._warned.add(key)
            if self.rank == 0 and not self.dry:
                warnings.warn(message, stacklevel=4)


_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[int, TensorGroup] = weakref.WeakValueDictionary()


def _find(process: int, number: int, rank: int, size: int) -> TensorGroup:
    """What a pickled group becomes: itself in its own process, else one that only knows its place."""
    group = _groups.get(number) if process == os.getpid() else None
    return TensorGroup(_Elsewhere("tp", rank, size)) if group is None else group


class _Elsewhere(Communicator):
    """The ranks of another process: a module loaded here can be looked at, not run."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"this module holds the shards of tensor-parallel rank {self.rank} of {self.size} and was loaded in a "
            "process where the other ranks are not. Save a checkpoint (trainer.save_checkpoint) and load it into a "
            "whole module; `lightning-3d checkpoint export` makes one file of it."
        )

    all_reduce_start = all_gather = all_gather_start = reduce_scatter = reduce_scatter_start = broadcast = _refuse


def as_group(group: TensorGroup | Communicator) -> TensorGroup:
    """A `TensorGroup` as it is, a bare `Communicator` with default knobs."""
    return group if isinstance(group, TensorGroup) else TensorGroup(group)


def dry_group(size: int, *, sequence_dim: int | None = None) -> TensorGroup:
    """Rank 0 of `size` ranks that do not exist: shapes only."""
    return TensorGroup(Communicator("tp", 0, size), dry=True, sequence_dim=sequence_dim)


def is_shape_only(tensor: Tensor) -> bool:
    """The tensor has no values (a probe's FakeTensor, or meta)."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta
