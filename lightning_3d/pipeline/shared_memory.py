"""WHICH plain tensors share memory?  A value of the model that is put into one of them in place is in the others, too.

Plain tensors (of the batch, of glue code, buffers) are on every stage, values of the model on one. The tensor such a
value is put into becomes a value itself. Another tensor with the same elements does not: on the stage that runs the
change it has the new ones, on the others those of before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.phantom import Phantom

_BASIC = (int, slice, type(None), type(Ellipsis))
"""Indices that make a view."""


class SharedMemory:
    """The plain tensors of one step that values of the model were put into, and the tensors that modules keep.

    Args:
        kept: Buffers and tensors in attributes, by name.
    """

    def __init__(self, kept: Mapping[str, Tensor]) -> None:
        self._names = {id(x): name for name, x in kept.items()}
        self._kept: dict[Any, list[tuple[str, Tensor]]] = {}
        for name, x in ((name, x) for name, x in kept.items() if _is_plain(x)):
            self._kept.setdefault(_storage(x), []).append((name, x))
        self._changed: list[tuple[Tensor, Any, str]] = []  # (what it was, the tensor as user code has it, the event)

    def names(self, x: Any) -> list[str]:
        """Kept tensors that this one is, or is a part of."""
        if id(x) in self._names:
            return [self._names[id(x)]]
        if not _is_plain(x):
            return []
        return [name for name, whole in self._kept.get(_storage(x), ()) if overlap(x, whole)]

    def changed(self, x: Any, event: str) -> None:
        """A value of the model is about to be put into this tensor."""
        if _is_plain(x):
            self._changed.append((x.detach(), x, event))

    def put(self, whole: Any, index: Any, value: Any) -> None:
        """`whole[index] = value` is about to happen: `x[i] *= y` ends with putting the part where it came from."""
        parts = index if isinstance(index, tuple) else (index,)
        if self._changed and _is_plain(whole) and all(isinstance(i, _BASIC) for i in parts):
            here = whole[index]
            self._changed = [c for c in self._changed if c[1] is not value or not _same_place(here, c[0])]

    def check(self, event: str, leaves: list[Any], out: Any = None) -> None:
        """Raise if an event uses a plain tensor with elements of one that was changed.

        Args:
            event: Its name.
            leaves: What it is given.
            out: Its result if it has run: taking a part of a tensor is no use of it.

        Raises:
            PipelineError: Names both events.
        """
        if not self._changed:
            return
        for x in leaves:
            part = _is_plain(x) and _is_plain(out) and out is not x and _storage(out) == _storage(x)
            for before, _, changed_by in self._changed if _is_plain(x) and not part else ():
                if overlap(x, before):
                    raise PipelineError(
                        f"{event} uses a tensor that has elements in common with one which {changed_by} changed in "
                        "place before, with a value of the model. Only the stage that has this value can do so; the "
                        "others go on with what was there. Change the tensor itself, not a part of it that was taken "
                        "before (t[:, 2:4] = y, or t[:, 2:4] *= y, but not t[:, 2:4].mul_(y) or t.data.mul_(y)), or "
                        "make a new one."
                    )


def _same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    return _storage(a) == _storage(b) and all(
        f(a) == f(b) for f in (Tensor.size, Tensor.stride, Tensor.storage_offset, Tensor.element_size)
    )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have elements in common."""
    a, b = sharding.local(a), sharding.local(b)
    if _storage(a) != _storage(b) or not a.numel() or not b.numel():
        return False
    (first, after), (other_first, other_after) = _range(a), _range(b)
    if after <= other_first or other_after <= first:
        return False
    in_a, in_b = first <= other_first and other_after <= after, other_first <= first and after <= other_after
    if a.dtype != b.dtype or (in_a and a.is_contiguous()) or (in_b and b.is_contiguous()):
        return True  # usually: one is a part of the other, which has no gaps
    low, high = min(first, other_first), max(after, other_after)
    numbers = torch.arange((high - low) // a.element_size())
    here, there = (
        numbers.as_strided(x.size(), x.stride(), x.storage_offset() - low // x.element_size()).flatten() for x in (a, b)
    )
    taken = torch.zeros(len(numbers), dtype=torch.bool)
    taken[here] = True
    return bool(taken[there].any())


def _range(x: Tensor) -> tuple[int, int]:
    """First byte of its elements in the storage, and the one after the last."""
    first = int(x.storage_offset()) * x.element_size()
    steps = sum(int((size - 1) * stride) for size, stride in zip(x.size(), x.stride(), strict=True))
    return first, first + (steps + 1) * x.element_size()


def _is_plain(x: Any) -> bool:
    piece = sharding.local(x)
    if not isinstance(piece, Tensor) or isinstance(piece, (Phantom, FakeTensor)):
        return False
    return piece.layout == torch.strided and piece.device.type != "meta"


def _storage(x: Tensor) -> Any:
    return sharding.local(x).untyped_storage()._cdata
