"""IN which order is a memory made that depends on others?  Every one of them once, and no longer than it is needed."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from lightning_3d.deferred.cell import WITHOUT_VALUES, Call, Cell

_Key = tuple[Cell, int]


class Making:
    """The values of a cell.

    Without it `x = x * x`, twenty times, would be made a million times.

    Args:
        cell: The cell.
        version: How many writes into it count.

    Attributes:
        memory: Its values, in memory of their own.
    """

    def __init__(self, cell: Cell, version: int) -> None:
        self._wanted: Counter[_Key] = Counter()
        self._made: dict[_Key, Tensor] = {}
        self._count((cell, version))
        with torch.no_grad(), _disable_current_modes():  # what is made while a model is built is real
            self.memory = self._make(cell, version)

    def _count(self, root: _Key) -> None:
        """How often every memory is read."""
        left = [root]
        while left:
            cell, version = left.pop()
            origin, writes = cell.calls(version)
            for call in [*([origin] if origin is not None else []), *writes]:
                for window in call.operands():
                    if window.cell is cell and window.version is None:
                        continue
                    key = (window.cell, _version(window.cell, window.version))
                    if key not in self._wanted:
                        left.append(key)
                    self._wanted[key] += 1

    def _of(self, cell: Cell, version: int | None) -> Tensor:
        key = (cell, _version(cell, version))
        memory = self._made.pop(key) if key in self._made else self._make(*key)
        self._wanted[key] -= 1
        if self._wanted[key] > 0:
            self._made[key] = memory
        return memory

    def _make(self, cell: Cell, version: int) -> Tensor:
        origin, writes = cell.calls(version)
        if origin is None:
            form = cell.like
            memory = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=cell.device)
        else:
            memory = self._begin(origin)
        for call in writes:
            call.run(self._of, cell, memory)
        return memory

    def _begin(self, origin: Call) -> Tensor:
        read: list[Tensor] = [kept.tensor for kept in origin.kept()]

        def of(cell: Cell, version: int | None) -> Tensor:
            read.append(self._of(cell, version))
            return read[-1]

        out = origin.run(of)
        memory: Tensor = out if origin.part is None else out[origin.part]
        if isinstance(origin.func, OpOverload) and origin.name() in WITHOUT_VALUES:
            return memory.zero_()  # what is left there differs from rank to rank
        # some operations give an operand back, or a view of it, and do not say so
        return memory.clone() if any(_share(memory, x) for x in read) else memory


def _version(cell: Cell, version: int | None) -> int:
    return len(cell.writes) if version is None else version


def _share(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
