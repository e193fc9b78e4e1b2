"""HOW MANY samples does a batch have, and which of its lists are lists of samples?

The batch of several loaders has parts with sample counts of their own (8 and 4). What can be read in two ways that
give different numbers is refused, never guessed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline.batch_tree import (
    SCALARS,
    Path,
    are_scalars,
    are_tensors,
    attributes_of,
    children_of,
    has_first_dim,
    is_plain_sequence,
    is_tuple_of_tensors,
    leaves_of,
    path_name,
)

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
    parts = parts_of(batch)
    return math.gcd(*parts.values()) if parts else size_of(batch, memory or {})


def common_size(batch: Any) -> int | None:
    """First dim of all tensors of a batch that is nothing but a few of them, which share it; None for any other batch.

    Most are, and can be read in one way only: the rules for all others take longer than to cut it.
    """
    if type(batch) not in (tuple, list, dict) or not batch:
        return None
    sizes = {len(x) if type(x) is Tensor and x.ndim else -1 for x in (batch.values() if type(batch) is dict else batch)}
    size = sizes.pop()
    return None if sizes or size < 1 or (type(batch) is not dict and size == len(batch)) else size


def describe_size(batch: Any) -> str:
    """For messages: "8 samples", or the numbers of a batch whose parts have their own."""
    parts = parts_of(batch)
    if not parts:
        size = batch_size(batch)
        return f"{size} sample{'s' * (size != 1)}"
    counts = ", ".join(f"{n} samples in batch[{key!r}]" for key, n in parts.items())
    return f"{counts} (cut together, into a number of microbatches that divides all of these)"


# -- what a list is
def kind_of(value: Any) -> str:
    """What a list or tuple is, by its own entries.

    * "samples": one entry per sample for sure: structures of one kind in which something cannot have a batch dim.
    * "unclear": perhaps: tensors of one kind with different first dims, structures that could be samples or batches.
    * "structure": not: its entries are of different kinds, or share their first dim. A tuple of sequences is a
      structure (what `tuple(zip(*samples))` makes).
    """
    if not is_plain_sequence(value) or not value or any(isinstance(x, SCALARS) for x in value):
        return "structure"
    tensors = [isinstance(x, (Tensor, np.ndarray)) for x in value]
    if any(tensors):
        alike = all(tensors) and len({(x.ndim, x.dtype) for x in value}) == 1
        return "unclear" if alike and value[0].ndim and len({len(x) for x in value}) > 1 else "structure"
    if len({type(x) for x in value}) > 1 or (isinstance(value, tuple) and is_plain_sequence(value[0])):
        return "structure"
    children = [children_of(x) for x in value]
    if isinstance(value[0], Mapping) and len({frozenset(c[0]) for c in children if c}) > 1:
        return "structure"  # one dict per role, as [inputs, {"weights": ..., "name": ...}]
    leaves = [x for entry in value for x in leaves_of(entry)]
    if all(map(has_first_dim, leaves)) and len({len(x) for x in leaves}) == 1:
        return "structure"
    return "samples" if all(map(_is_no_batch, value)) else "unclear"


def _is_no_batch(entry: Any) -> bool:
    """Whether a structure cannot be a batch: sizes that differ, or something single beside less than two tensors."""
    sizes = _sizes(entry)
    if len(set(sizes)) > 1:
        return True
    single = any(_is_single(x) for x in leaves_of(entry))
    return len(sizes) < 2 if single else not sizes


def _is_single(leaf: Any) -> bool:
    """A label, a 0-dim tensor or a plain object. Names, flags and None may go with a whole batch as well."""
    if isinstance(leaf, (str, bytes, bool, type(None))):
        return False
    return not has_first_dim(leaf)


def _sizes(value: Any) -> list[int]:
    """First dims of the tensors, and lengths of the lists of names and numbers."""
    if has_first_dim(value):
        return [len(value)]
    if are_scalars(value):
        return [len(value)]
    children = children_of(value)
    return [n for x in children[1] for n in _sizes(x)] if children else []


def confirmed_lists(values: Sequence[Any]) -> set[int]:
    """Which of the children of one node are sequences of samples because they have the same length.

    As (images, targets): one list of tensors, one of structures, which do not share a first dim; or two lists of
    ragged tensors; or one tensor of images, and targets that all have the same number of boxes.
    """
    lists = [i for i, x in enumerate(values) if are_tensors(x) or (kind_of(x) != "structure" or _same_keys(x))]
    counted = {len(x) for x in values if _counts_samples(x)}
    out = {i for i, x in enumerate(values) if _are_targets(x) and len(x) in counted}
    for length in {len(values[i]) for i in lists}:
        same = [i for i in lists if len(values[i]) == length]
        tensors = [i for i in same if are_tensors(values[i])]
        ragged = [i for i in tensors if kind_of(values[i]) == "unclear"]
        sizes = {len(x) for i in same for x in leaves_of(values[i]) if has_first_dim(x)}
        if (tensors and len(tensors) < len(same) and len(sizes) > 1) or (ragged and len(same) > 1):
            out.update(same)
    return out


def _counts_samples(value: Any) -> bool:
    """Images, ids, labels; not a few weights of parts of the loss."""
    if not has_first_dim(value):
        return False
    floating = value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"
    return value.ndim > 1 or not floating


def _are_targets(value: Any) -> bool:
    """Structures of one form, whose tensors have other first dims than there are structures."""
    if not is_plain_sequence(value) or not value or (isinstance(value, tuple) and is_plain_sequence(value[0])):
        return False
    forms = {(type(x), tuple(children[0]) if (children := children_of(x)) else None) for x in value}
    if len(forms) > 1 or forms.pop()[1] is None:
        return False
    sizes = [n for x in value for n in _sizes(x)]
    return bool(sizes) and len(value) not in sizes


def _same_keys(value: Any) -> bool:
    """A list of dicts with the same keys."""
    if not is_plain_sequence(value) or not value or not all(isinstance(x, Mapping) for x in value):
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


def size_of(batch: Any, memory: Memory) -> int:
    """Number of samples of a batch that is not several loaders'; raises as `batch_size`."""
    votes = _Votes([], [], [], [], [])
    _vote(batch, (), votes, memory, is_tuple_of_tensors(batch))
    lengths = {n for n, _ in votes.lengths + votes.unclear}
    both = [vote for vote in votes.dims if vote[0] in lengths]
    sizes = both or votes.dims + votes.lengths
    if not sizes and votes.unclear:
        raise _two_readings(batch, *votes.unclear[0])
    sizes = sizes or votes.views or votes.names
    if not sizes and memory:
        return size_of(batch, {})
    if not sizes:
        for leaf in leaves_of(batch):
            check_leaf(leaf)
        raise PipelineError(
            f"cannot find the batch dim: the batch ({type(batch).__name__}) holds no tensor with a dim and no sequence "
            "with one entry per sample. A pipeline must cut every batch into microbatches, unless num_microbatches=1."
        )
    counted = Counter(n for n, _ in sizes)
    tied = [n for n in counted if counted[n] == max(counted.values())]
    if len(tied) > 1:  # lists of names and of views may decide
        others = {n for n, _ in votes.names + votes.views}
        tied = [n for n in tied if n in others] or tied
    if len(tied) > 1:
        raise _disagreement(sizes, tied)
    return tied[0]


def check_leaf(value: Any) -> None:
    """Refuse an object that has tensors and is no structure of samples.

    Raises:
        PipelineError: With what to do.
    """
    if not hasattr(value, "__dict__") or callable(value):
        return
    if any(isinstance(x, Tensor) for x in tree_leaves(list(vars(value).values()))):
        raise PipelineError(
            f"the batch holds a {type(value).__name__} with tensors inside, which cannot be cut into microbatches. "
            "Make it a dict, a tuple or a dataclass, give it a method to(device) and only tensors with one entry per "
            "sample, or register it with torch.utils._pytree.register_pytree_node. Batches of which nobody could cut "
            "off a sample (graphs whose edges count the nodes of all) need num_microbatches=1: the stages then work "
            "one after the other, and memory is divided."
        )


def _vote(value: Any, path: Path, votes: _Votes, memory: Memory, structure: bool = False) -> None:
    known = False if structure else memory.get(path)
    if has_first_dim(value):
        if known is not False:
            votes.dims.append((len(value), path))
    elif is_plain_sequence(value) and known:
        votes.lengths.append((len(value), path))
    elif are_scalars(value):
        if known is not False:
            votes.names.append((len(value), path))
    elif (kind := "structure" if known is False else kind_of(value)) != "structure":
        (votes.lengths if kind == "samples" else votes.unclear).append((len(value), path))
    elif not structure and are_tensors(value) and len({len(x) if x.ndim else -1 for x in value}) == 1:
        if value[0].ndim:
            votes.views.append((len(value[0]), path))
    elif children := attributes_of(value):
        confirmed = confirmed_lists(children[1])
        for i, (key, x) in enumerate(zip(children[0], children[1], strict=True)):
            if i in confirmed and memory.get((*path, key)) is not False:
                votes.lengths.append((len(x), (*path, key)))
            else:
                _vote(x, (*path, key), votes, memory)


# -- parts with sample counts of their own
def parts_of(batch: Any) -> dict[Any, int] | None:
    """Samples in each part of what several loaders give ([batch, batch] or {"a": batch, "b": batch}), if they differ.

    Parts are structures of tensors that agree about the size in each, and are alike: the same structure, or tensors of
    two or more dims that differ in the first only. A dict beside the samples with a table in it is not.
    """
    if not isinstance(batch, Mapping) and not is_plain_sequence(batch):
        return None
    keys, values, _ = children_of(batch) or ([], [], None)
    filled = [(k, x) for k, x in zip(keys, values, strict=True) if not isinstance(x, SCALARS)]
    if len(filled) < 2 or confirmed_lists(values) or kind_of(batch) == "samples":
        return None
    sizes: dict[Any, int] = {}
    for key, x in filled:
        found = set(_sizes(x))
        if children_of(x) is None or are_scalars(x) or len(found) != 1 or any(map(_is_single, leaves_of(x))):
            return None
        if is_plain_sequence(batch) and len(_sizes(x)) < 2:
            return None  # one tensor in each entry of a list: as likely a sample
        sizes[key] = found.pop()
    alike = all(_alike(filled[0][1], x) for _, x in filled[1:])
    return sizes if alike and len(set(sizes.values())) > 1 else None


def _alike(a: Any, b: Any) -> bool:
    return _skeleton(a) == _skeleton(b) or bool(_tensor_kinds(a) & _tensor_kinds(b))


def _skeleton(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return (value.dtype, value.ndim)
    children = None if are_scalars(value) else children_of(value)
    return (type(value), [(k, _skeleton(x)) for k, x in zip(children[0], children[1], strict=True)] if children else 0)


def _tensor_kinds(value: Any) -> set[Any]:
    return {(x.dtype, tuple(x.shape[1:])) for x in leaves_of(value) if has_first_dim(x) and x.ndim > 1}


# -- errors
def _disagreement(sizes: Sequence[tuple[int, Path]], tied: Sequence[int]) -> PipelineError:
    said = "; ".join(f"{n} by {', '.join(path_name(p) for m, p in sizes if m == n)}" for n in tied)
    return PipelineError(
        f"cannot tell how many samples the batch has: {said}. A pipeline cuts every batch along its samples, and as "
        "many parts speak for one number as for the other. Give a tensor that belongs to the whole batch a leading dim "
        "of one (table[None]), or keep it in the module as a buffer; give loaders of unlike datasets one batch_size; "
        "or cut nothing, with num_microbatches=1."
    )


def _two_readings(batch: Any, length: int, path: Path) -> PipelineError:
    value = batch
    children = children_of(value)
    for key in path:
        assert children is not None
        value = children[1][children[0].index(key)]
        children = children_of(value)
    firsts = ", ".join(str(_sizes(x)[0]) if _sizes(x) else "no dim" for x in value[:8])
    return PipelineError(
        f"cannot tell how many samples the batch has: {path_name(path)} is a {type(value).__name__} of {length} "
        f"entries of sizes {firsts}{', ...' if length > 8 else ''}. They may be {length} samples or {length} batches, "
        "and the numbers differ. For samples, put a tensor with one entry per sample beside them (their lengths or "
        "labels: (sequences, lengths)); for batches of several loaders, give the loaders one batch_size."
    )
