"""WHICH smaller batch does an experiment run on?  The user's own, with its long dims cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_LONG = 32
_KEPT = 16


def shorter_batches(batch: Any) -> Iterator[Any]:
    """Batches to try in turn, the smallest first; the last one is `batch` itself.

    Dims longer than 32 keep their first 16 to 31 elements (odd stays odd), equal dims stay equal: first all long dims
    (samples, sequence), then only the leading ones (images need all their pixels). Values are the user's, so ids and
    labels stay valid. Whether the step makes sense of such a batch is for the caller to try.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = {n for t in tensors for n in t.shape if n > _LONG}
    leading = {t.shape[0] for t in tensors if t.ndim and t.shape[0] > _LONG}
    if sizes:
        yield tree_map_only(Tensor, lambda t: _cropped(t, sizes), batch)
    if leading and leading != sizes:
        yield tree_map_only(Tensor, lambda t: _cropped(t, leading), batch)
    yield batch


def _cropped(tensor: Tensor, sizes: set[int]) -> Tensor:
    for dim, n in enumerate(tensor.shape):
        if n in sizes:
            tensor = tensor.narrow(dim, 0, _KEPT + n % _KEPT)
    return tensor
