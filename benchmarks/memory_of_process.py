"""HOW MUCH memory has this process?  As the system counts it."""

from __future__ import annotations

import ctypes
from pathlib import Path


def return_memory_at_once() -> None:
    """Tensors get pages of their own, which the system has back when they are freed: no fragments count."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 16)


def trim() -> None:
    """Give what was freed back to the system, so that it does not count."""
    ctypes.CDLL(None).malloc_trim(0)


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes: "VmRSS" (resident now), "VmHWM" (the most so far)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """ "VmHWM" begins anew."""
    Path("/proc/self/clear_refs").write_text("5")
