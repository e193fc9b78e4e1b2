"""WHICH mutable things were handed to a module, and what is in them?  Lists, dicts and plain objects as side channels.

A module may append to a list it was given, or keep a cache object. These helpers number the mutable holders inside
an argument tree in a fixed order, so that every rank means the same one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node

Slot = tuple[Any, Any]


def is_opaque(value: Any) -> bool:
    """A plain object with attributes, which a pytree treats as a leaf."""
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type)) and not callable(value)


def slots(value: Any) -> list[Slot] | None:
    """The content of a mutable holder as (key, value) pairs; None for anything else."""
    if isinstance(value, list):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    if is_opaque(value):
        return list(vars(value).items())
    return None


def holders(value: Any, depth: int = 5, seen: set[int] | None = None) -> list[Any]:
    """All mutable holders inside `value`, in a fixed order; modules, tensors and callables are not entered."""
    seen = set() if seen is None else seen
    if depth < 0 or id(value) in seen:
        return []
    content = slots(value)
    if content is None:
        inner = value if isinstance(value, tuple) else ()
        return [h for x in inner for h in holders(x, depth - 1, seen)]
    seen.add(id(value))
    return [value, *(h for _, x in content for h in holders(x, depth - 1, seen))]


def copy_holder(value: Any) -> Any:
    """Deep copy of the Python structure; tensors, modules and callables by reference."""
    memo = {
        id(x): x for h in holders(value) for _, x in slots(h) or () if isinstance(x, (Tensor, nn.Module)) or callable(x)
    }
    return copy.deepcopy(value, memo)


def set_slots(value: Any, new: list[Slot]) -> None:
    """Replace the content of a holder, in place."""
    if isinstance(value, list):
        value[:] = [x for _, x in new]
        return
    content = value if isinstance(value, dict) else vars(value)
    content.clear()
    content.update(new)


class Same:
    """Stands for a mutable argument that was handed on as it is: a pytree must not enter it."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder


def content_of(holder: Any, known: Container[int]) -> list[Any]:
    """What is in a changed holder, to be flattened; `known`: ids of the holders that were there before."""
    return [Same(x) if id(x) in known else x for _, x in slots(holder) or ()]


class _Opened:
    """A dataclass as a pytree node. Not registered for the class itself, which is the user's."""

    def __init__(self, value: Any, content: list[Slot]) -> None:
        self.kind, self.content = type(value), content


def _closed(values: Any, context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)
    for name, x in zip(names, values, strict=True):
        object.__setattr__(made, name, x)
    return made


register_pytree_node(
    _Opened,
    lambda value: ([x for _, x in value.content], (value.kind, tuple(name for name, _ in value.content))),
    _closed,
)


def opened(value: Any, known: Container[int] = (), depth: int = 5) -> Any:
    """A result in which plain dataclasses are nodes of a pytree; they are dataclasses again after `tree_unflatten`.

    Args:
        value: What a module returned.
        known: ids of objects that are to stay leaves: mutable arguments that were handed on.
        depth: How far to look.
    """
    if depth < 0 or isinstance(value, Tensor) or id(value) in known:
        return value
    if type(value) in (list, tuple):
        inner = [opened(x, known, depth - 1) for x in value]
        return type(value)(inner) if any(a is not b for a, b in zip(inner, value, strict=True)) else value
    if type(value) is dict:
        found = {key: opened(x, known, depth - 1) for key, x in value.items()}
        return found if any(found[key] is not x for key, x in value.items()) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value) not in SUPPORTED_NODES:
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        names += [name for name in getattr(value, "__dict__", ()) if name not in names]
        return _Opened(value, [(name, opened(getattr(value, name), known, depth - 1)) for name in names])
    return value


def replace_in_place(value: Any, kind: type, function: Callable[[Any], Any]) -> None:
    """Apply `function` to every instance of `kind` inside the lists and dicts of `value`, in place.

    What a module appends to such a list must reach the caller, so the list may not be copied.
    """
    if isinstance(value, (list, dict)):
        for key, x in slots(value) or ():
            if isinstance(x, kind):
                value[key] = function(x)
            else:
                replace_in_place(x, kind, function)
    elif isinstance(value, tuple):
        for x in value:
            replace_in_place(x, kind, function)


def has_tensor(value: Any, depth: int = 3) -> bool:
    """Whether a tensor that is not a parameter is in `value`, through lists, tuples, sets and dicts."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if depth and isinstance(value, (list, tuple, set)):
        return any(has_tensor(x, depth - 1) for x in value)
    if depth and isinstance(value, dict):
        return any(has_tensor(x, depth - 1) for x in value.values())
    return False


def changed(before: list[Slot], after: list[Slot]) -> bool:
    """Whether a holder's content is another one (numbers and strings by value, all else by identity)."""
    if len(before) != len(after):
        return True
    for (k1, v1), (k2, v2) in zip(before, after, strict=True):
        same = v1 is v2 or (isinstance(v1, (int, float, str)) and type(v1) is type(v2) and v1 == v2)
        if k1 != k2 or not same:
            return True
    return False
