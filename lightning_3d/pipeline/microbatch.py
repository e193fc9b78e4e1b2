"""HOW is a batch cut into microbatches, and how are their outputs put together?

Any tree of dicts, lists, tuples, dataclasses and registered pytree nodes. Tensors and numpy arrays whose first dim is
the batch are sliced; so are sequences with one entry per sample (strings, images of different sizes, target dicts).
Everything else (None, numbers, strings, tensors without the batch dim) goes to every microbatch.

The batch of several loaders has parts with sample counts of their own (8 and 4): they are cut together, in the same
proportions, so that the mean over each part, and over all samples, is what it is uncut.

What can be read in two ways that give different numbers is refused, never guessed.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
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


Path = tuple[Any, ...]
Memory = dict[Path, bool]
"""Which tensors and sequences of a loader's batches are cut (True) or go whole to every microbatch (False), by path."""


def batch_size(batch: Any, memory: Memory | None = None) -> int:
    """Number of samples in a batch: the largest number of microbatches it can be cut into.

    The first dim of the tensors (the most common one, if they differ); where tensors sit in sequences with one entry
    per sample, the length of those. A list of tensors that share their first dim is a list of batches (views of the
    same samples), not of samples. For parts with counts of their own, the largest number that divides all counts.

    Args:
        batch: What the loader gives.
        memory: What earlier batches told about the leaves of this one (see `split_with_sizes`).

    Raises:
        PipelineError: The batch holds nothing that can be cut, or can be read in two ways.
    """
    parts = _parts(batch)
    return math.gcd(*parts.values()) if parts else _size(batch, memory or {})


def describe_size(batch: Any) -> str:
    """For messages: "8 samples", or the numbers of a batch whose parts have their own."""
    parts = _parts(batch)
    if not parts:
        size = batch_size(batch)
        return f"{size} sample{'s' * (size != 1)}"
    counts = ", ".join(f"{n} samples in batch[{key!r}]" for key, n in parts.items())
    return f"{counts} (cut together, into a number of microbatches that divides all of these)"


def split(batch: Any, count: int) -> list[Any]:
    """Cut a batch into `min(count, batch size)` microbatches whose sizes differ by at most one, in order."""
    return split_with_sizes(batch, count)[0]


def split_with_sizes(batch: Any, count: int, memory: Memory | None = None) -> tuple[list[Any], list[int]]:
    """The microbatches of `split`, and their sizes.

    Args:
        batch: What the loader gives.
        count: How many microbatches.
        memory: Pass the same dict with every batch of a run. A tensor that once was no part of the samples (5 class
            weights beside 8 samples) then stays whole when its first dim happens to be the batch size.

    Raises:
        PipelineError: The batch cannot be cut, can be read in two ways, or shows that an earlier one was cut wrongly.
    """
    memory = {} if memory is None else memory
    parts = _parts(batch)
    size = math.gcd(*parts.values()) if parts else _size(batch, memory)
    count = min(count, size)
    edges = [size * i // count for i in range(count + 1)]
    pairs = list(itertools.pairwise(edges))
    if parts:
        return [_cut_parts(batch, parts, size, a, b, memory) for a, b in pairs], [b - a for a, b in pairs]
    knives = [_Knife(size, a, b, memory) for a, b in pairs]
    return [knife.cut(batch, (), _is_tuple_of_tensors(batch)) for knife in knives], [b - a for a, b in pairs]


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


def _is_plain_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _are_scalars(value: Any) -> bool:
    return _is_plain_sequence(value) and bool(value) and all(isinstance(x, _SCALARS) for x in value)


def _are_tensors(value: Any) -> bool:
    return _is_plain_sequence(value) and bool(value) and all(isinstance(x, (Tensor, np.ndarray)) for x in value)


def _is_tuple_of_tensors(batch: Any) -> bool:
    """A whole batch that is a tuple of tensors is (inputs, targets, weights), never a tuple of ragged samples."""
    return type(batch) is tuple and _are_tensors(batch)


# -- what a list is
def _kind(value: Any) -> str:
    """What a list or tuple is, by its own entries.

    * "samples": one entry per sample for sure: structures of one kind in which something cannot have a batch dim.
    * "unclear": perhaps: tensors of one kind with different first dims, structures that could be samples or batches.
    * "structure": not: its entries are of different kinds, or share their first dim. A tuple of sequences is a
      structure (what `tuple(zip(*samples))` makes).
    """
    if not _is_plain_sequence(value) or not value or any(isinstance(x, _SCALARS) for x in value):
        return "structure"
    tensors = [isinstance(x, (Tensor, np.ndarray)) for x in value]
    if any(tensors):
        alike = all(tensors) and len({(x.ndim, x.dtype) for x in value}) == 1
        return "unclear" if alike and value[0].ndim and len({len(x) for x in value}) > 1 else "structure"
    if len({type(x) for x in value}) > 1 or (isinstance(value, tuple) and _is_plain_sequence(value[0])):
        return "structure"
    children = [_children(x) for x in value]
    if isinstance(value[0], Mapping) and len({frozenset(c[0]) for c in children if c}) > 1:
        return "structure"  # one dict per role, as [inputs, {"weights": ..., "name": ...}]
    leaves = [x for entry in value for x in _leaves(entry)]
    if all(map(_has_first_dim, leaves)) and len({len(x) for x in leaves}) == 1:
        return "structure"
    return "samples" if all(map(_is_no_batch, value)) else "unclear"


def _is_no_batch(entry: Any) -> bool:
    """Whether a structure cannot be a batch: sizes that differ, or something single beside less than two tensors."""
    sizes = _sizes(entry)
    if len(set(sizes)) > 1:
        return True
    single = any(_is_single(x) for x in _leaves(entry))
    return len(sizes) < 2 if single else not sizes


def _is_single(leaf: Any) -> bool:
    """A label, a 0-dim tensor or a plain object. Names, flags and None may go with a whole batch as well."""
    if isinstance(leaf, (str, bytes, bool, type(None))):
        return False
    return not _has_first_dim(leaf)


def _sizes(value: Any) -> list[int]:
    """First dims of the tensors, and lengths of the lists of names and numbers."""
    if _has_first_dim(value):
        return [len(value)]
    if _are_scalars(value):
        return [len(value)]
    children = _children(value)
    return [n for x in children[1] for n in _sizes(x)] if children else []


def _confirmed(values: Sequence[Any]) -> set[int]:
    """Which of the children of one node are sequences of samples because they have the same length.

    As (images, targets): one list of tensors, one of structures, which do not share a first dim; or two lists of
    ragged tensors.
    """
    lists = [i for i, x in enumerate(values) if _are_tensors(x) or (_kind(x) != "structure" or _same_keys(x))]
    out: set[int] = set()
    for length in {len(values[i]) for i in lists}:
        same = [i for i in lists if len(values[i]) == length]
        tensors = [i for i in same if _are_tensors(values[i])]
        ragged = [i for i in tensors if _kind(values[i]) == "unclear"]
        sizes = {len(x) for i in same for x in _leaves(values[i]) if _has_first_dim(x)}
        if (tensors and len(tensors) < len(same) and len(sizes) > 1) or (ragged and len(same) > 1):
            out.update(same)
    return out


def _same_keys(value: Any) -> bool:
    """A list of dicts with the same keys."""
    if not _is_plain_sequence(value) or not value or not all(isinstance(x, Mapping) for x in value):
        return False
    return len({frozenset(x) for x in value}) == 1


# -- the size of a batch
class _Votes(NamedTuple):
    """What the batch size may be, each with where it was seen.

    First dims of tensors, lengths of sequences of samples, lengths of sequences that may be samples, first dims of
    lists of tensors that share it (views of one batch, or samples of one size), lengths of sequences of names.
    """

    dims: list[tuple[int, Path]]
    lengths: list[tuple[int, Path]]
    unclear: list[tuple[int, Path]]
    views: list[tuple[int, Path]]
    names: list[tuple[int, Path]]


def _size(batch: Any, memory: Memory) -> int:
    votes = _Votes([], [], [], [], [])
    _vote(batch, (), votes, memory, _is_tuple_of_tensors(batch))
    lengths = {n for n, _ in votes.lengths + votes.unclear}
    both = [vote for vote in votes.dims if vote[0] in lengths]
    sizes = both or votes.dims + votes.lengths
    if not sizes and votes.unclear:
        raise _two_readings(batch, *votes.unclear[0])
    sizes = sizes or votes.views or votes.names
    if not sizes and memory:
        return _size(batch, {})
    if not sizes:
        raise PipelineError(
            f"cannot find the batch dim: the batch ({type(batch).__name__}) holds no tensor with a dim and no sequence "
            "with one entry per sample. A pipeline must cut every batch into microbatches."
        )
    counted = Counter(n for n, _ in sizes)
    tied = [n for n in counted if counted[n] == max(counted.values())]
    if len(tied) > 1:  # lists of names and of views may decide
        others = {n for n, _ in votes.names + votes.views}
        tied = [n for n in tied if n in others] or tied
    if len(tied) > 1:
        raise _disagreement(sizes, tied)
    return tied[0]


def _vote(value: Any, path: Path, votes: _Votes, memory: Memory, structure: bool = False) -> None:
    known = False if structure else memory.get(path)
    if _has_first_dim(value):
        if known is not False:
            votes.dims.append((len(value), path))
    elif _is_plain_sequence(value) and known:
        votes.lengths.append((len(value), path))
    elif _are_scalars(value):
        if known is not False:
            votes.names.append((len(value), path))
    elif (kind := "structure" if known is False else _kind(value)) != "structure":
        (votes.lengths if kind == "samples" else votes.unclear).append((len(value), path))
    elif not structure and _are_tensors(value) and len({len(x) if x.ndim else -1 for x in value}) == 1:
        if value[0].ndim:
            votes.views.append((len(value[0]), path))
    elif children := _children(value):
        confirmed = _confirmed(children[1])
        for i, (key, x) in enumerate(zip(children[0], children[1], strict=True)):
            if i in confirmed and memory.get((*path, key)) is not False:
                votes.lengths.append((len(x), (*path, key)))
            else:
                _vote(x, (*path, key), votes, memory)


# -- parts with sample counts of their own
def _parts(batch: Any) -> dict[Any, int] | None:
    """Samples in each part of what several loaders give ([batch, batch] or {"a": batch, "b": batch}), if they differ.

    Parts are structures of tensors that agree about the size in each, and are alike: the same structure, or tensors of
    two or more dims that differ in the first only. A dict beside the samples with a table in it is not.
    """
    if not isinstance(batch, Mapping) and not _is_plain_sequence(batch):
        return None
    keys, values, _ = _children(batch) or ([], [], None)
    filled = [(k, x) for k, x in zip(keys, values, strict=True) if not isinstance(x, _SCALARS)]
    if len(filled) < 2 or _confirmed(values) or _kind(batch) == "samples":
        return None
    sizes: dict[Any, int] = {}
    for key, x in filled:
        found = set(_sizes(x))
        if _children(x) is None or _are_scalars(x) or len(found) != 1 or any(map(_is_single, _leaves(x))):
            return None
        if _is_plain_sequence(batch) and len(_sizes(x)) < 2:
            return None  # one tensor in each entry of a list: as likely a sample
        sizes[key] = found.pop()
    alike = all(_alike(filled[0][1], x) for _, x in filled[1:])
    return sizes if alike and len(set(sizes.values())) > 1 else None


def _alike(a: Any, b: Any) -> bool:
    return _skeleton(a) == _skeleton(b) or bool(_tensor_kinds(a) & _tensor_kinds(b))


def _skeleton(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return (value.dtype, value.ndim)
    children = None if _are_scalars(value) else _children(value)
    return (type(value), [(k, _skeleton(x)) for k, x in zip(children[0], children[1], strict=True)] if children else 0)


def _tensor_kinds(value: Any) -> set[Any]:
    return {(x.dtype, tuple(x.shape[1:])) for x in _leaves(value) if _has_first_dim(x) and x.ndim > 1}


def _cut_parts(batch: Any, parts: Mapping[Any, int], size: int, start: int, stop: int, memory: Memory) -> Any:
    children = _children(batch)
    assert children is not None
    keys, values, rebuild = children
    new = []
    for key, x in zip(keys, values, strict=True):
        each = parts.get(key, size) // size  # samples of this part to one of the smallest steps
        new.append(_Knife(each * size, each * start, each * stop, memory).cut(x, (key,)) if key in parts else x)
    return rebuild(new)


# -- cutting
class _Knife(NamedTuple):
    """Samples `start` to `stop` of a batch of `size`."""

    size: int
    start: int
    stop: int
    memory: Memory

    def cut(self, value: Any, path: Path, structure: bool = False, confirmed: bool = False) -> Any:
        """The slice of one node.

        Args:
            value: The node.
            path: Where it is in the batch.
            structure: It is a structure, even if it has as many entries as there are samples.
            confirmed: Its neighbours say it has one entry per sample.
        """
        if isinstance(value, (Tensor, np.ndarray)):
            fits = value.ndim > 0 and len(value) == self.size
            return value[self.start : self.stop] if self._remember(path, fits, value) else value
        children = _children(value)
        if children is None:
            _check_leaf(value)
            return value
        if _is_plain_sequence(value) and not structure:
            fits = len(value) == self.size
            fits = fits and (confirmed or self.memory.get(path) is True or _one_entry_per_sample(value, self.size))
            if self._remember(path, fits, value):
                return type(value)(value[self.start : self.stop])
        keys, values, rebuild = children
        sure = _confirmed(values)
        pairs = zip(keys, values, strict=True)
        return rebuild([self.cut(x, (*path, k), confirmed=i in sure) for i, (k, x) in enumerate(pairs)])

    def _remember(self, path: Path, fits: bool, value: Any) -> bool:
        """Whether to cut what is at `path`: as earlier batches told, or because it fits now."""
        known = self.memory.get(path)
        if known and not fits:
            raise PipelineError(
                f"{_name(path)} was cut into microbatches in earlier batches, where its length was the number of "
                f"samples. Now it has {len(value) if _is_sized(value) else 'no'} entries, and the batch {self.size} "
                "samples: it has no batch dim, and earlier steps worked with a part of it. Give a tensor that belongs "
                "to the whole batch a leading dim of one (table[None]), or keep it in the module as a buffer."
            )
        if known is None and (not fits or self.stop - self.start < self.size):
            self.memory[path] = fits
        return fits and known is not False


def _is_sized(value: Any) -> bool:
    return _has_first_dim(value) or _is_plain_sequence(value)


def _one_entry_per_sample(value: Sequence[Any], size: int) -> bool:
    """For a sequence as long as the batch: is it samples, or a structure that happens to have that length?"""
    if _are_scalars(value) or _kind(value) != "structure":
        return True
    if not _are_tensors(value):
        return False
    return all(x.ndim == 0 for x in value) or (all(x.ndim for x in value) and any(len(x) != size for x in value))


def _check_leaf(value: Any) -> None:
    if not hasattr(value, "__dict__") or callable(value):
        return
    if any(isinstance(x, Tensor) for x in vars(value).values()):
        raise PipelineError(
            f"the batch holds a {type(value).__name__} with tensors inside, which cannot be cut into microbatches. "
            "Make it a dict, a tuple or a dataclass, or register it with torch.utils._pytree.register_pytree_node."
        )


# -- errors
def _name(path: Path) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _disagreement(sizes: Sequence[tuple[int, Path]], tied: Sequence[int]) -> PipelineError:
    said = "; ".join(f"{n} by {', '.join(_name(p) for m, p in sizes if m == n)}" for n in tied)
    return PipelineError(
        f"cannot tell how many samples the batch has: {said}. A pipeline cuts every batch along its samples, and as "
        "many parts speak for one number as for the other. Give a tensor that belongs to the whole batch a leading dim "
        "of one (table[None]), or keep it in the module as a buffer; give loaders of unlike datasets one batch_size."
    )


def _two_readings(batch: Any, length: int, path: Path) -> PipelineError:
    value = batch
    children = _children(value)
    for key in path:
        assert children is not None
        value = children[1][children[0].index(key)]
        children = _children(value)
    firsts = ", ".join(str(_sizes(x)[0]) if _sizes(x) else "no dim" for x in value[:8])
    return PipelineError(
        f"cannot tell how many samples the batch has: {_name(path)} is a {type(value).__name__} of {length} entries of "
        f"sizes {firsts}{', ...' if length > 8 else ''}. They may be {length} samples or {length} batches, and the "
        "numbers differ. For samples, put a tensor with one entry per sample beside them (their lengths or labels: "
        "(sequences, lengths)); for batches of several loaders, give the loaders one batch_size."
    )
