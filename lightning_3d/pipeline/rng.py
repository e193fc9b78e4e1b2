"""WHICH random numbers does a window draw?  A stream of its own, forked from the process's generators and put back.

The default generators therefore stay in step on all ranks, whatever a stage draws (samplers and loaders need that).
Every event that is known to draw is seeded by its own number, so its numbers do not depend on where the model is cut.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_3d.probe import saved


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


class Randomness:
    """The generators a step may draw from: the global ones of torch, Python and numpy, and the module's own.

    Every stage must draw the same from an own generator, though stages run other parts of the step in another order.
    In the first microbatch its numbers are those it gives in one process; in the others, and where atoms draw from own
    generators, it gets seeds of windows and events like the global ones. One that the step seeds itself is left alone.

    Args:
        device: Whose default generator is meant, beside the CPU's.
        own: Generators that are held by the module or by its code (`probe.own_generators`).

    Attributes:
        own: The same, as state that stages have in common after a batch.
        in_atoms: Atoms draw from own generators, so windows that do not run them would go on with other numbers.
    """

    def __init__(self, device: torch.device, own: Sequence[Any] = ()) -> None:
        self.device = device
        self.own = [saved.Generator(source) for source in own]
        self.in_atoms = False
        self._begin: list[Any] = []
        self._end: list[Any] | None = None
        self._first = [g.initial_seed() if isinstance(g, torch.Generator) else 0 for g in own]
        self._given: dict[int, int] = {}

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Put the global ones back at the end; own ones too, or to where `keep` was called."""
        self._begin, self._end = [g.take() for g in self.own], None
        try:
            with forked(self.device):
                yield
        finally:
            self._put_own(self._begin if self._end is None else self._end)

    def _put_own(self, states: list[Any]) -> None:
        for generator, state in zip(self.own, states, strict=True):
            generator.put(state)

    def keep(self) -> None:
        """The first microbatch has come to its end: own generators go on from here after the batch."""
        self._end = [g.take() for g in self.own]

    @contextmanager
    def atom(self, execution: Any) -> Iterator[None]:
        """Around an atom that is tried: does it draw from own generators?"""
        before = self.python_states()[2:]
        yield
        self.in_atoms |= execution.own_generator or self.python_states()[2:] != before

    def python_states(self) -> list[bytes]:
        """Of the generators that are not torch's, own ones last: others later, if something was drawn."""
        sources = [random._inst, np.random.mtrand._rand, *(g.source for g in self.own)]
        return [pickle.dumps(saved.Generator(x).take()) for x in sources if not isinstance(x, torch.Generator)]

    @contextmanager
    def window(self, seeds: Seeds, window: int) -> Iterator[None]:
        """Fork all generators and seed them for one window."""
        with self.forked():
            self.seed_window(seeds, window)
            yield

    def seed_window(self, seeds: Seeds, window: int) -> None:
        """Seed all generators for one window.

        Python's and numpy's are seeded per microbatch, not per window: glue code runs on all stages and must draw the
        same.
        """
        seed_torch(seeds.of_window(window), self.device)
        shared = seeds.of_event(-1)
        random.seed(shared)
        np.random.seed(shared & 0xFFFF_FFFF)
        self._given.clear()
        if seeds.microbatch == 0 and not self.in_atoms:
            self._put_own(self._begin)
            return
        for number, (generator, first) in enumerate(zip(self.own, self._first, strict=True)):
            self._given[number] = mix(shared, number, first)
            generator.seed(self._given[number])

    def seed_event(self, seeds: Seeds, event: int) -> None:
        """Seed torch's generators for an event that draws."""
        seed_torch(seeds.of_event(event), self.device)
        for number, generator in enumerate(self.own):
            source = generator.source
            if isinstance(source, torch.Generator) and source.initial_seed() == self._given.get(number):
                self._given[number] = mix(seeds.of_event(event), number, self._first[number])
                source.manual_seed(self._given[number])


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
