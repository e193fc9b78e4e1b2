"""WHEN does the device get there?  Events in its stream, since the host only queues work and runs ahead.

Only recorded steps wait for the device: at their beginning (`DeviceClock.begin`), and if their marks are read before it
has passed them (`DeviceClock.seconds`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_MARKS_KEPT = 4096


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _untimed_event() -> Any:
    return torch.cuda.Event()


class DeviceProgress:
    """Which of the marks in the stream the device has passed; looked at from another thread.

    Args:
        make: Makes an event with `record()` and `query()`.

    Attributes:
        passed: Number of marks the device has passed.
    """

    def __init__(self, make: Callable[[], Any] = _untimed_event) -> None:
        self._make = make
        self._ahead: deque[tuple[Any, Any]] = deque()
        self._now: Any = None
        self.passed = 0

    def mark(self, label: Any) -> None:
        """From here on in the stream the device does `label`."""
        event = self._make()
        event.record()
        self._ahead.append((event, label))
        if len(self._ahead) > _MARKS_KEPT:  # nobody looks; a device is never so far behind
            self._ahead.popleft()

    def stands_at(self) -> tuple[Any, bool]:
        """(label of the last mark passed, whether there are marks it has not passed)."""
        while True:
            try:
                event, label = self._ahead[0]
                if not event.query():
                    return self._now, True
                self._ahead.popleft()
            except IndexError:
                return self._now, False
            self._now = label
            self.passed += 1


class DeviceClock:
    """Times of events in the device's stream, on the host's monotonic clock.

    The zero is set once per recorded step: the two clocks drift apart, and an event's distance is a float32.

    Args:
        make: Makes an event with `record()`, `synchronize()` and `elapsed_time(other)` in milliseconds.
    """

    def __init__(self, make: Callable[[], Any] = _event) -> None:
        self._make = make
        self._zero: Any = None
        self._host = 0.0

    def begin(self) -> None:
        """Wait for the device, and set the zero."""
        self._zero = self.mark()
        self._zero.synchronize()
        self._host = time.monotonic()

    def mark(self) -> Any:
        """An event at the end of what is queued now."""
        event = self._make()
        event.record()
        return event

    def zero(self) -> tuple[Any, float]:
        """What `seconds` needs to read the marks of this step later."""
        return self._zero, self._host

    @staticmethod
    def seconds(mark: Any, zero: tuple[Any, float]) -> float:
        """When the device passed a mark, as `time.monotonic()`; waits until it has."""
        mark.synchronize()
        return zero[1] + zero[0].elapsed_time(mark) / 1000
