"""HOW is a batch cut into microbatches, and how are their outputs put together?

Any tree of dicts, lists, tuples, dataclasses and registered pytree nodes. Tensors and numpy arrays whose first dim is
the batch are sliced; so are sequences with one entry per sample (strings, images of different sizes, target dicts).
Everything else (None, numbers, strings, tensors without the batch dim) goes to every microbatch.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

from lightning_3d.errors import PipelineError

_SCALARS = (int, float, complex, str, bytes, bool, type(None))


def batch_size(batch: Any) -> int:
    """Number of samples in a batch.

    The first dim of the tensors (the most common one, if they differ); where tensors sit in sequences with one entry
    per sample, the length of those. A list of tensors that share their first dim is a list of batches (views of the
    same samples), not of samples.

    Raises:
        PipelineError: The batch holds nothing that can be cut.
    """
    votes = _Votes([], [], [], [])
    for part in batch if _is_tuple_of_tensors(batch) else (batch,):
        _vote(part, votes)
    both = [size for size in votes.dims if size in votes.lengths]
    sizes = both or votes.dims or votes.lengths or votes.views or votes.names
    if not sizes:
        raise PipelineError(
            f"cannot find the batch dim: the batch ({type(batch).__name__}) holds no tensor with a dim and no sequence "
            "with one entry per sample. A pipeline must cut every batch into microbatches."
        )
    counted = Counter(sizes)
    return max(counted, key=lambda size: (counted[size], -sizes.index(size)))


def split(batch: Any, count: int) -> list[Any]:
    """Cut a batch into `min(count, batch size)` microbatches whose sizes differ by at most one, in order."""
    return split_with_sizes(batch, count)[0]


def split_with_sizes(batch: Any, count: int) -> tuple[list[Any], list[int]]:
    """The microbatches of `split`, and their sizes."""
    size = batch_size(batch)
    count = min(count, size)
    edges = [size * i // count for i in range(count + 1)]
    pairs = list(itertools.pairwise(edges))
    if _is_tuple_of_tensors(batch):
        parts: list[Any] = [tuple(_cut(x, size, a, b) for x in batch) for a, b in pairs]
    else:
        parts = [_cut(batch, size, a, b) for a, b in pairs]
    return parts, [b - a for a, b in pairs]


def signature(batch: Any) -> Any:
    """What the path of a step may depend on, as a hashable key: structure, shapes, dtypes, flags and counts.

    Values of tensors, floats and strings are not part of it.
    """
    if isinstance(batch, Tensor):
        return ("tensor", tuple(batch.shape), batch.dtype, batch.requires_grad)
    if isinstance(batch, (bool, int)) or batch is None:
        return (type(batch), batch)
    if isinstance(batch, np.ndarray):
        return ("array", batch.shape, batch.dtype.str)
    children = _children(batch)
    if children is None:
        return type(batch)
    keys, values, _ = children
    if len(values) > 8 and all(isinstance(v, _SCALARS) for v in values):
        return (type(batch), len(values))  # one number or name per sample
    return (type(batch), tuple(keys), tuple(signature(v) for v in values))


# -- outputs
def merge(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """Put the microbatches' outputs together.

    0-dim tensors and floats: weighted mean. Tensors and lists with the microbatch's batch dim: concatenated. Dicts,
    lists, tuples and dataclasses of equal structure: leaf by leaf. What is the same everywhere: itself. Anything else:
    the list of the microbatches' values.
    """
    first = outputs[0]
    if first is None or len(outputs) == 1:
        return first if all(x is None for x in outputs) or len(outputs) == 1 else list(outputs)
    if all(isinstance(x, Tensor) for x in outputs):
        return _merge_tensors(outputs, sizes, weights)
    if all(type(x) is float for x in outputs):
        return sum(w * x for w, x in zip(weights, outputs, strict=True)) / sum(weights)
    if all(type(x) is type(first) for x in outputs):
        per_sample = isinstance(first, (list, tuple)) and not hasattr(first, "_fields")
        if per_sample and not isinstance(first, str) and _one_per_sample(outputs, sizes):
            return type(first)(x for out in outputs for x in out)
        children = [_children(x) for x in outputs]
        if all(c is not None and c[0] == children[0][0] for c in children):  # type: ignore[index]
            merged = [merge(column, sizes, weights) for column in zip(*(c[1] for c in children if c), strict=True)]
            return children[0][2](merged)  # type: ignore[index]
        if isinstance(first, _SCALARS) and all(x == first for x in outputs):
            return first
    return list(outputs)


def _merge_tensors(outputs: Sequence[Tensor], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    if all(x.dim() == 0 for x in outputs):
        total = sum(weights)
        if outputs[0].is_floating_point() or outputs[0].is_complex():
            return torch.stack([x * (w / total) for x, w in zip(outputs, weights, strict=True)]).sum()
        return torch.stack([x.double() * (w / total) for x, w in zip(outputs, weights, strict=True)]).sum()
    same = len({(x.dtype, x.shape[1:]) for x in outputs if x.dim()}) == 1
    if same and all(x.dim() and len(x) == size for x, size in zip(outputs, sizes, strict=True)):
        return torch.cat(list(outputs))
    return list(outputs)


def _one_per_sample(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """A list with an entry per sample; not a list of tensors that have the batch dim themselves."""
    if any(len(out) != size for out, size in zip(outputs, sizes, strict=True)):
        return False
    columns = [
        all(isinstance(x, Tensor) and x.dim() and len(x) == size for x in out)
        for out, size in zip(outputs, sizes, strict=True)
    ]
    return not all(columns)


# -- the tree
def _children(value: Any) -> tuple[list[Any], list[Any], Callable[[list[Any]], Any]] | None:
    """(keys, values, rebuild) of an inner node; None for a leaf."""
    if isinstance(value, PackedSequence):
        raise PipelineError(
            "the batch holds a PackedSequence, which has no batch dim to cut. Pad the sequences and pack them inside "
            "the module."
        )
    if isinstance(value, (Tensor, np.ndarray, *_SCALARS)):
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


def _has_first_dim(x: Any) -> bool:
    return isinstance(x, (Tensor, np.ndarray)) and x.ndim > 0


def _leaves(value: Any) -> Iterator[Any]:
    children = _children(value)
    if children is None:
        yield value
        return
    for x in children[1]:
        yield from _leaves(x)


class _Votes(NamedTuple):
    """What the batch size may be.

    First dims of tensors, lengths of sequences of samples, first dims of lists of tensors that share it (views of one
    batch, or samples of one size), lengths of sequences of names.
    """

    dims: list[int]
    lengths: list[int]
    views: list[int]
    names: list[int]


def _vote(value: Any, votes: _Votes) -> None:
    if _has_first_dim(value):
        votes.dims.append(len(value))
    elif _is_samples(value):
        votes.lengths.append(len(value))
    elif _is_plain_sequence(value) and value and all(isinstance(x, _SCALARS) for x in value):
        votes.names.append(len(value))
    elif _is_plain_sequence(value) and value and all(map(_has_first_dim, value)):
        votes.views.append(len(value[0]))
    else:
        children = _children(value)
        for x in children[1] if children else ():
            _vote(x, votes)


def _is_plain_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _is_tuple_of_tensors(batch: Any) -> bool:
    """A whole batch that is a tuple of tensors is (inputs, targets, weights), never a tuple of ragged samples."""
    return type(batch) is tuple and all(isinstance(x, (Tensor, np.ndarray)) for x in batch)


def _is_samples(value: Any) -> bool:
    """Whether a list or tuple has one entry per sample.

    Its entries are tensors with different first dims, or structures of one kind in which something cannot have a batch
    dim: a number, a string, a plain object, or tensors with different first dims. A tuple of sequences is a structure
    (what `tuple(zip(*samples))` makes), a list of sequences a list of samples.
    """
    if not _is_plain_sequence(value) or not value or all(isinstance(x, _SCALARS) for x in value):
        return False
    tensors = [isinstance(x, (Tensor, np.ndarray)) for x in value]
    if any(tensors):
        return all(tensors) and len({len(x) if x.ndim else -1 for x in value}) > 1
    if len({type(x) for x in value}) > 1 or (isinstance(value, tuple) and _is_plain_sequence(value[0])):
        return False
    leaves = [x for entry in value for x in _leaves(entry)]
    return not all(map(_has_first_dim, leaves)) or len({len(x) for x in leaves}) > 1


def _cut(value: Any, size: int, start: int, stop: int) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return value[start:stop] if value.ndim and len(value) == size else value
    children = _children(value)
    if children is None:
        _check_leaf(value)
        return value
    if _is_plain_sequence(value) and len(value) == size and _one_entry_per_sample(value, size):
        return type(value)(value[start:stop])
    _, values, rebuild = children
    return rebuild([_cut(x, size, start, stop) for x in values])


def _one_entry_per_sample(value: Sequence[Any], size: int) -> bool:
    """For a sequence as long as the batch: is it samples, or a structure that happens to have that length?"""
    if all(isinstance(x, _SCALARS) for x in value) or _is_samples(value):
        return True
    return all(map(_has_first_dim, value)) and any(len(x) != size for x in value)


def _check_leaf(value: Any) -> None:
    if not hasattr(value, "__dict__") or callable(value):
        return
    if any(isinstance(x, Tensor) for x in vars(value).values()):
        raise PipelineError(
            f"the batch holds a {type(value).__name__} with tensors inside, which cannot be cut into microbatches. "
            "Make it a dict, a tuple or a dataclass, or register it with torch.utils._pytree.register_pytree_node."
        )
