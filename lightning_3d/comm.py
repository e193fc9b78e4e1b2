"""WHICH collective?  The only file that calls them. Every call is counted by the ledger.

A `Communicator` is one axis of the mesh as seen from this rank. The base class is the axis of size one (every
operation is the identity); `ProcessCommunicator` talks to other processes. Rooms take a `Communicator` and never
see a process group, so the same code runs on one process, on gloo, on NCCL, and on ranks simulated by threads.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Reduction = Literal["sum", "max", "min"]
T = TypeVar("T")
# torch 2.13 renames them; 2.11 has only the old names
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass
class Traffic:
    """What one kind of call moved so far. `payload` is the tensor's size; `wire` what a ring sends per rank."""

    calls: int = 0
    elements: int = 0
    payload: int = 0
    wire: float = 0.0


FIRST_STEPS_ONLY = frozenset({"recording", "meeting"})
"""Phases that later steps do not have: proofs of recorded programs, and stages that meet before their first message."""


@dataclass
class Ledger:
    """Counts communication by (phase, axis, op). Phases are set by who drives the step: forward, backward, ..."""

    phase: str = "other"
    traffic: dict[tuple[str, str, str], Traffic] = field(default_factory=dict)

    def record(self, axis: str, op: str, size: int, tensor: Tensor) -> None:
        """Count one call of `op` over `size` ranks of `axis`; `tensor` is the full-size operand."""
        key = (self.phase, axis, op)
        entry = self.traffic.get(key)
        if entry is None:
            entry = self.traffic[key] = Traffic()
        elements, payload = tensor.numel(), tensor.nbytes
        entry.calls += 1
        entry.elements += elements
        entry.payload += payload
        entry.wire += payload * _wire_factor(op, size)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name the phase of all calls made inside."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def total(self, axis: str | None = None, op: str | None = None, phase: str | None = None) -> Traffic:
        """Sum over all entries that match what is given."""
        out = Traffic()
        for (p, a, o), t in self.traffic.items():
            if (axis is None or a == axis) and (op is None or o == op) and (phase is None or p == phase):
                out.calls += t.calls
                out.elements += t.elements
                out.payload += t.payload
                out.wire += t.wire
        return out

    def reset(self) -> None:
        self.traffic.clear()


def _wire_factor(op: str, size: int) -> float:
    """Bytes a rank sends per byte of the full operand, ring algorithms (Patarasuk and Yuan, 2009)."""
    if op == "all_reduce":
        return 2 * (size - 1) / size
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (size - 1) / size
    return 0.0 if op == "recv" else 1.0


class Pending(Protocol):
    """A communication in flight."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class _Done:
    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


DONE: Pending = _Done()


class PendingShard:
    """A reduce-scatter in flight; `finish` waits and writes or adds the result."""

    def __init__(self, work: Pending, result: Any) -> None:
        self._work, self._result = work, result

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def finish(self, out: Tensor, add: bool = False) -> None:
        """Wait, then put this rank's sum into `out` (`add`: on top of what is there)."""
        self._work.wait()
        (out.add_ if add else out.copy_)(self._result())


class Communicator:
    """One axis of the mesh seen from one rank. This base class is an axis of one rank: nothing is sent.

    Args:
        axis: Name of the mesh axis (tp, pp, dp, ...), under which the ledger counts.
        rank: This rank's coordinate on the axis.
        size: Number of ranks on the axis.
        ledger: Counts every call.
    """

    def __init__(self, axis: str, rank: int = 0, size: int = 1, ledger: Ledger | None = None) -> None:
        self.axis, self.rank, self.size = axis, rank, size
        self.ledger = ledger if ledger is not None else Ledger()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.axis}, {self.rank} of {self.size})"

    # -- collectives on tensors
    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce in place over the axis; every rank gets the same bits. Returns `tensor`."""
        self.all_reduce_start(tensor, op).wait()
        return tensor

    def all_reduce_start(self, tensor: Tensor, op: Reduction = "sum") -> Pending:
        """`all_reduce` that returns at once; `tensor` is valid after `wait()`."""
        return DONE

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor (same shape on all ranks), in order of rank."""
        return [tensor]

    def all_gather_start(self, out: Tensor, shard: Tensor) -> Pending:
        """Gather equal flat shards into the flat `out`; `shard` may be this rank's slice of `out`."""
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return DONE

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Sum over the axis, and return this rank's equal chunk along `dim`."""
        return tensor

    def reduce_scatter_start(self, full: Tensor) -> PendingShard:
        """Sum the flat `full` over the axis; `finish(out)` gives this rank's equal slice of the sum."""
        return PendingShard(DONE, lambda: full)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send `parts[r]` (flat, one type) to rank r; returns what every rank sent here, `sizes[r]` elements each."""
        return list(parts)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite `tensor` with the one of rank `source` of this axis. Returns `tensor`."""
        return tensor

    # -- point to point
    def send_start(self, tensor: Tensor, peer: int) -> Pending:
        """Send a contiguous tensor to rank `peer` of this axis."""
        raise AssertionError("an axis of one rank has no peers")

    def receive_start(self, tensor: Tensor, peer: int) -> Pending:
        """Receive into a contiguous tensor from rank `peer` of this axis; messages of one peer keep their order."""
        raise AssertionError("an axis of one rank has no peers")

    # -- objects and control
    def broadcast_object(self, value: T, source: int) -> T:
        """The pickled `value` of rank `source`, on every rank."""
        return value

    def all_gather_object(self, value: T) -> list[T]:
        """Everybody's pickled `value`, in order of rank."""
        return [value]

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""


class ProcessCommunicator(Communicator):
    """An axis over a `torch.distributed` process group.

    Args:
        axis: Name of the mesh axis.
        group: The process group.
        device: Where tensors made here (packed objects) must live for the group's backend.
        ledger: Counts every call.
    """

    def __init__(self, axis: str, group: dist.ProcessGroup, device: torch.device, ledger: Ledger | None = None) -> None:
        super().__init__(axis, dist.get_rank(group), dist.get_world_size(group), ledger)
        self.group, self.device = group, device
        # gloo has no real reduce-scatter (it all-reduces); all-to-all and a local sum move half the bytes
        self._native_reduce_scatter = dist.get_backend(group) != "gloo"

    def _count(self, op: str, tensor: Tensor) -> None:
        self.ledger.record(self.axis, op, self.size, tensor)

    def all_reduce_start(self, tensor: Tensor, op: Reduction = "sum") -> Pending:
        if self.size == 1:
            return DONE
        self._count("all_reduce", tensor)
        return _work(dist.all_reduce(tensor, _OPS[op], group=self.group, async_op=True))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [tensor]
        tensor = tensor.contiguous()
        out = tensor.new_empty((self.size, *tensor.shape))
        self._count("all_gather", out)
        dist.all_gather(list(out.unbind(0)), tensor, group=self.group)
        return list(out.unbind(0))

    def all_gather_start(self, out: Tensor, shard: Tensor) -> Pending:
        if self.size == 1:
            return super().all_gather_start(out, shard)
        self._count("all_gather", out)
        return _work(_all_gather_single(out, shard, group=self.group, async_op=True))

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return tensor
        chunks = torch.stack(tensor.chunk(self.size, dim))
        out = torch.empty_like(chunks[0])
        self.reduce_scatter_start(chunks.view(-1)).finish(out.view(-1))
        return out

    def reduce_scatter_start(self, full: Tensor) -> PendingShard:
        if self.size == 1:
            return super().reduce_scatter_start(full)
        self._count("reduce_scatter", full)
        if self._native_reduce_scatter:
            shard = full.new_empty(full.numel() // self.size)
            work = _work(_reduce_scatter_single(shard, full, group=self.group, async_op=True))
            return PendingShard(work, lambda: shard)
        parts = torch.empty_like(full)
        work = _work(dist.all_to_all_single(parts, full, group=self.group, async_op=True))
        return PendingShard(work, lambda: parts.view(self.size, -1).sum(0))

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        if self.size == 1:
            return list(parts)
        full = torch.cat(list(parts))
        self._count("all_to_all", full)
        out = full.new_empty(sum(sizes))
        dist.all_to_all_single(out, full, list(sizes), [part.numel() for part in parts], group=self.group)
        return list(out.split(list(sizes)))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        if self.size > 1:
            self._count("broadcast", tensor)
            dist.broadcast(tensor, dist.get_global_rank(self.group, source), group=self.group)
        return tensor

    def send_start(self, tensor: Tensor, peer: int) -> Pending:
        self.ledger.record(self.axis, "send", self.size, tensor)
        return _work(self.group.send([_real(tensor)], peer, 0))

    def receive_start(self, tensor: Tensor, peer: int) -> Pending:
        self.ledger.record(self.axis, "recv", self.size, tensor)
        return _work(self.group.recv([_real(tensor)], peer, 0))

    def broadcast_object(self, value: T, source: int) -> T:
        if self.size == 1:
            return value
        mine = source == self.rank
        data = _pack(value) if mine else torch.empty(0, dtype=torch.uint8)
        length = self.broadcast(torch.tensor([data.numel()], device=self.device), source)
        data = data.to(self.device) if mine else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.broadcast(data, source)
        return value if mine else _unpack(data)

    def all_gather_object(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        data = _pack(value).to(self.device)
        lengths = [int(n) for n in self.all_gather(torch.tensor([data.numel()], device=self.device))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        return [_unpack(part[:n]) for part, n in zip(self.all_gather(padded), lengths, strict=True)]

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self.device)).cpu()


def world_communicator(device: torch.device, ledger: Ledger | None = None) -> ProcessCommunicator:
    """All processes of the run, which are there before a mesh is."""
    assert dist.group.WORLD is not None
    return ProcessCommunicator("world", dist.group.WORLD, device, ledger)


# -- beside the mesh, for who watches a run
StoreError = dist.DistError
"""What a store raises once the process that hosts it is gone."""
_stores: Counter[str] = Counter()


def run_store(use: str) -> Any:
    """A part of the run's key-value store for one use, on a connection of its own (for another thread).

    Every call opens another part, the same one on all ranks: several runs of the same processes do not meet.
    """
    _stores[use] += 1
    store: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"lightning_3d/{use}/{_stores[use]}", store.clone())  # type: ignore[attr-defined]


def is_world(group: Any) -> bool:
    """Whether a process group is the one over all processes (None, too)."""
    return group is None or group is dist.group.WORLD


def ranks_of(group: Any = None) -> list[int]:
    """Global ranks of a process group (None: of the default one, so all there are)."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def _work(work: Any) -> Pending:
    return DONE if work is None else work


def _real(tensor: Tensor) -> Tensor:
    """As numbers of which backends know the dtype; the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _pack(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpack(data: Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())
