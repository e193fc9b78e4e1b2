"""WHOSE process is gone?  Descriptors of the processes of this machine, which cannot be wrong.

A process that is killed, or leaves by `os._exit`, tells nobody. A heartbeat would notice, but also when a rank is only
busy; the kernel knows. Ranks on other machines are watched by their neighbours there. Where the system has no process
descriptors (only Linux has) nobody is watched.
"""

from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path
from typing import Any

_UNKNOWN_END = "its process ended without an error of its own (killed, out of memory, or os._exit)"


class Neighbours:
    """The other ranks of this machine.

    Args:
        store: A part of the run's key-value store.
        rank: This rank.
        describe: Where this rank stands.
        world_size: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, describe: str, world_size: int) -> None:
        self._store = store
        self._poll = select.poll() if hasattr(os, "pidfd_open") else None
        self._ranks: dict[int, int] = {}  # descriptor -> rank
        self._missed: set[int] = set()
        self._places: dict[int, str] = {}
        self._unknown = set(range(world_size)) - {rank} if self._poll is not None else set()
        self._here = _machine()
        store.set(f"process/{rank}", json.dumps([self._here, os.getpid(), describe]))

    def gone(self) -> dict[int, str]:
        """Rank -> what is known of its end, of those that have ended."""
        if self._poll is None:
            return {}
        self._meet()
        ends = {self._ranks[fd]: _end_of(fd) for fd, _ in self._poll.poll(0)}
        ends.update(dict.fromkeys(self._missed, _UNKNOWN_END))
        return {rank: f"rank {rank} ({self._places[rank]}) is gone: {end}" for rank, end in sorted(ends.items())}

    def forget(self, rank: int) -> None:
        """This one may end."""
        assert self._poll is not None
        self._missed.discard(rank)
        for fd in [fd for fd, other in self._ranks.items() if other == rank]:
            self._poll.unregister(fd)
            os.close(fd)
            del self._ranks[fd]

    def close(self) -> None:
        for rank in list(self._ranks.values()):
            self.forget(rank)
        self._unknown.clear()
        self._missed.clear()

    def _meet(self) -> None:
        """Open the descriptors of those who have said who they are."""
        assert self._poll is not None
        for rank in sorted(self._unknown):
            key = f"process/{rank}"
            if not self._store.check([key]):
                continue
            self._unknown.discard(rank)
            machine, pid, self._places[rank] = json.loads(self._store.get(key).decode())
            if machine is None or machine != self._here:
                continue
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:  # gone before we looked
                self._missed.add(rank)
                continue
            except OSError:  # not allowed here
                continue
            self._ranks[fd] = rank
            self._poll.register(fd, select.POLLIN)


def _machine() -> str | None:
    """Equal for processes that see each other's process numbers; None: not known, so nobody is watched."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _end_of(fd: int) -> str:
    """How a process ended; only its parent is told (with Lightning's own launcher that is rank 0)."""
    try:
        status = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        status = None
    if status is None:
        return _UNKNOWN_END
    if status.si_code == os.CLD_EXITED:
        return f"its process ended with exit code {status.si_status} and without an error of its own (os._exit)"
    name = signal.Signals(status.si_status).name
    hint = "; on a full machine the system kills the largest process" if status.si_status == signal.SIGKILL else ""
    return f"its process was killed by {name}{hint}"
