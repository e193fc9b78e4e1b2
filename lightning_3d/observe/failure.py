"""WHO failed first?  One rank's error ends all ranks within seconds, and it is the first thing printed.

A rank that raises writes its error into the run's key-value store. A thread on every rank looks there, and whether the
processes of its machine still run; when another rank has failed it prints that rank's error and ends the process,
because its main thread is likely waiting in a collective that will never complete (and cannot be interrupted).
"""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
import traceback
from typing import Any

from lightning_3d.comm import StoreError, ranks_of, run_store
from lightning_3d.errors import ConfigurationError
from lightning_3d.observe.alive import Neighbours

_ERROR = "error"
"""The key of the first error."""
_OF_OTHERS = ("connection closed", "connection reset", "broken pipe", "connection refused", "gloo", "nccl", "socket")
"""What the errors speak of that a rank gets when another one is gone."""
_FIRST = 1.5
"""Seconds such an error waits for its cause to be known."""
_SAYS = 400
"""Characters of an error that other ranks repeat."""


class FailureWatch:
    """Spreads the first error of a run to all of its processes.

    Args:
        store: A part of the run's key-value store of its own (see `comm.run_store`).
        rank: This rank.
        describe: Where this rank stands, e.g. "stage 1 of 2, tp 0, dp 1".
        world_size: Number of ranks whose processes are looked after.
        interval: Seconds between two looks.
        grace: Seconds a rank gets to end by itself after another one failed.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        describe: str,
        world_size: int,
        interval: float = 0.5,
        grace: float = 3.0,
    ) -> None:
        self._store, self._rank, self._describe = store, rank, describe
        self._interval, self._grace = interval, grace
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_3d-failure-watch", daemon=True)
        self._failed_here = False
        self._lock = threading.Lock()  # `report` and the thread both look after the neighbours
        self._neighbours = Neighbours(store, rank, describe, world_size)

    @classmethod
    def on_default_group(cls, rank: int, describe: str) -> FailureWatch:
        """A watch over the store of the default process group, on a connection of its own."""
        return cls(run_store("failure"), rank, describe, len(ranks_of()))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The run ended well (or this rank has reported): look no further, and nobody needs to look after this rank."""
        self._stop.set()
        try:
            self._store.set(f"done/{self._rank}", "")
        except StoreError:  # the process that hosts the store was done before
            return
        with self._lock:
            self._neighbours.close()

    def report(self, error: BaseException) -> None:
        """Tell the other ranks. The first report of a run wins; a later one is likely its consequence, and says so."""
        self._failed_here = True
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__)[-12:])
        says = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
        message = f"rank {self._rank} ({self._describe}) failed: {textwrap.shorten(says, _SAYS)}\n{text}"
        try:
            if any(word in str(error).lower() for word in _OF_OTHERS):
                self._await_cause()
            first = self._store.compare_set(_ERROR, "", message).decode()
        except StoreError as lost:  # the store died with another rank
            cause = "; ".join(self._gone().values())
            print(f"lightning_3d: {cause or f'could not tell the other ranks ({lost})'}", file=sys.stderr, flush=True)
            return
        # what set-up refuses, every rank refuses
        if first != message and not isinstance(error, ConfigurationError):
            cause = first.partition("\n")[0]
            note = f"lightning_3d: another rank failed first, this error may be a consequence: {cause}"
            print(note, file=sys.stderr, flush=True)
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(note)

    def _await_cause(self) -> None:
        """An error of the network has its cause in another rank; give that one time to be known."""
        until = time.monotonic() + _FIRST
        while time.monotonic() < until and self._first() is None:
            time.sleep(0.05)

    def _first(self) -> str | None:
        """The first error of the run; a process that is gone without one counts as one."""
        found = self._reported()
        if found is None and (gone := self._gone()):
            time.sleep(0.2)  # what it said last may still be on its way to the store
            for rank, how in gone.items():
                if self._store.check([f"done/{rank}"]):
                    with self._lock:
                        self._neighbours.forget(rank)
                elif self._reported() is None:
                    self._store.compare_set(_ERROR, "", how)
            found = self._reported()
        return found

    def _reported(self) -> str | None:
        if not self._store.check([_ERROR]):
            return None
        text: bytes = self._store.get(_ERROR)
        return text.decode()

    def _gone(self) -> dict[int, str]:
        with self._lock:
            try:
                return self._neighbours.gone()
            except StoreError:  # the store is gone before all neighbours were known
                return {}

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                message = self._first()
            except StoreError:  # the process that hosts the store is gone
                cause = "; ".join(self._gone().values())
                message = cause or "the process that hosts the run's key-value store (global rank 0) is gone"
            if message is None:
                continue
            # a rank that is about to raise the same error by itself should do so
            if self._stop.wait(self._grace) or self._failed_here:
                return
            print(f"\nlightning_3d: ending rank {self._rank} ({self._describe}) because {message}", file=sys.stderr)
            sys.stderr.flush()
            sys.stdout.flush()
            time.sleep(0.1)
            os._exit(1)
