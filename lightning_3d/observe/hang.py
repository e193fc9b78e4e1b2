"""WHO waits for whom, when nothing moves any more?  One report per hang, in the schedule's words.

A thread on every rank looks at its rank's `Activity`. When the rank has waited longer than the limit, the thread asks
all ranks through the run's key-value store for their notes; every rank's thread answers, also while its main thread is
blocked. The rank that asked first prints the chain of waiting, down to the rank that waits for nobody, and what that
one is doing. Nothing is ended: it may only be slow.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_3d.comm import StoreError, run_store
from lightning_3d.errors import ConfigurationError
from lightning_3d.mesh import Mesh
from lightning_3d.observe.activity import Activity, Note

if TYPE_CHECKING:
    from lightning_3d.pipeline import PipelineRunner

_ANSWER = 3.0
"""Seconds the ranks have for their answers."""


class HangReport:
    """Watches one rank, and reports when it waits too long.

    Args:
        store: A part of the run's key-value store of its own (see `comm.run_store`).
        activity: What this rank does.
        world_size: Number of ranks.
        limit: Seconds a rank may wait without a report.
        write: Takes the report.
    """

    def __init__(
        self,
        store: Any,
        activity: Activity,
        world_size: int,
        limit: float = 60.0,
        write: Callable[[str], None] | None = None,
    ) -> None:
        if not limit > 0:
            raise ConfigurationError(
                f"hang_report_after is {limit!r}; it is the number of seconds a rank may wait before a report is "
                "printed, so more than 0 (None: no report)."
            )
        self.activity, self.limit = activity, limit
        self._store, self._world_size = store, world_size
        self._interval = min(1.0, limit / 4)
        self._write = write or _to_stderr
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_3d-hang-report", daemon=True)
        self._answered = 0
        self._known: Any = None  # the standstill that has been reported

    @classmethod
    def on_default_group(cls, mesh: Mesh, limit: float) -> HangReport:
        """A report over the store of the default process group; call it in the thread that trains."""
        return cls(run_store("hang"), Activity.of(mesh), mesh.layout.world_size, limit)

    def follow(self, runner: PipelineRunner | None) -> None:
        """Know what a pipeline does; without one only collectives are known."""
        if runner is not None:
            self.activity.follow(runner)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no further."""
        self._stop.set()

    # -- the thread
    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._once()
            except StoreError:  # the store is gone, and with it the run: `FailureWatch` says why
                return
            except Exception as error:  # training must not suffer from a report that cannot be made
                self._write(f"lightning_3d: no report on hangs any more ({type(error).__name__}: {error})")
                return

    def _once(self) -> None:
        asked = int(self._store.add("asked", 0))  # how many reports were asked for in this run
        if asked > self._answered:
            self._answer(asked)
        progress, seconds, waits = self.activity.look()
        if seconds >= self.limit and waits and progress != self._known:
            self._ask()

    def _answer(self, number: int) -> None:
        self._store.set(f"{number}/{self.activity.mesh.rank}", self.activity.note().to_text())
        self._answered, (self._known, _, _) = number, self.activity.look()

    def _ask(self) -> None:
        number = self._answered + 1  # a rank that asks at the same time asks for the same one, and one of them gets it
        me = str(self.activity.mesh.rank)
        if self._store.compare_set(f"{number}/asks", "", me).decode() != me:
            return  # another rank reports this hang
        self._store.add("asked", 1)
        self._answer(number)
        self._write(report_text(self._answers(number), self.activity.mesh.rank, self._world_size))

    def _answers(self, number: int) -> dict[int, Note]:
        notes: dict[int, Note] = {}
        until = time.monotonic() + max(_ANSWER, 2 * self._interval)
        while len(notes) < self._world_size and time.monotonic() < until and not self._stop.is_set():
            for rank in range(self._world_size):
                key = f"{number}/{rank}"
                if rank not in notes and self._store.check([key]):
                    notes[rank] = Note.from_text(self._store.get(key).decode())
            time.sleep(0.05)
        return notes


def _to_stderr(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)


# -- the report
def report_text(notes: Mapping[int, Note], start: int, world_size: int) -> str:
    """Who waits for whom, beginning with rank `start`, and where that ends.

    Args:
        notes: What every rank that answered said.
        start: The rank that asked.
        world_size: Number of ranks.
    """
    chain, end = follow_chain(notes, start)
    lines = [f"lightning_3d: {notes[start]} has waited for {notes[start].seconds:.0f} s. Who waits for whom:"]
    for here, there in zip(chain, [*chain[1:], end], strict=True):
        lines.append(f"  {_waits(notes, here, there)}")
    if end is None:
        last = notes[chain[-1]]
        if not last.on:
            lines.append(f"  No other rank can be named. {last} is {last.doing}.")
        else:
            lines.append("  All of them are there: the operation itself does not end (network, device, or order).")
        stands = [chain[-1]]
    elif end in chain:
        lines.append("  They wait for each other: a deadlock. Their stacks, innermost line last:")
        stands = chain[chain.index(end) :]
    else:
        stands = [end] if end in notes else []
    for rank in stands:
        lines += [f"Stack of {notes[rank]}, innermost line last:", notes[rank].stack.rstrip()]
    others = [rank for rank in range(world_size) if rank not in chain and rank != end]
    if others:
        lines.append("The other ranks:")
        lines += [f"  {_elsewhere(notes, rank)}" for rank in others[:16]]
        lines += [f"  and {len(others) - 16} more"] if len(others) > 16 else []
    lines.append("Nothing was ended; hang_report_after=None turns this report off, a number of seconds delays it.")
    return "\n".join(lines)


def follow_chain(notes: Mapping[int, Note], start: int) -> tuple[list[int], int | None]:
    """The ranks that wait, in order, and where that ends.

    Returns:
        The chain, and the rank its last one waits for: one that does not wait, does not answer, or (a deadlock) is in
        the chain; None if there is nobody to wait for.
    """
    chain = [start]
    while True:
        here = notes[chain[-1]]
        # those in the same collective do not keep each other waiting
        holding = [r for r in here.on if r not in notes or here.call is None or notes[r].call != here.call]
        if not holding:
            return chain, None
        # the one that waits for nobody is the reason; then one that leads on
        free = [r for r in holding if r not in notes or notes[r].waits is None]
        onwards = [r for r in holding if r not in chain]
        there = (free or onwards or holding)[0]
        if free or there in chain:
            return chain, there
        chain.append(there)


def _waits(notes: Mapping[int, Note], here: int, there: int | None) -> str:
    text = f"{notes[here]} waits {notes[here].waits}"
    if there is None:
        return text.removesuffix(" for").removesuffix(" from")
    if there not in notes:
        return (
            f"{text} rank {there}, which does not answer: its process is stopped, or runs code that holds Python's "
            "lock, or is gone"
        )
    other = notes[there]
    if other.waits is None:
        return f"{text} {other}, which is {other.doing}, for {other.seconds:.0f} s now"
    return f"{text} {other}"


def _elsewhere(notes: Mapping[int, Note], rank: int) -> str:
    if rank not in notes:
        return f"rank {rank} does not answer"
    note = notes[rank]
    if note.waits is None:
        return f"{note} is {note.doing}"
    on = ", ".join(map(str, note.on[:4])) + (", ..." if len(note.on) > 4 else "")
    return f"{note} waits {note.waits} rank {on}" if note.on else f"{note} waits {note.waits}"
