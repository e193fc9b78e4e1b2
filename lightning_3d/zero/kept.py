"""WHAT does autograd keep of a unit's weights (stage 3)?  Where they are: their memory may be gone by the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
        module: Its module.
        need: Gathers a unit when the backward wants a weight back.
    """

    def __init__(self, unit: Unit, module: nn.Module, need: Callable[[Unit], None]) -> None:
        self._unit, self._module, self._need = unit, module, need
        self._around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._saw_any = False

    def pack(self, tensor: Tensor) -> Any:
        self._saw_any = True
        for storage in self._unit.storages:
            alias = torch._C._is_alias_of(tensor, storage.flat)  # type: ignore[attr-defined]
            if alias and tensor.dtype == storage.dtype:
                self._unit.saved = True
                offset = int(tensor.storage_offset())
                return _Place(self._unit, storage.flat, tensor.size(), tensor.stride(), offset)
        return tensor if self._around is None else self._around[0](tensor)

    def may_be_elsewhere(self, out: Any) -> bool:
        """Whether the backward may need weights that other hooks inside of the call have (a checkpoint's).

        A layer without parts has no such hooks inside, if anything was kept here.
        """
        simple = self._saw_any and not any(True for _ in self._module.children())
        return not simple and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(out))

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _Place):
            self._need(kept.unit)
            return kept.flat.as_strided(kept.size, kept.stride, kept.offset)
        unpacked: Tensor = kept if self._around is None else self._around[1](kept)
        return unpacked
