"""DO two objects do the same?  A digest of all that code with them could depend on: data, and functions by their code.

Equal digests in two processes mean equal attributes, contents and configurations, and functions (held by anything, or
named by other functions) with equal code, constants, defaults and enclosing variables. Of libraries the version counts,
of installed packages their files. Values of tensors and states of random generators do not count.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import pathlib
import sys
import types
import weakref
from collections import deque
from typing import Any

from torch import Tensor, nn

from lightning_3d.probe.reach import (
    ATOMS,
    CONTAINERS,
    LIBRARIES,
    cells_of,
    contents_of,
    globals_of,
    held_attributes,
    held_slots,
    hides_state,
    home,
    is_array,
    is_installed,
    is_random,
    items_of,
    parts_of,
)

_MOST = 500_000
_ABOUT_CLASSES = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__", "_abc_impl")
)
_LEFT_OUT = frozenset(("_trainer", "_fabric", "_original_object_hash"))
"""References out of the model; a `hash()` of transformers' configurations, which every process salts anew."""
_CALLABLES = (types.MethodType, functools.partial, property, functools.cached_property, staticmethod, classmethod)
_EMPTY = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)


class Unknown(Exception):
    """Something whose effect cannot be told from outside."""


class Content:
    """Collects what is to be equal; `hexdigest` names it."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}

    def add(self, *values: Any) -> None:
        """Objects of any kind, with all that is reachable from them.

        Raises:
            Unknown: One of them cannot be described.
        """
        todo = deque(values)
        while todo:
            todo.extendleft(reversed(self._one(todo.popleft())))

    def hexdigest(self) -> str:
        """Of all that was added so far."""
        return self._digest.hexdigest()

    def _note(self, *words: Any) -> None:
        self._digest.update(repr(words).encode())

    def _one(self, value: Any) -> list[Any]:
        """Note what an object is; what it holds comes next."""
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, ATOMS) and not hasattr(value, "_value_"):
            self._note(type(value).__name__, value)
            return []
        if id(value) in self._seen:
            self._note("again", self._seen[id(value)][0])
            return []
        if len(self._seen) > _MOST:
            raise Unknown("it holds too many objects")
        self._seen[id(value)] = len(self._seen), value
        return self._described(value)

    def _described(self, value: Any) -> list[Any]:
        kind = type(value)
        if isinstance(value, Tensor):
            self._note("tensor", tuple(value.shape), value.dtype, value.requires_grad)
            return []
        if is_random(value):
            self._note("source", kind.__qualname__)
            return []
        if is_array(value):
            self._note("array", value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest())
            return []
        if isinstance(value, types.ModuleType):
            self._note("module", value.__name__, str(getattr(value, "__version__", "")))
            return []
        if isinstance(value, logging.Logger):
            self._note("logger")
            return []
        if isinstance(value, (dict, types.MappingProxyType)):
            items = items_of(value)
            self._note("dict", kind.__qualname__, len(items))
            return [part for item in items for part in item] + self._attributes(value)
        if isinstance(value, (set, frozenset)):
            self._note("set", kind.__qualname__, sorted(map(digest_of, contents_of(value))))
            return []
        if isinstance(value, CONTAINERS):
            elements = contents_of(value)
            self._note("sequence", kind.__qualname__, len(elements))
            return elements + self._attributes(value)
        return self._code_or_object(value)

    def _code_or_object(self, value: Any) -> list[Any]:
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, _EMPTY):
            owner = getattr(value, "__self__", None)
            self._note("builtin", getattr(value, "__module__", ""), value.__qualname__)
            return [] if isinstance(owner, types.ModuleType) else [owner]
        if isinstance(value, weakref.ref):
            self._note("reference")
            return [value()]
        if isinstance(value, _CALLABLES):
            parts = list(parts_of(value))
            self._note("callable", type(value).__qualname__, len(parts))
            return parts
        if isinstance(value, nn.Module):
            return self._module(value)
        return self._object(value)

    def _module(self, module: nn.Module) -> list[Any]:
        hooks = {k: list(v.values()) for k, v in module.__dict__.items() if "_hooks" in k and isinstance(v, dict)}
        self._note("network", sorted(k for k, v in hooks.items() if v))
        owned = [module._parameters, module._buffers, module._modules]
        return [type(module), *owned, *[v for v in hooks.values() if v], *self._attributes(module)]

    def _object(self, value: Any) -> list[Any]:
        kind: Any = type(value)
        if hides_state(kind) and home(kind) not in ("torch", "_thread"):
            raise Unknown(f"an object of {kind.__module__}.{kind.__qualname__}")
        slots = held_slots(value)
        self._note("object", len(slots))
        return [kind, *(part for item in slots.items() for part in item), *self._attributes(value)]

    def _attributes(self, value: Any) -> list[Any]:
        found = [(k, v) for k, v in (held_attributes(value) or {}).items() if k not in _LEFT_OUT]
        self._note("attributes", len(found))
        return [part for item in found for part in item]

    def _class(self, kind: type) -> list[Any]:
        self._note("class", kind.__module__, kind.__qualname__)
        package = home(kind)
        if package in LIBRARIES or package == "builtins":
            return []
        if is_installed(package):
            self._note(_file_digest(kind.__module__))
            return []
        items = [(k, v) for k, v in vars(kind).items() if k not in _ABOUT_CLASSES and not _is_slot(v)]
        self._note(len(kind.__bases__), len(items))
        return [*kind.__bases__, *(part for item in items for part in item)]

    def _function(self, function: types.FunctionType) -> list[Any]:
        self._note("function", function.__module__, function.__qualname__)
        package = home(function)
        held = [function.__defaults__, function.__kwdefaults__, cells_of(function), *self._attributes(function)]
        if package in LIBRARIES:
            return held
        if is_installed(package):
            self._note(_file_digest(function.__globals__.get("__name__")))
            return held
        named = globals_of(function.__code__, function.__globals__)
        self._note([name for _, name in named])
        return [function.__code__, *held, *(space[name] for space, name in named)]

    def _code(self, code: types.CodeType) -> list[Any]:
        self._note(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)
        self._note(code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, len(code.co_consts))
        return list(code.co_consts)


def digest_of(value: Any) -> str:
    """The digest of one object."""
    content = Content()
    content.add(value)
    return content.hexdigest()


def _is_slot(value: Any) -> bool:
    return isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))


@functools.cache
def _file_digest(name: str | None) -> str:
    module = sys.modules.get(name or "")
    try:
        path = inspect.getfile(module) if module is not None else ""
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    except (TypeError, OSError) as error:
        raise Unknown(f"code of {name}, whose file is not there") from error
