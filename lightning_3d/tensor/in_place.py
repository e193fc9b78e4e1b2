"""DOES an operation write into its first argument?  By its name, or because `inplace` is asked for."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from lightning_3d.tensor.registry import Args, Kwargs


def is_in_place(func: Any, name: str, args: Args, kwargs: Kwargs) -> bool:
    """`add_`, `__iadd__`, `__setitem__`, `F.dropout2d(x, 0.5, inplace=True)`."""
    if name.startswith("__"):
        named = name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    else:
        named = name.endswith("_") and not name.startswith("_")
    return named or _asked(func, args, kwargs)


def _asked(func: Any, args: Args, kwargs: Kwargs) -> bool:
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    position = _place_of_inplace(func)
    return position is not None and len(args) > position and bool(args[position])


@functools.cache
def _place_of_inplace(func: Any) -> int | None:
    names = list(inspect.signature(func).parameters) if isinstance(func, types.FunctionType) else []
    return names.index("inplace") if "inplace" in names else None
