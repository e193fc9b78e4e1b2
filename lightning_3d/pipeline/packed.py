"""HOW are sequences packed in glue code?  By indices every rank computes from the lengths, which all of them know.

torch makes the data and the sizes of a `PackedSequence` in one call. For a pipeline the data belongs to a stage, and
the sizes are known everywhere: the next module needs their values. The total and the longest length are read as
numbers, so a batch with others gets a plan of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline.phantom import Phantom

_functions: Any = torch._C._VariableFunctions
_pack, _unpack = _functions._pack_padded_sequence, _functions._pad_packed_sequence
Pair = tuple[Tensor, Tensor]


def spelled_out(func: Any) -> Callable[..., Any] | None:
    """Another function that does the same in several calls, each of which is an event of its own."""
    return _SPELLED_OUT.get(func)


def _packed(data: Tensor, lengths: Tensor, batch_first: bool) -> Pair:
    _known(lengths, "the lengths")
    time_first = data.transpose(0, 1) if batch_first else data
    steps, samples = time_first.shape[:2]
    (lengths.sum().item(), lengths.max().item())  # decide the shapes: read, so that they are part of the path
    with torch._C.DisableTorchFunction():
        places, sizes = _pack(torch.arange(steps * samples).view(steps, samples), lengths, False)
    return time_first.flatten(0, 1).index_select(0, places.to(data.device)), sizes


def _padded(data: Tensor, sizes: Tensor, batch_first: bool, value: float, total_length: int) -> Pair:
    _known(sizes, "the batch sizes of a PackedSequence")
    with torch._C.DisableTorchFunction():
        places, lengths = _unpack(torch.arange(1, len(data) + 1), sizes, False, 0, total_length)
    rows = torch.cat([data.new_full((1, *data.shape[1:]), value), data])
    out = rows.index_select(0, places.flatten().to(data.device)).unflatten(0, places.shape)
    return (out.transpose(0, 1) if batch_first else out), lengths


def _known(numbers: Tensor, what: str) -> None:
    if isinstance(numbers, Phantom):
        raise PipelineError(
            f"{what} are computed by the model, or inside of a module: then the shape of the packed data is known to "
            "one stage only. Take the lengths from the batch, or pack and pad again inside of one module."
        )


_SPELLED_OUT: dict[Any, Callable[..., Any]] = {_pack: _packed, _unpack: _padded}
