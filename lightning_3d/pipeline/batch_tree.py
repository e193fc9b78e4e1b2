"""WHAT does a batch consist of?  Any tree of dicts, lists, tuples, dataclasses and registered pytree nodes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

from lightning_3d.errors import PipelineError

SCALARS = (int, float, complex, str, bytes, bool, type(None))
Path = tuple[Any, ...]
"""Keys from the root of the batch."""


def children_of(value: Any) -> tuple[list[Any], list[Any], Callable[[list[Any]], Any]] | None:
    """(keys, values, rebuild) of an inner node; None for a leaf."""
    if isinstance(value, PackedSequence):
        raise PipelineError(
            "the batch holds a PackedSequence, which has no batch dim to cut. Let the loader give padded sequences "
            "and their lengths, and call pack_padded_sequence(..., enforce_sorted=False) in the step or in a module."
        )
    if isinstance(value, (Tensor, np.ndarray, *SCALARS)):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value._fields), list(value), lambda new: type(value)(*new)
    if isinstance(value, (list, tuple)):
        return list(range(len(value))), list(value), type(value)
    if isinstance(value, Mapping):
        return list(value), list(value.values()), lambda new: _like_mapping(value, new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return names, [getattr(value, n) for n in names], lambda new: _like_dataclass(value, names, new)
    node = SUPPORTED_NODES.get(type(value))
    if node is not None:
        values, context = node.flatten_fn(value)
        return list(range(len(values))), list(values), lambda new: node.unflatten_fn(new, context)
    return None


def attributes_of(value: Any) -> tuple[list[Any], list[Any], Callable[[list[Any]], Any]] | None:
    """As `children_of`, also for a batch of a class of the user's own: tensors in attributes, and a method `to`.

    Its tensors and arrays must agree about the number of samples: a class in which they do not (a graph with nodes and
    edges) cannot be cut without knowing what they mean, and is a leaf. Entries of lists are never opened like this.
    """
    children = children_of(value)
    if children is not None or isinstance(value, (Tensor, np.ndarray, *SCALARS, type)):
        return children
    found = getattr(value, "__dict__", None)
    if not found or not callable(getattr(value, "to", None)):
        return None
    sizes = {len(x) if x.ndim else None for x in found.values() if isinstance(x, (Tensor, np.ndarray))}
    if len(sizes) != 1 or None in sizes:
        return None
    names = list(found)
    return names, [found[n] for n in names], lambda new: _like_dataclass(value, names, new)


def _like_mapping(value: Mapping[Any, Any], new: list[Any]) -> Any:
    pairs = dict(zip(value, new, strict=True))
    if type(value) is dict:
        return pairs
    same = copy.copy(value)  # keeps the class and its attributes (BatchEncoding, defaultdict, ...)
    if hasattr(same, "data") and isinstance(same.data, dict):
        same.data = dict(same.data)
    for key, x in pairs.items():
        same[key] = x  # type: ignore[index]
    return same


def _like_dataclass(value: Any, names: list[str], new: list[Any]) -> Any:
    same = copy.copy(value)
    for name, x in zip(names, new, strict=True):
        object.__setattr__(same, name, x)
    return same


def has_first_dim(x: Any) -> bool:
    """A tensor or array with at least one dim."""
    return isinstance(x, (Tensor, np.ndarray)) and x.ndim > 0


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of a tree, in order."""
    children = children_of(value)
    if children is None:
        yield value
        return
    for x in children[1]:
        yield from leaves_of(x)


def is_plain_sequence(value: Any) -> bool:
    """A list or tuple whose entries have no names."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def are_scalars(value: Any) -> bool:
    """A list or tuple of numbers, strings and the like, not empty."""
    return is_plain_sequence(value) and bool(value) and all(isinstance(x, SCALARS) for x in value)


def are_tensors(value: Any) -> bool:
    """A list or tuple of tensors or arrays, not empty."""
    return is_plain_sequence(value) and bool(value) and all(isinstance(x, (Tensor, np.ndarray)) for x in value)


def is_tuple_of_tensors(batch: Any) -> bool:
    """A whole batch that is a tuple of tensors is (inputs, targets, weights), never a tuple of ragged samples."""
    return type(batch) is tuple and are_tensors(batch)


def path_name(path: Path) -> str:
    """How user code reads what is at `path`."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


def signature(batch: Any, _inside: tuple[int, ...] = ()) -> Any:
    """What the path of a step may depend on, as a hashable key: structure, shapes, dtypes, flags and counts.

    Values of tensors, floats and strings are not part of it.
    """
    if isinstance(batch, Tensor):
        return ("tensor", tuple(batch.shape), batch.dtype, batch.requires_grad)
    if isinstance(batch, (bool, int)) or batch is None:
        return (type(batch), batch)
    if isinstance(batch, np.ndarray):
        return ("array", batch.shape, batch.dtype.str)
    children = attributes_of(batch)
    if children is None:
        return _signature_of_object(batch, _inside)
    keys, values, _ = children
    if len(values) > 8 and all(isinstance(v, SCALARS) for v in values):
        return (type(batch), len(values))  # one number or name per sample
    return (type(batch), tuple(keys), tuple(signature(v, _inside) for v in values))


def _signature_of_object(value: Any, inside: tuple[int, ...]) -> Any:
    """An object of the user's own that nobody can cut (a graph) has tensors in attributes, perhaps of their own."""
    held = getattr(value, "__dict__", None)
    if not held or id(value) in inside or isinstance(value, type) or callable(value):
        return type(value)
    return (type(value), tuple((name, signature(x, (*inside, id(value)))) for name, x in held.items()))
