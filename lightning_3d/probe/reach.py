"""WHAT can Python code read?  The parts of an object, and what the code of a function names.

One walk for all who need it: what an experiment must put back (`python_state.py`), what the key of a remembered proof
must hold (`proof_memory.py`), and what a recorded program depends on (`tensor/recorded/guards.py`).
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import pathlib
import random
import re
import struct
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

NUMBERS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
ATOMS: tuple[type, ...] = (
    *NUMBERS,
    *(range, slice, type(Ellipsis), type(NotImplemented), re.Pattern, pathlib.PurePath, enum.Enum),
    *(torch.layout, torch.memory_format, types.CodeType, types.GenericAlias, type(int | str)),
)
"""Values that nobody changes, and that say all there is to say by being equal."""

CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.MappingProxyType)
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
LIBRARIES = frozenset(
    (*sys.stdlib_module_names, "torch", "numpy", "lightning", "pytorch_lightning", "lightning_3d", "torchmetrics")
)
"""Packages whose own code and objects hold nothing of the user's."""
_OPEN = ("types", "argparse", "collections", "functools", "dataclasses")  # whose objects hold what the user puts there
_POINTER = struct.calcsize("P")
_STANDARD = frozenset(nn.Module().__dict__)
_WRAPPERS = (staticmethod, classmethod)


def home(value: Any) -> str:
    """The package a class or function was written in."""
    space = getattr(value, "__globals__", None)
    name = space.get("__name__") if isinstance(space, dict) else getattr(value, "__module__", None)
    return str(name or "builtins").partition(".")[0]


def is_library(value: Any) -> bool:
    """A class or function of a library."""
    return home(value) in LIBRARIES


@functools.cache
def is_installed(package: str) -> bool:
    """A package that lies where installers put packages, so it is not the code somebody works on."""
    if package in LIBRARIES:
        return True
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return any(part in ("site-packages", "dist-packages") for p in places for part in pathlib.PurePath(p).parts)


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals and attributes in a code and in the functions written inside of it."""
    inner = (names_of(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *inner)))


def globals_of(
    code: types.CodeType, space: dict[str, Any], through_libraries: bool = False
) -> list[tuple[dict[str, Any], str]]:
    """(namespace, name) of every global a code names, also as attributes of the modules it names or imports.

    Args:
        code: A function's code.
        space: Its globals.
        through_libraries: Also attributes of modules of libraries (`torch.relu`).
    """
    names = names_of(code)
    found = [(space, name) for name in names if name in space]
    imported = [sys.modules[n] for n in names if n not in space and n in sys.modules]
    todo, seen = [*(where[name] for where, name in found), *imported], set()
    while todo:
        value = todo.pop()
        if not isinstance(value, types.ModuleType) or id(value) in seen:
            continue
        seen.add(id(value))
        if through_libraries or value.__name__.partition(".")[0] not in LIBRARIES:
            inside = [(vars(value), name) for name in names if name in vars(value)]
            found += inside
            todo += [where[name] for where, name in inside]
    return found


def codes_of(functions: Iterable[Any]) -> Iterator[types.CodeType]:
    """Code of these functions and properties, and of functions they name; libraries' is not looked at."""
    todo, seen = list(functions), set()
    while todo:
        one = todo.pop()
        if isinstance(one, functools.partial):
            todo.append(one.func)
            continue
        one = getattr(one, "fget", None) or getattr(one, "__func__", one)
        if isinstance(one, types.FunctionType):
            one = inspect.unwrap(one)
        if not isinstance(one, types.FunctionType) or one.__code__ in seen or is_library(one):
            continue
        seen.add(one.__code__)
        yield one.__code__
        todo += [space[name] for space, name in globals_of(one.__code__, one.__globals__)]


def functions_of(owners: Iterable[Any]) -> list[Any]:
    """Methods of the users' classes of some objects, and functions these hold as attributes."""
    found: list[Any] = []
    kinds: dict[type, None] = {}
    for owner in owners:
        found += [x for x in vars(owner).values() if isinstance(x, FUNCTIONS)]
        kinds |= dict.fromkeys(kind for kind in type(owner).__mro__ if not is_library(kind))
    return [*found, *(x for kind in kinds for x in vars(kind).values())]


def mentions(functions: Iterable[Any], names: frozenset[str]) -> bool:
    """Whether code of these functions, or that they name, uses one of these names."""
    return any(names.intersection(names_of(code)) for code in codes_of(functions))


def held_attributes(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, for a module only what the user put there; None if it has none."""
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return None
    return {k: v for k, v in own.items() if k not in _STANDARD} if isinstance(value, nn.Module) else own


@functools.lru_cache(4096)
def slots_of_class(kind: type) -> tuple[str, ...]:
    """Names of all `__slots__`."""
    found = [vars(c).get("__slots__", ()) for c in kind.__mro__]
    names = itertools.chain.from_iterable((s,) if isinstance(s, str) else tuple(s) for s in found)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


@functools.lru_cache(4096)
def hides_state(kind: Any) -> bool:
    """Objects of this type hold more than attributes: it is written in C, or derives from such a type."""
    visible = object.__basicsize__ + _POINTER * (
        2 + len(slots_of_class(kind))
    )  # with a dictionary, and weak references
    return bool(kind.__basicsize__ > visible)


def held_slots(value: Any) -> dict[str, Any]:
    """Values in the `__slots__` of an object."""
    kind: Any = type(value)
    return {name: getattr(value, name) for name in slots_of_class(kind) if hasattr(value, name)}


def cells_of(function: types.FunctionType) -> list[Any]:
    """What a function sees of the functions around it; cells without a value are left out."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            continue
    return found


def is_iterator(value: Any) -> bool:
    """Reading from it changes it."""
    return hasattr(type(value), "__next__") and not isinstance(value, (Tensor, nn.Module))


def is_random(value: Any) -> bool:
    """A source of random numbers with a state."""
    if isinstance(value, (random.Random, torch.Generator)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    )


def is_array(value: Any) -> bool:
    """A numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_open(value: Any) -> bool:
    """An object whose attributes are the user's, not a library's own machinery."""
    kind = type(value)
    return isinstance(value, nn.Module) or not is_library(kind) or kind.__module__.partition(".")[0] in _OPEN


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a dictionary, past whatever a subclass makes of looking them up."""
    kind: Any = next((k for k in (OrderedDict, dict) if isinstance(value, k)), type(value))
    return list(kind.items(value))


def contents_of(value: Any) -> list[Any]:
    """Elements of a list, tuple, set or deque, past whatever a subclass makes of them."""
    kind: Any = next(k for k in (list, tuple, set, frozenset, deque) if isinstance(value, k))
    return list(kind.__iter__(value))


def parts_of(value: Any) -> Iterator[Any]:
    """What an object holds: contents, attributes, what a function closes over (not what its code names)."""
    if isinstance(value, (dict, types.MappingProxyType)):
        yield from [v for _, v in items_of(value)]
    elif isinstance(value, CONTAINERS):
        yield from contents_of(value)
    elif isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from cells_of(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
        return
    elif isinstance(value, types.BuiltinFunctionType):
        yield getattr(value, "__self__", None)
        return
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, property):
        yield from (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools.cached_property):
        yield value.func
        return
    elif isinstance(value, _WRAPPERS):
        yield value.__func__
        return
    elif isinstance(value, weakref.ref):
        yield value()
    if not isinstance(value, type):
        yield from (held_attributes(value) or {}).values()
        yield from held_slots(value).values()
