"""WHAT does autograd keep of a unit's weights (stage 3)?  Where they are: their memory may be gone by the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_3d.zero.unit import Unit


class _Place(NamedTuple):
    """A view of a unit's parameters."""

    unit: Unit
    flat: Tensor
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class Kept:
    """What autograd keeps of one call of a unit; other hooks around it (an activation checkpoint's) get the rest.

    Args:
        unit: The unit that is called.
        need: Gathers a unit when the backward wants a weight back.

    Attributes:
        saw_any: Something was kept; otherwise other hooks inside of the call (a checkpoint) have it.
    """

    def __init__(self, unit: Unit, need: Callable[[Unit], None]) -> None:
        self._unit, self._need = unit, need
        self._around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.saw_any = False

    def pack(self, tensor: Tensor) -> Any:
        self.saw_any = True
        for storage in self._unit.storages:
            alias = torch._C._is_alias_of(tensor, storage.flat)  # type: ignore[attr-defined]
            if alias and tensor.dtype == storage.dtype:
                self._unit.saved = True
                offset = int(tensor.storage_offset())
                return _Place(self._unit, storage.flat, tensor.size(), tensor.stride(), offset)
        return tensor if self._around is None else self._around[0](tensor)

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _Place):
            self._need(kept.unit)
            return kept.flat.as_strided(kept.size, kept.stride, kept.offset)
        unpacked: Tensor = kept if self._around is None else self._around[1](kept)
        return unpacked
