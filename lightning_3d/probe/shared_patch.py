"""WHO may patch something process-wide?  All who need it, together: the first puts it there, the last removes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Open while the context is."""
        self.acquire()
        try:
            yield
        finally:
            self.release()
