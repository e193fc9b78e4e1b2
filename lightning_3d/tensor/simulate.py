"""WHAT would all ranks compute?  Tensor-parallel ranks as threads of one process, for proofs and tests.

Only one rank runs at a time (a baton goes round at every collective), and each has its own random state (and its own
copy of whatever Python state the models share), so a simulation is deterministic and user code that draws random
numbers draws the same ones on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_3d.comm import DONE, Communicator, Ledger, Pending, PendingShard, Reduction
from lightning_3d.errors import ParityError
from lightning_3d.probe import common_state

T = TypeVar("T")


class _Meeting:
    """Where the ranks of one simulated axis exchange values."""

    def __init__(self, size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(size)
        self.baton = threading.Lock()
        self.slots: list[Any] = [None] * size
        self.timeout = timeout


class ThreadCommunicator(Communicator):
    """One rank of an axis whose ranks are threads. Sums are formed in order of rank: bit-equal everywhere.

    Make all ranks with `ThreadCommunicator.ring(size)` and run them with `run_simulated`.
    """

    def __init__(self, axis: str, rank: int, size: int, meeting: _Meeting, ledger: Ledger | None = None) -> None:
        super().__init__(axis, rank, size, ledger)
        self._meeting = meeting

    @classmethod
    def ring(cls, size: int, axis: str = "tp", timeout: float = 60.0) -> list[ThreadCommunicator]:
        """All ranks of a new axis; a rank that waits longer than `timeout` seconds for its peers fails."""
        meeting = _Meeting(size, timeout)
        return [cls(axis, rank, size, meeting) for rank in range(size)]

    def exchange(self, value: T) -> list[T]:
        """Everybody's value; ends this rank's turn until all ranks are here."""
        meeting = self._meeting
        meeting.slots[self.rank] = value
        put_back = common_state()
        meeting.baton.release()
        try:
            meeting.barrier.wait(meeting.timeout)
            everybody = list(meeting.slots)
            meeting.barrier.wait(meeting.timeout)
        finally:
            meeting.baton.acquire()
            put_back()
        return everybody

    def _tensors(self, op: str, tensor: Tensor, counted: Tensor | None = None) -> list[Tensor]:
        if self.size > 1:
            self.ledger.record(self.axis, op, self.size, tensor if counted is None else counted)
        return self.exchange(tensor.detach().clone())

    def all_reduce_start(self, tensor: Tensor, op: Reduction = "sum") -> Pending:
        stacked = torch.stack(self._tensors("all_reduce", tensor))
        with torch.no_grad():
            tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0) if op == "max" else stacked.amin(0))
        return DONE

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        whole = tensor.new_empty((self.size, *tensor.shape), device="meta")
        return self._tensors("all_gather", tensor, whole)

    def all_gather_start(self, out: Tensor, shard: Tensor) -> Pending:
        out.copy_(torch.cat(self._tensors("all_gather", shard, out)))
        return DONE

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        parts = [t.chunk(self.size, dim)[self.rank] for t in self._tensors("reduce_scatter", tensor)]
        return torch.stack(parts).sum(0)

    def reduce_scatter_start(self, full: Tensor) -> PendingShard:
        shard = self.reduce_scatter(full, 0)
        return PendingShard(DONE, lambda: shard)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self._tensors("broadcast", tensor)[source])

    def broadcast_object(self, value: T, source: int) -> T:
        return self.exchange(value)[source]

    def all_gather_object(self, value: T) -> list[T]:
        return self.exchange(value)

    def barrier(self) -> None:
        self.exchange(None)


def run_simulated(size: int, body: Callable[[ThreadCommunicator], T], timeout: float = 60.0) -> list[T]:
    """`body(communicator)` on `size` simulated ranks; their results in order of rank.

    Every rank starts from the caller's Python state, which is put back at the end.

    Raises:
        Exception: What the first failing rank raised; the others are released.
    """
    ring = ThreadCommunicator.ring(size, timeout=timeout)
    meeting = ring[0]._meeting
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    begin = common_state()

    def run(comm: ThreadCommunicator) -> None:
        with meeting.baton:
            begin()
            try:
                results[comm.rank] = body(comm)
            except BaseException as error:
                errors.append(error)
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(comm,), daemon=True) for comm in ring]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin()
    if errors:
        real = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None)
        if real is None:
            ended = ", ".join(map(str, sorted(results))) or "none of them"
            raise ParityError(
                f"of {size} simulated tensor-parallel ranks {ended} came to the end of the step while the others wait "
                "in a collective: they do not do the same. Look for state that the step changes and the ranks share."
            ) from errors[0]
        raise real
    return [results[rank] for rank in range(size)]


def must_run(what: str, size: int, body: Callable[[ThreadCommunicator], T]) -> list[T]:
    """`run_simulated` of what is known to run on one process.

    Args:
        what: The beginning of a sentence that ends in "N tensor-parallel ranks".
        size: Number of ranks.
        body: As in `run_simulated`.

    Raises:
        ParityError: It fails on the ranks.
    """
    try:
        return run_simulated(size, body)
    except Exception as error:
        raise ParityError(f"{what} {size} tensor-parallel ranks: {type(error).__name__}: {error}") from error
