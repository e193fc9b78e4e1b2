"""HOW is a batch cut into microbatches, and how are their outputs put together?

Any tree of dicts, lists, tuples, dataclasses and registered pytree nodes. Tensors and numpy arrays whose first dim is the
batch are sliced; so are sequences with one entry per sample (strings, images of different sizes, target dicts).
Everything else (None, numbers, strings, tensors without the batch dim) goes to every microbatch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

from lightning_3d.errors import PipelineError

_SCALARS = (int, float, complex, str, bytes, bool, type(None))


def batch_size(batch: Any) -> int:
    """Number of samples in a batch.

    The first dim all tensors share; if they do not share one, the length of the sequences with one entry per sample;
    else the first dim most tensors have.

    Raises:
        PipelineError: The batch holds nothing that can be cut.
    """
    sizes = [len(x) for x in _leaves(batch) if _has_first_dim(x)]
    if sizes and len(set(sizes)) == 1 and not _only_in_samples(batch):
        return sizes[0]
    lengths = {len(s) for s in _sample_sequences(batch)}
    outside = {len(x) for x in _leaves(batch, into_sequences=False) if _has_first_dim(x)}
    if len(lengths) == 1 and (not outside or lengths <= outside):
        return lengths.pop()
    if not sizes:
        raise PipelineError(
            f"cannot find the batch dim: the batch ({type(batch).__name__}) holds no tensor with a dim and no sequence "
            "with one entry per sample. A pipeline must cut every batch into microbatches."
        )
    counted = Counter(sizes)
    return max(sizes, key=lambda size: (counted[size], -sizes.index(size)))


def split(batch: Any, count: int) -> list[Any]:
    """Cut a batch into `min(count, batch size)` microbatches whose sizes differ by at most one, in order."""
    size = batch_size(batch)
    count = min(count, size)
    edges = [size * i // count for i in range(count + 1)]
    return [_cut(batch, size, a, b) for a, b in zip(edges, edges[1:], strict=False)]


def shares(microbatches: Sequence[Any]) -> list[float]:
    """Each microbatch's share of the samples."""
    sizes = [batch_size(m) for m in microbatches]
    return [size / sum(sizes) for size in sizes]


def split_with_shares(batch: Any, count: int) -> tuple[list[Any], list[int]]:
    """Microbatches and their sizes."""
    size = batch_size(batch)
    count = min(count, size)
    edges = [size * i // count for i in range(count + 1)]
    pairs = list(zip(edges, edges[1:], strict=False))
    return [_cut(batch, size, a, b) for a, b in pairs], [b - a for a, b in pairs]


def signature(batch: Any) -> Any:
    """What the path of a step may depend on, as a hashable key: structure, shapes, dtypes, flags and counts.

    Values of tensors, floats and strings are not part of it.
    """
    if isinstance(batch, Tensor):
        return ("tensor", tuple(batch.shape), batch.dtype, batch.requires_grad)
    if isinstance(batch, (bool, int)) or batch is None:
        return (type(batch), batch)
    children = _children(batch)
    if children is None:
        return getattr(batch, "shape", None) and tuple(batch.shape), type(batch)
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


def _leaves(value: Any, into_sequences: bool = True) -> Iterator[Any]:
    children = _children(value)
    if children is None:
        _check_leaf(value)
        yield value
        return
    for x in children[1]:
        if into_sequences or not _is_sample_sequence(x):
            yield from _leaves(x, into_sequences)


def _check_leaf(value: Any) -> None:
    if hasattr(value, "__dict__") and not isinstance(value, Tensor) and any(isinstance(x, Tensor) for x in vars(value).values()):
        raise PipelineError(
            f"the batch holds a {type(value).__name__} with tensors inside, which cannot be cut into microbatches. Make "
            "it a dict, a tuple or a dataclass, or register it with torch.utils._pytree.register_pytree_node."
        )


def _has_first_dim(x: Any) -> bool:
    return isinstance(x, (Tensor, np.ndarray)) and x.ndim > 0


def _is_sample_sequence(value: Any) -> bool:
    """A list or tuple with one entry per sample: entries of one kind that do not have the batch dim themselves."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or not value:
        return False
    if len({type(x) for x in value}) != 1:
        return False
    if isinstance(value[0], (list, tuple)) and all(_is_sample_sequence(x) for x in value):
        return len({len(x) for x in value}) > 1  # (images, targets): a structure; ragged lists: one per sample
    sizes = {len(x) for v in value for x in _leaves(v) if _has_first_dim(x)}
    tensors = [x for x in value if isinstance(x, Tensor)]
    return not (tensors and len(sizes) == 1 and len({x.shape for x in tensors}) > 1) or len(sizes) > 1


def _sample_sequences(value: Any) -> Iterator[Sequence[Any]]:
    if _is_sample_sequence(value):
        yield value
        return
    children = _children(value)
    for x in children[1] if children else ():
        yield from _sample_sequences(x)


def _only_in_samples(batch: Any) -> bool:
    """Whether every tensor sits in a sequence of dicts, so that the shared first dim is not the batch's."""
    sequences = list(_sample_sequences(batch))
    if not sequences or any(_has_first_dim(x) for x in _leaves(batch, into_sequences=False)):
        return False
    return all(not isinstance(x, Tensor) for s in sequences for x in s)


def _cut(value: Any, size: int, start: int, stop: int) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return value[start:stop] if value.ndim and len(value) == size else value
    children = _children(value)
    if children is None:
        return value
    _, values, rebuild = children
    plain = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    if plain and len(value) == size and not all(_has_first_dim(x) and len(x) == size for x in value):
        if not any(_holds_batch_dim(x, size) for x in value):
            return type(value)(value[start:stop])
    return rebuild([_cut(x, size, start, stop) for x in values])


def _holds_batch_dim(value: Any, size: int) -> bool:
    """Whether every tensor in a structure (not a tensor itself) has the batch dim."""
    leaves = [x for x in _leaves(value) if _has_first_dim(x)]
    return bool(leaves) and not _has_first_dim(value) and all(len(x) == size for x in leaves)
