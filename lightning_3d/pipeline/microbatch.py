"""HOW is a batch cut into microbatches?

Tensors and numpy arrays whose first dim is the batch are sliced; so are sequences with one entry per sample (strings,
images of different sizes, target dicts). Everything else (None, numbers, strings, tensors without the batch dim) goes
to every microbatch. The parts of several loaders are cut together, in the same proportions, so that the mean over each
part, and over all samples, is what it is uncut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline.batch_tree import (
    Path,
    are_scalars,
    are_tensors,
    attributes_of,
    children_of,
    has_first_dim,
    is_plain_sequence,
    is_tuple_of_tensors,
    path_name,
)
from lightning_3d.pipeline.samples import Memory, check_leaf, common_size, confirmed_lists, kind_of, parts_of, size_of


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
    common = common_size(batch)
    parts = None if common else parts_of(batch)
    size = common or (math.gcd(*parts.values()) if parts else size_of(batch, memory))
    count = min(count, size)
    edges = [size * i // count for i in range(count + 1)]
    pairs = list(itertools.pairwise(edges))
    if common:
        cut = _Knife(size, pairs, memory).cut_tensors(batch)
    elif parts:
        cut = _cut_parts(batch, parts, size, pairs, memory)
    else:
        cut = _Knife(size, pairs, memory).cut(batch, (), is_tuple_of_tensors(batch))
    return cut, [b - a for a, b in pairs]


class _Knife(NamedTuple):
    """Cuts a batch of `size` into the samples from first to second number of every pair, all in one go."""

    size: int
    pairs: list[tuple[int, int]]
    memory: Memory

    def cut(self, value: Any, path: Path, structure: bool = False, confirmed: bool = False) -> list[Any]:
        """The slices of one node.

        Args:
            value: The node.
            path: Where it is in the batch.
            structure: It is a structure, even if it has as many entries as there are samples.
            confirmed: Its neighbours say it has one entry per sample.
        """
        if isinstance(value, (Tensor, np.ndarray)):
            fits = value.ndim > 0 and len(value) == self.size
            return [value[a:b] for a, b in self.pairs] if self._remember(path, fits, value) else self._whole(value)
        children = attributes_of(value)
        if children is None:
            check_leaf(value)
            return self._whole(value)
        if is_plain_sequence(value) and not structure:
            fits = len(value) == self.size
            fits = fits and (confirmed or self.memory.get(path) is True or _one_entry_per_sample(value, self.size))
            if self._remember(path, fits, value):
                return [type(value)(value[a:b]) for a, b in self.pairs]
        keys, values, rebuild = children
        sure = confirmed_lists(values)
        pairs = zip(keys, values, strict=True)
        columns = [self.cut(x, (*path, k), confirmed=i in sure) for i, (k, x) in enumerate(pairs)]
        return [rebuild([column[i] for column in columns]) for i in range(len(self.pairs))]

    def cut_tensors(self, batch: Any) -> list[Any]:
        """As `cut`, of a list, tuple or dict with nothing but tensors of this size."""
        if type(batch) is list:
            self._remember((), False, batch)
        keys = list(batch) if type(batch) is dict else range(len(batch))
        columns = [self.cut(batch[k], (k,)) for k in keys]
        if type(batch) is dict:
            return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
        return [type(batch)(row) for row in zip(*columns, strict=True)]

    def _whole(self, value: Any) -> list[Any]:
        """The same for every microbatch."""
        return [value] * len(self.pairs)

    def _remember(self, path: Path, fits: bool, value: Any) -> bool:
        """Whether to cut what is at `path`: as earlier batches told, or because it fits now."""
        known = self.memory.get(path)
        if known and not fits:
            raise PipelineError(
                f"{path_name(path)} was cut into microbatches in earlier batches, where its length was the number of "
                f"samples. Now it has {len(value) if _is_sized(value) else 'no'} entries, and the batch {self.size} "
                "samples: it has no batch dim, and earlier steps worked with a part of it. Give a tensor that belongs "
                "to the whole batch a leading dim of one (table[None]), or keep it in the module as a buffer."
            )
        if known is None and (not fits or len(self.pairs) > 1):
            self.memory[path] = fits
        return fits and known is not False


def _is_sized(value: Any) -> bool:
    return has_first_dim(value) or is_plain_sequence(value)


def _one_entry_per_sample(value: Sequence[Any], size: int) -> bool:
    """For a sequence as long as the batch: is it samples, or a structure that happens to have that length?"""
    if are_scalars(value) or kind_of(value) != "structure":
        return True
    if not are_tensors(value):
        return False
    return all(x.ndim == 0 for x in value) or (all(x.ndim for x in value) and any(len(x) != size for x in value))


def _cut_parts(
    batch: Any, parts: Mapping[Any, int], size: int, pairs: Sequence[tuple[int, int]], memory: Memory
) -> list[Any]:
    children = children_of(batch)
    assert children is not None
    keys, values, rebuild = children
    columns = []
    for key, x in zip(keys, values, strict=True):
        each = parts.get(key, size) // size  # samples of this part to one of the smallest steps
        knife = _Knife(each * size, [(each * a, each * b) for a, b in pairs], memory)
        columns.append(knife.cut(x, (key,)) if key in parts else [x] * len(pairs))
    return [rebuild([column[i] for column in columns]) for i in range(len(pairs))]
