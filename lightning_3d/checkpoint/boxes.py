"""WHICH part of a global tensor is here?  Rectangles of it, for torch.distributed.checkpoint (DCP).

Every tensor is written as boxes of its *global* shape under the name it has on one device. A tensor-parallel shard is
a few boxes, a flat ZeRO range of it a few more. Readers ask for boxes too, so any layout reads any layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_3d.tensor import Placement

Box = tuple[tuple[int, ...], Tensor]
"""(offset in the global tensor, this rank's data: a view that can be read and written)."""


class GlobalTensor(torch.Tensor):
    """A tensor of the model as one device would have it, of which this rank holds some boxes.

    Only DCP and `full_tensor` may touch it.

    Args:
        shape: The global shape.
        boxes: What this rank holds; empty for a rank that holds nothing.
        dtype: Element type.
        device: Where `full_tensor` assembles the whole.
        assemble: Adds up the disjoint parts of all ranks in place, or None if this rank holds everything.
    """

    boxes: list[Box]
    _assemble: Callable[[Tensor], Tensor] | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Sequence[Box],
        dtype: torch.dtype,
        device: torch.device,
        assemble: Callable[[Tensor], Tensor] | None = None,
    ) -> GlobalTensor:
        out: GlobalTensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        out.boxes, out._assemble = list(boxes), assemble
        return out

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GlobalTensor({tuple(self.shape)}, {self.dtype}, {len(self.boxes)} boxes here)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(
            f"{func} on a tensor of which every rank holds a part only. Call .full_tensor() on all ranks to get it."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a tensor of a distributed checkpoint cannot be pickled: every rank holds a part of it. Use "
            "save_distributed_checkpoint=False, or call .full_tensor() on all ranks first."
        )

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank. Collective: one all-reduce of its size over all ranks."""
        # integers and booleans travel as they are; the parts are disjoint, so the sum is exact
        dtype = torch.uint8 if self.dtype is torch.bool else self.dtype
        whole = torch.zeros(tuple(self.shape), dtype=dtype, device=self.device)
        for offset, data in self.boxes:
            window = whole
            for dim, (start, length) in enumerate(zip(offset, data.shape, strict=True)):
                window = window.narrow(dim, start, length)
            window.copy_(data)
        if self._assemble is not None:
            self._assemble(whole)
        return whole.to(self.dtype)

    # -- the protocol of DCP
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), data.shape) for offset, data in self.boxes]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), data.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for offset, data in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offset, data in self.boxes:
            if torch.Size(offset) == index.offset:
                return data
        raise ValueError(f"no box at {index.offset} of {index.fqn}")


def flat_boxes(shape: Sequence[int], low: int, high: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The range [low, high) of a flattened tensor as rectangles: (offset, sizes, first element).

    Peels the largest aligned block at each position, so a range is at most `2 * ndim - 1` rectangles.
    """
    shape = tuple(shape)
    if not shape:
        return [((), (), low)] if high > low else []
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    out = []
    while low < high:
        dim = next(d for d, s in enumerate(strides) if low % s == 0 and high - low >= s)
        offset = tuple(low // s % n for s, n in zip(strides, shape, strict=True))
        count = min((high - low) // strides[dim], shape[dim] - offset[dim])
        out.append((offset, (1,) * dim + (count,) + shape[dim + 1 :], low))
        low += count * strides[dim]
    return out


def boxes_of(
    data: Tensor,
    local_shape: Sequence[int],
    low: int,
    global_shape: Sequence[int],
    placement: Placement | None,
    rank: int,
    size: int,
) -> list[Box]:
    """Boxes of the global tensor for a flat range of a (tensor-parallel) shard.

    Args:
        data: Elements `[low, low + data.numel())` of the flattened shard; contiguous.
        local_shape: Shape of the shard.
        low: First element.
        global_shape: Shape of the global tensor.
        placement: How it is cut, or None if it is not.
        rank: This rank on the tensor-parallel axis.
        size: Size of that axis.
    """
    flat = data.detach().reshape(-1)
    shape = tuple(local_shape)
    if placement is None:
        whole = [(tuple(0 for _ in shape), tuple(0 for _ in shape), shape)]
    else:
        whole = placement.rectangles(global_shape, rank, size)
    out: list[Box] = []
    for offset, sizes, first in flat_boxes(shape, low, low + flat.numel()):
        block = flat[first - low : first - low + math.prod(sizes)].view(sizes)
        for at_global, at_local, extent in whole:
            starts = [max(o, a) for o, a in zip(offset, at_local, strict=True)]
            ends = [min(o + s, a + e) for o, s, a, e in zip(offset, sizes, at_local, extent, strict=True)]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            window = block
            for dim, (start, end) in enumerate(zip(starts, ends, strict=True)):
                window = window.narrow(dim, start - offset[dim], end - start)
            target = tuple(g + start - a for g, start, a in zip(at_global, starts, at_local, strict=True))
            out.append((target, window))
    return out
