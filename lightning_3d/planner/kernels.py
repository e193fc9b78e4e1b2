"""HOW LONG does an operation take?  A roofline with measured efficiencies (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from lightning_3d.planner.constants import GENERATIONS, Generation
from lightning_3d.planner.hardware import Gpu

_TILES = ((256, 128, 1.0), (128, 128, 0.86), (128, 64, 0.72), (64, 64, 0.55))
"""Rows and columns of the part of a product that one multiprocessor computes at a time, and how well it does: small
parts load more per operation."""
_FILL = 96
"""Steps of the inner dimension after which a multiprocessor computes at full speed, in elements."""
_START = 4e-6
"""Seconds until a kernel works."""


@dataclass(frozen=True)
class Kernels:
    """The speed of one GPU in one precision.

    Attributes:
        gpu: The card.
        precision: Of matrix products; attention and the rest are at most bf16.
    """

    gpu: Gpu
    precision: str

    @property
    def constants(self) -> Generation:
        """Measured shares of the peaks."""
        return GENERATIONS[self.gpu.generation]

    def matmul(self, rows: int, inner: int, columns: int) -> float:
        """Seconds of `[rows, inner] @ [inner, columns]`."""
        return _matmul(self.gpu, self.precision, rows, inner, columns)

    def attention(self, operations: float, head_dim: int, backward: bool = False) -> float:
        """Seconds of fused attention (FlashAttention: backward computes the scores again, 2.5 x the operations)."""
        constants = self.constants
        share = constants.flash_backward if backward else constants.flash
        return operations * (2.5 if backward else 1.0) / (self._half_peak * share * _of_head(head_dim))

    def scores(self, operations: float, elements: float, head_dim: int, backward: bool = False) -> float:
        """Seconds of attention that writes its scores: two batched products, and softmax with mask and dropout.

        The scores are written and read about 6 times forward, 9 times backward, 2 bytes each.
        """
        products = operations * (2 if backward else 1) / (self._half_peak * self.constants.scores * _of_head(head_dim))
        return products + self.move(elements * 2 * (9 if backward else 6))

    def move(self, bytes_: float) -> float:
        """Seconds of elementwise operations that read and write so many bytes."""
        return bytes_ / (self.gpu.memory_bandwidth * self.constants.memory)

    @property
    def _half_peak(self) -> float:
        return self.gpu.peak("fp32" if self.precision == "fp32" else "fp16")


def _of_head(head_dim: int) -> float:
    """Share of the speed that attention keeps with this size of a head (128 is best)."""
    aligned = 1.0 if head_dim % 32 == 0 else 0.92 if head_dim % 8 == 0 else 0.35
    return aligned * min(1.0, 0.55 + 0.45 * head_dim / 128)


@lru_cache(maxsize=65536)
def _matmul(gpu: Gpu, precision: str, rows: int, inner: int, columns: int) -> float:
    constants = GENERATIONS[gpu.generation]
    shares = {"fp8": constants.matmul_fp8, "fp4": constants.matmul_fp4, "fp8-rowwise": constants.matmul_rowwise}
    share = shares.get(precision, constants.matmul)
    operations = 2.0 * rows * inner * columns
    width = {"fp32": 4, "fp8": 1, "fp8-rowwise": 1, "fp4": 1}.get(precision, 2)
    best = 0.0
    for tall, wide, quality in _TILES:
        tiles = ceil(rows / tall) * ceil(columns / wide)
        waves = ceil(tiles / constants.processors)
        used = rows * columns / (tall * wide) / (waves * constants.processors)
        best = max(best, quality * used)
    rate = (
        gpu.peak(precision) * share * best * inner / (inner + _FILL) * aligned(inner, width) * aligned(columns, width)
    )
    moved = (rows * inner + inner * columns) * width + rows * columns * 2
    return _START + max(operations / rate, moved / (gpu.memory_bandwidth * constants.memory))


def aligned(size: int, width: int = 2) -> float:
    """Share of the speed that a product keeps whose rows in memory have this length.

    Rows of whole 128 bytes are loaded best; without a multiple of 16 bytes the tensor cores cannot be used at all
    (BigScience's models of width 14400 on 8 GPUs, 1800 = 8 x 225 columns each, lost a quarter).
    """
    length = size * width
    return 1.0 if length % 128 == 0 else 0.85 if length % 64 == 0 else 0.62 if length % 16 == 0 else 0.35
