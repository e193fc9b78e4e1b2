"""WHAT is gathered together (stage 3), and in which order?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import nn

from lightning_3d.zero.storage import Storage


class Unit:
    """Parameters that are gathered together.

    Args:
        name: The module they belong to.
        index: Its place among all units.

    Attributes:
        storages: Their memory.
        waiting: Storages whose gradients are not on their way yet, in the backward under way.
        coming: Its gather has been started.
        saved: Autograd keeps a weight of it, or something that cannot be looked into, for the backward.
        calls: How often its forward ran in this pass.
        again: In the training pass before, it ran more than once on some replica: it stays until the backward ends.
        stays: Until then it is not released, in this pass.
    """

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.storages: list[Storage] = []
        self.waiting: set[Storage] = set()
        self.coming = self.saved = self.again = self.stays = False
        self.depth = self.calls = 0

    @property
    def is_whole(self) -> bool:
        return not self.coming and all(storage.is_whole for storage in self.storages)

    @property
    def is_done(self) -> bool:
        """The backward under way needs it no more."""
        return not (self.waiting or self.stays or self.depth)

    def start(self) -> None:
        if not self.coming:
            self.coming = True
            for storage in self.storages:
                storage.gather_start()

    def wait(self) -> None:
        self.coming = False
        for storage in self.storages:
            storage.gather_wait()


def find_units(module: nn.Module, blocks: Iterable[str], large: int) -> dict[str, list[str]]:
    """What is gathered together: name of a module -> names of its parameters.

    Args:
        module: The model.
        blocks: Names of its blocks.
        large: Bytes from which on a layer outside of blocks is a unit of its own.
    """
    found = {name: [f"{name}.{n}" for n, _ in module.get_submodule(name).named_parameters()] for name in blocks}
    inside = {id(m) for name in found for m in module.get_submodule(name).modules()}
    for name, child in module.named_modules():
        own = {f"{name}.{n}": p for n, p in child.named_parameters(recurse=False)}
        if name and id(child) not in inside and sum(p.nbytes for p in own.values()) >= large:
            found[name] = list(own)
    # what is used in more than one place belongs to none of them
    homes: dict[int, set[str]] = {}
    home_of = {n: unit for unit, own in found.items() for n in own}
    named = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        homes.setdefault(id(parameter), set()).add(home_of.get(name, ""))
    mine = {unit: [n for n in own if homes[id(named[n])] == {unit}] for unit, own in found.items()}
    return {name: mine[name] for name, _ in module.named_modules() if name in mine}  # as they will probably run


def merged(known: Sequence[int], orders: Iterable[Sequence[int]]) -> tuple[list[int], set[int]]:
    """One order of all units that agrees with every replica's, and else with the one that was known.

    Returns:
        The order, and the units for which replicas contradict each other; there the one that was known decides.
    """
    before: dict[int, set[int]] = {unit: set() for unit in known}
    for order in orders:
        for first, then in pairwise(order):
            before[then].add(first)
    out: list[int] = []
    contradicted: set[int] = set()
    left = list(known)
    while left:
        chosen = next((unit for unit in left if not before[unit] & set(left)), None)
        if chosen is None:
            contradicted |= set(left)
            chosen = left[0]
        left.remove(chosen)
        out.append(chosen)
    return out, contradicted
