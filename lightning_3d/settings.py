"""WHAT did the user choose, beside the layout?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from lightning_3d.recompute import Choice


@dataclass(frozen=True)
class Settings:
    """The arguments of the strategy that are no sizes; see there."""

    num_microbatches: int | str = "auto"
    sequence_parallel: bool | None = None
    tensor_parallel_plan: str | dict[str, str] = "auto"
    strict_tensor_parallel: float | None = None
    exact_dropout: bool = False
    activation_checkpointing: Choice = None
    pipeline_split: str | Sequence[str] = "auto"
    verify: bool | str = "auto"
    bucket_bytes: int | None = None
    timeout: timedelta | None = None
    record_timeline: bool = False
    hang_report_after: float | None = None
    record: bool = True
    master_weights: bool | None = None
    float32_gradients: bool = False
    offload_optimizer: bool = False
    forward_context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)

    @property
    def masters(self) -> bool:
        """Whether parameters of low precision are stepped as float32 copies."""
        return self.master_weights is None or self.master_weights
