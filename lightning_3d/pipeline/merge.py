"""HOW are the outputs of microbatches put together?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.pipeline.batch_tree import SCALARS, children_of


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
        children = [children_of(x) for x in outputs]
        if all(c is not None and c[0] == children[0][0] for c in children):  # type: ignore[index]
            merged = [merge(column, sizes, weights) for column in zip(*(c[1] for c in children if c), strict=True)]
            return children[0][2](merged)  # type: ignore[index]
        if isinstance(first, SCALARS) and all(x == first for x in outputs):
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
