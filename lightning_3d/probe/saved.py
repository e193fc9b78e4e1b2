"""HOW is one piece of Python state taken down and put back?  One class per kind: containers, cells, classes, arrays.

`take()` gives what `put()` needs; `same()` says whether the state still is what it was then. Contents are compared by
identity: whatever is in them is a piece of state of its own.
"""

from __future__ import annotations

import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_3d.probe.reach import contents_of, held_slots, is_array, items_of


class Saved(Protocol):
    """A piece of state."""

    def take(self) -> Any: ...
    def put(self, before: Any) -> None: ...
    def same(self, before: Any) -> bool: ...


def all_identical(now: list[Any], before: list[Any]) -> bool:
    """The identical objects in the same order."""
    return len(now) == len(before) and all(x is y for x, y in zip(now, before, strict=True))


@dataclass(frozen=True)
class Generator:
    """A source of random numbers of torch, Python or numpy."""

    source: Any

    def take(self) -> Any:
        source = self.source
        if isinstance(source, random.SystemRandom):
            return None
        if isinstance(source, random.Random):
            return source.getstate()
        if isinstance(source, torch.Generator):
            return source.get_state()
        # numpy: the old interface has methods, the bits of a new one a property
        return source.get_state(legacy=False) if hasattr(source, "get_state") else _bits(source).state

    def put(self, before: Any) -> None:
        source = self.source
        if isinstance(source, random.SystemRandom):
            return
        if isinstance(source, random.Random):
            source.setstate(before)
        elif isinstance(source, torch.Generator) or hasattr(source, "set_state"):
            source.set_state(before)
        else:
            _bits(source).state = before

    def seed(self, seed: int) -> None:
        """Begin another stream."""
        source = self.source
        if isinstance(source, torch.Generator):
            source.manual_seed(seed)
        elif isinstance(source, random.Random):
            source.seed(seed)
        elif hasattr(source, "set_state"):
            source.seed(seed & 0xFFFF_FFFF)
        else:
            bits = _bits(source)
            bits.state = type(bits)(seed).state

    def same(self, before: Any) -> bool:
        return isinstance(self.source, random.SystemRandom)  # else: to compare costs as much as to put back


def _bits(source: Any) -> Any:
    return getattr(source, "bit_generator", source)


def global_generators() -> list[Generator]:
    """torch's on all devices in use, Python's, numpy's."""
    found = [Generator(torch.default_generator), Generator(random._inst)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += [Generator(g) for g in torch.cuda.default_generators]
    numpy = sys.modules.get("numpy")
    return found if numpy is None else [*found, Generator(numpy.random.mtrand._rand)]


@dataclass(frozen=True)
class Elements:
    """Of a list, set or deque."""

    container: Any

    def take(self) -> Any:
        return contents_of(self.container)

    def put(self, before: Any) -> None:
        if not self.same(before):
            self.container.clear()
            (self.container.update if isinstance(self.container, set) else self.container.extend)(before)

    def same(self, before: Any) -> bool:
        return all_identical(contents_of(self.container), before)


@dataclass(frozen=True)
class Items:
    """Of a dictionary, in order, past whatever a subclass makes of it."""

    dictionary: Any

    def take(self) -> Any:
        return items_of(self.dictionary)

    def put(self, before: Any) -> None:
        if not self.same(before):
            base: Any = OrderedDict if isinstance(self.dictionary, OrderedDict) else dict
            base.clear(self.dictionary)
            for key, item in before:
                base.__setitem__(self.dictionary, key, item)

    def same(self, before: Any) -> bool:
        now = items_of(self.dictionary)
        return len(now) == len(before) and all(a is b and x is y for (a, x), (b, y) in zip(now, before, strict=True))

    def changed(self, before: Any) -> list[Names]:
        """Every key that has another value."""
        now, then, missing = dict(items_of(self.dictionary)), dict(before), object()
        keys = [key for key in {**then, **now} if now.get(key, missing) is not then.get(key, missing)]
        return [Names(self.dictionary, (key,)) for key in keys]


@dataclass(frozen=True)
class Names:
    """Some keys of a dictionary, or names of a namespace."""

    space: dict[Any, Any]
    names: tuple[Any, ...]

    def take(self) -> Any:
        return {n: self.space[n] for n in self.names if n in self.space}

    def put(self, before: Any) -> None:
        for name in self.names:
            if name not in before:
                self.space.pop(name, None)
            elif self.space.get(name) is not before[name]:
                self.space[name] = before[name]

    def same(self, before: Any) -> bool:
        return _same_values(self.take(), before)


@dataclass(frozen=True)
class Slots:
    """Of an object."""

    value: Any

    def take(self) -> Any:
        return held_slots(self.value)

    def put(self, before: Any) -> None:
        now = held_slots(self.value)
        for name in before.keys() | now.keys():
            if name not in before:
                object.__delattr__(self.value, name)
            elif now.get(name) is not before[name]:
                object.__setattr__(self.value, name, before[name])

    def same(self, before: Any) -> bool:
        return _same_values(held_slots(self.value), before)


@dataclass(frozen=True)
class ClassAttributes:
    """Of a class, without those of the language."""

    kind: type

    def take(self) -> Any:
        return {n: v for n, v in vars(self.kind).items() if not (n.startswith("__") and n.endswith("__"))}

    def put(self, before: Any) -> None:
        now = self.take()
        for name in before.keys() | now.keys():
            if name not in before:
                type.__delattr__(self.kind, name)
            elif name not in now or now[name] is not before[name]:
                type.__setattr__(self.kind, name, before[name])

    def same(self, before: Any) -> bool:
        return _same_values(self.take(), before)


def _same_values(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[name] is before[name] for name in before)


@dataclass(frozen=True)
class Cell:
    """What a function changes of the function around it."""

    cell: types.CellType

    def take(self) -> Any:
        return self.cell.cell_contents

    def put(self, before: Any) -> None:
        self.cell.cell_contents = before

    def same(self, before: Any) -> bool:
        return self.cell.cell_contents is before


@dataclass(frozen=True)
class Array:
    """The numbers in a numpy array."""

    array: Any

    def take(self) -> Any:
        return self.array.copy()

    def put(self, before: Any) -> None:
        self.array[...] = before

    def same(self, before: Any) -> bool:
        return bool((self.array == before).all())


@dataclass(frozen=True)
class SmallTensor:
    """The numbers in a tensor."""

    tensor: Tensor

    def take(self) -> Any:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return self.tensor._version, self.tensor.clone()

    def put(self, before: Any) -> None:
        if not self.same(before):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self.tensor.copy_(before[1])

    def same(self, before: Any) -> bool:
        return bool(self.tensor._version == before[0])


@dataclass(frozen=True)
class Held:
    """What is held under a key, whichever object that is by now, and the contents of a container or tensor."""

    space: dict[str, Any]
    key: str

    def take(self) -> Any:
        if self.key not in self.space:
            return _MISSING
        value = self.space[self.key]
        inside = inside_of(value)
        return value, None if inside is None else inside.take()

    def put(self, before: Any) -> None:
        if before is _MISSING:
            self.space.pop(self.key, None)
            return
        value, contents = before
        if self.space.get(self.key, _MISSING) is not value:
            self.space[self.key] = value
        inside = inside_of(value)
        if inside is not None:
            inside.put(contents)

    def same(self, before: Any) -> bool:
        if before is _MISSING or self.key not in self.space:
            return before is _MISSING and self.key not in self.space
        value, contents = before
        inside = inside_of(value)
        return self.space[self.key] is value and (inside is None or inside.same(contents))


_MISSING = object()


def inside_of(value: Any) -> Saved | None:
    """The contents of a container, a plain tensor or an array."""
    if isinstance(value, dict):
        return Items(value)
    if isinstance(value, (list, set, deque)):
        return Elements(value)
    if type(value) is Tensor and not value.is_meta:
        return SmallTensor(value)
    return Array(value) if is_array(value) and not value.dtype.hasobject else None


def meaning(piece: Saved) -> Hashable:
    """Equal for pieces that are the same state."""
    return type(piece), *(x if isinstance(x, (str, tuple)) else id(x) for x in vars(piece).values())
