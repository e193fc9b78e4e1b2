"""WHICH random numbers does a window draw?  A stream of its own, forked from the process's generators and put back.

The default generators therefore stay in step on all ranks, whatever a stage draws (samplers and loaders need that).
Every event that is known to draw is seeded by its own number, so its numbers do not depend on where the model is cut.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


def mix(*numbers: int) -> int:
    """One 63-bit seed out of several numbers (`hash` of a tuple of ints is the same in every process)."""
    return hash(numbers) & 0x7FFF_FFFF_FFFF_FFFF


@dataclass(frozen=True)
class Seeds:
    """What the random numbers of one microbatch depend on; equal on the tensor-parallel peers and on all stages."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    replica: int = 0

    def of_event(self, event: int) -> int:
        """Seed of an event that draws."""
        return mix(self.seed, self.step, self.microbatch, self.replica, event)

    def of_window(self, window: int) -> int:
        """Seed of what a window draws elsewhere."""
        return mix(self.seed, self.step, self.microbatch, self.replica, -1 - window)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of `device`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        _cuda_generator(device).manual_seed(seed)


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Put the generators of torch (CPU and `device`), `random` and numpy back at the end."""
    cpu, python, array = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    cuda = _cuda_generator(device).get_state() if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        random.setstate(python)
        np.random.set_state(array)
        if cuda is not None:
            _cuda_generator(device).set_state(cuda)


@contextmanager
def window_randomness(seeds: Seeds, window: int, device: torch.device) -> Iterator[None]:
    """Fork all generators and seed them for one window.

    `random` and numpy are seeded per microbatch, not per window: glue code runs on all stages and must draw the same.
    """
    with forked(device):
        seed_window(seeds, window, device)
        yield


def seed_window(seeds: Seeds, window: int, device: torch.device) -> None:
    """Seed all generators for one window."""
    seed_torch(seeds.of_window(window), device)
    shared = seeds.of_event(-1)
    random.seed(shared)
    np.random.seed(shared & 0xFFFF_FFFF)


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
