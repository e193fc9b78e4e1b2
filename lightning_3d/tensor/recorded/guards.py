"""IS the block what it was when it was recorded?  One comparison of everything its Python code may look at.

What that is, `readable.Readable` says. Compared at every call, by identity (a number also by type and value), so what
did not change costs a few nanoseconds each. What has become too much for that is not recorded.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import types
import weakref
from collections.abc import Iterator
from itertools import chain, compress, starmap
from operator import attrgetter, getitem, is_not, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_room

from lightning_3d.probe.reach import NUMBERS
from lightning_3d.tensor.recorded.readable import EXCHANGED, Readable
from lightning_3d.tensor.recorded.tape import Refused, Slot

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST_VALUES = 4000
_GLOBAL_HOOKS = [
    value for name, value in vars(module_room).items() if name.startswith("_global_") and name.endswith("_hooks")
]
_flags = attrgetter("requires_grad", "dtype")
_content = attrgetter("cell_contents")
_made_of = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_meant = weakref.ref.__call__
_bytes = methodcaller("tobytes")
_MISSING = object()


class Guards:
    """A snapshot of a block and of all its code may look at, and whether it still holds.

    It is taken before a call, and grows while the call runs (`enter`): what a function can look at is noted before the
    function can change it.

    Args:
        block: The block.
        forward: The forward that runs, if it is not the class's.

    Raises:
        Refused: Something cannot be compared.
    """

    def __init__(self, block: nn.Module, forward: Any = None) -> None:
        modules = list(block.modules())
        self._own = block.__dict__
        self._hooks = [h for m in modules[1:] for h in (m.__dict__[k] for k in _HOOKS)] + _GLOBAL_HOOKS
        self.hooked = any(self._hooks)
        self._tensors = [t for m in modules for d in (m._parameters, m._buffers) for t in d.values() if t is not None]
        self._readable = Readable(block, forward)
        self._ran: set[types.CodeType] = set()
        self._functions: list[types.FunctionType] = []
        self._cells: list[Any] = []
        self._note()

    def enter(self, code: types.CodeType, space: dict[str, Any]) -> None:
        """A function of the call is about to run for the first time.

        Raises:
            Refused: It can look at something that cannot be compared, or something has changed meanwhile.
        """
        if not self.hold():
            raise Refused("it writes attributes of its modules, or containers they hold, or globals")
        self._readable.enter(code, space)
        self._ran.add(code)
        self._functions = [f for f in self._readable.functions if f.__code__ in self._ran]
        self._cells = [c for f in self._functions for c in f.__closure__ or () if _has_content(c)]
        self._note()

    def check(self) -> None:
        """At the end of the call.

        Raises:
            Refused: Something has changed, or it is too much to compare at every call.
        """
        if not self.hold():
            raise Refused("it writes attributes of its modules, or containers they hold, or globals")
        if len(self._before) > _MOST_VALUES:
            raise Refused(f"its code can look at {len(self._before)} values, too many to compare at every call")
        known = {f.__code__ for f in self._functions} | self._readable.codes_inside(iter(self._ran))
        unknown = next((c for c in self._ran if c.co_freevars and c not in known), None)
        if unknown is not None:
            raise Refused(f"it runs {unknown.co_name}, of which nobody knows what it sees of the functions around it")

    def _state(self) -> tuple[tuple[Any, ...], list[Any]]:
        """(What must be the same objects, what must be equal)."""
        own = self._own
        equal = [*chain.from_iterable(starmap(map, self._equals)), len(own) - sum(map(own.__contains__, EXCHANGED))]
        places = (*self._readable.views, *starmap(map, self._reads), *map(_made_of, self._functions))
        return tuple(chain.from_iterable(places)), equal

    def _note(self) -> None:
        found = self._readable
        reads: tuple[tuple[Any, ...], ...] = (
            (getitem, found.spaces, found.names),
            (getattr, found.owners, found.slots, [_MISSING] * len(found.slots)),
            (type, found.instances),
            (_meant, found.references),
            (_content, self._cells),
        )
        equals = ((len, found.sized), (_flags, self._tensors), (_bytes, found.arrays))
        self._reads, self._equals = [r for r in reads if r[1]], [e for e in equals if e[1]]
        self._before, self._equal = self._state()
        self._addresses = addresses(self._before)

    def hold(self) -> bool:
        """Nothing has changed, and no submodule has hooks."""
        if any(self._hooks):
            return False
        try:
            now, equal = self._state()
        except (KeyError, ValueError):  # an item, or what a cell held, is not there any more
            return False
        if equal != self._equal:
            return False
        if addresses(now) == self._addresses:
            return True
        if len(now) != len(self._before):
            return False
        others = compress(zip(now, self._before, strict=True), map(is_not, now, self._before))
        return all(starmap(_same, others))


def _as_they_lie(values: tuple[Any, ...]) -> Any:
    return ctypes.string_at(id(values) + tuple.__basicsize__, struct.calcsize("P") * len(values))


def _one_by_one(values: tuple[Any, ...]) -> Any:
    return list(map(id, values))


def _tuples_lie_as_expected() -> bool:
    probe = (object(), "a", 1)
    return sys.implementation.name == "cpython" and _as_they_lie(probe) == struct.pack("3P", *map(id, probe))


addresses = _as_they_lie if _tuples_lie_as_expected() else _one_by_one
"""Which objects are in a tuple: forty times faster at once, from its memory, than one by one."""


def _same(now: Any, before: Any) -> bool:
    """The same object, or the same number or text."""
    if now is before:
        return True
    kind = type(now)
    if kind is tuple:
        return type(before) is tuple and len(now) == len(before) and all(map(_same, now, before))
    return kind is type(before) and kind in NUMBERS and bool(now == before) and repr(now) == repr(before)


def _has_content(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def slots_of(block: nn.Module) -> list[Slot]:
    """Where the block's parameters, buffers and tensor attributes are."""
    found = []
    for module in block.modules():
        places: Iterator[dict[str, Any]] = iter((module._parameters, module._buffers, module.__dict__))
        for where in places:
            found += [Slot(where, key) for key, value in where.items() if isinstance(value, Tensor)]
    return found


def device_of(block: nn.Module) -> torch.device:
    """Where the block computes."""
    tensor = next(chain(block.parameters(), block.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device
