"""IS the block what it was when it was recorded?  One comparison of everything its Python code may look at.

Compared at every call: attributes of all submodules, contents of their containers, attributes of objects they hold
(configurations) two levels deep, parameters' flags, hooks, and global numbers the code reads. Values are compared by
identity first, so what did not change costs almost nothing.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_room

from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.recorded.tape import Slot
from lightning_3d.tensor.recorded.watch import PRIMITIVES, PythonCode

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = ("_parameters", "_buffers", "_modules")
_EXCHANGED = ("forward", "_compiled_call_impl")  # whoever runs the block may put others there for a while
_STANDARD = frozenset((*nn.Module().__dict__, *_EXCHANGED))
_OPAQUE: tuple[type, ...] = (
    *(type, types.FunctionType, types.MethodType, types.ModuleType, types.BuiltinFunctionType),
    *(Tensor, TensorGroup),  # a tensor is looked up by its slot, the group is in the signature
)
_DEPTH = 2
_LARGE = 1000  # a table of that size is data
_GLOBAL_HOOKS = [
    value for name, value in vars(module_room).items() if name.startswith("_global_") and name.endswith("_hooks")
]
_flags = attrgetter("requires_grad", "dtype")


class Guards:
    """A snapshot of a block, and whether it still holds.

    Args:
        block: The block.
        python: What Python code a call runs, if that is known.
    """

    def __init__(self, block: nn.Module, python: PythonCode | None = None) -> None:
        modules = list(block.modules())
        self._own = block.__dict__
        self._own_values = itemgetter(*(k for k in self._own if k not in _EXCHANGED))
        inner = [m.__dict__ for m in modules[1:]]
        owned = [d for m in modules for d in (m.__dict__[k] for k in _OWN) if d]
        self._dicts: list[dict[Any, Any]] = inner + owned
        self._sequences: list[list[Any]] = []
        self._sets: list[set[Any]] = []
        seen = set(map(id, modules))
        for module in modules:
            for key, value in module.__dict__.items():
                if key not in _STANDARD:
                    self._collect(value, seen, _DEPTH)
        self._hooks = [h for m in modules[1:] for h in (m.__dict__[k] for k in _HOOKS)] + _GLOBAL_HOOKS
        self._tensors = [t for m in modules for d in (m._parameters, m._buffers) for t in d.values() if t is not None]
        self._globals = [] if python is None else [(space, name) for space, name, _ in python.globals_read()]
        for value in [] if python is None else python.objects_read():
            self._collect(value, seen, 0)
        self.hooked = any(self._hooks)
        self._before = self._state()

    def _collect(self, value: Any, seen: set[int], depth: int) -> None:
        """Containers and plain objects whose content the code may look at."""
        if isinstance(value, (*PRIMITIVES, *_OPAQUE)) or id(value) in seen:
            return
        if isinstance(value, (dict, list, tuple, set)) and len(value) > _LARGE:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):  # one that is no part of the block
            self._dicts.append(value.__dict__)
            return
        if isinstance(value, dict):
            self._dicts.append(value)
            parts: Any = value.values()
        elif isinstance(value, (list, tuple)):
            parts = value
            if isinstance(value, list):
                self._sequences.append(value)
        elif isinstance(value, set):
            self._sets.append(value)
            return
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._dicts.append(value.__dict__)
            parts = value.__dict__.values()
        else:
            return
        if depth:
            for part in list(parts):
                self._collect(part, seen, depth - 1)

    def _state(self) -> tuple[Any, ...]:
        own = self._own
        return (
            tuple(chain.from_iterable(map(dict.values, self._dicts))),
            self._own_values(own),
            list(map(_flags, self._tensors)),
            list(map(tuple, self._sequences)),
            list(map(frozenset, self._sets)),
            [namespace.get(name) for namespace, name in self._globals],
            len(own) - sum(k in own for k in _EXCHANGED),
        )

    def hold(self) -> bool:
        """Nothing has changed, and no submodule has hooks."""
        try:
            return not any(self._hooks) and self._state() == self._before
        except Exception:  # objects that cannot be compared are other objects
            return False


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
