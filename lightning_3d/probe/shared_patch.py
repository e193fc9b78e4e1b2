"""WHO may patch something process-wide?  All who need it, together: the first puts it there, the last removes it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SharedPatch:
    """Something process-wide that is in place while anybody has it open (simulated ranks are threads).

    Args:
        put: Puts it in place.
        remove: Puts back what was there.
    """

    def __init__(self, put: Callable[[], None], remove: Callable[[], None]) -> None:
        self._put, self._remove = put, remove
        self._lock, self._open = threading.Lock(), 0

    def acquire(self) -> None:
        """Open it once more."""
        with self._lock:
            if not self._open:
                self._put()
            self._open += 1

    def release(self) -> None:
        """Close it once."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self._remove()

    def __call__(self) -> SharedPatch:
        """A context in which it is open."""
        return self

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
