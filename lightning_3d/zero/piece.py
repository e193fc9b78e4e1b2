"""WHAT stands for a parameter?  Its place in a bucket, and the part of it that this rank's optimizer holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_3d.zero.bucket import Bucket


class Piece(nn.Parameter):
    """This rank's part of a parameter: what the user's optimizer holds in place of it.

    Its `requires_grad` is the parameter's, since `toggle_optimizer` and freezing callbacks set it on what they find in
    the optimizer.
    """

    slot: Slot

    def __new__(cls, data: Tensor, slot: Slot) -> Piece:
        # quantized weights are no numbers that could be trained
        piece: Piece = torch.Tensor._make_subclass(cls, data, data.is_floating_point() or data.is_complex())
        piece.slot = slot
        return piece

    # it stands for its parameter wherever somebody looks that up among the optimizer's (finetuning callbacks do)
    def __hash__(self) -> int:
        return hash(self.slot.parameter)

    def __eq__(self, other: object) -> Any:
        return True if other is self or other is self.slot.parameter else super().__eq__(other)

    @property
    def requires_grad(self) -> bool:
        return self.slot.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.slot.parameter.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Piece:
        self.slot.parameter.requires_grad_(requires_grad)
        return self


class Slot:
    """One parameter inside a bucket.

    Args:
        bucket: The bucket it lies in.
        name: The parameter's name in the module.
        parameter: The module's parameter.
        offset: Its first element in the bucket's flat buffers.
        counted: Whether this rank counts it in norms (every element of the model is counted on one rank only).

    Attributes:
        low, high: This rank's range `[low, high)` of the flattened parameter (empty where it owns nothing).
        held: What the optimizer holds: the piece, or where there are none the parameter.
        aside: The gradient published before, kept while a pipeline schedule runs ahead of Lightning's `zero_grad`.
        used: Some microbatch since the last publication gave it a gradient, on any rank once flags are exchanged.
        fired: It got its gradient in the backward under way.
        given: The gradients published last had one for it, on all ranks alike.
        rows: Which rows the gradients had since the last publication, 0 or 1, if somebody asks for it (sparse ones).
        given_rows: Which rows `.grad` of `held` has.
        stray: What a backward of user code left in `.grad` (of an adversary, of an estimate): nobody reduces it.
    """

    def __init__(self, bucket: Bucket, name: str, parameter: nn.Parameter, offset: int, counted: bool) -> None:
        self.bucket, self.name, self.parameter, self.offset, self.counted = bucket, name, parameter, offset, counted
        self.shape, self.numel = parameter.shape, parameter.numel()
        self.low, self.high = 0, 0
        self.held: nn.Parameter = parameter
        self.aside: Tensor | None = None
        self.stray: Tensor | None = None
        self.rows: Tensor | None = None
        self.given_rows: Tensor | None = None
        self.used = self.fired = self.given = False

    def note_rows(self, rows: Any) -> Tensor:
        """The gradient has these rows, too; returns all that it has."""
        if self.rows is None:
            self.rows = torch.zeros(self.shape[0], dtype=torch.uint8, device=self.parameter.device)
        self.rows[rows] = 1
        return self.rows

    def publish_rows(self) -> None:
        """They are added to those of `.grad`."""
        before = None if self.held.grad is None else self.given_rows
        if self.rows is not None:
            self.given_rows = self.rows if before is None else before | self.rows
        self.rows = None

    @property
    def owned(self) -> bool:
        return self.high > self.low

    @property
    def has_stray(self) -> bool:
        """Its `.grad` has a part that was not reduced."""
        return self.stray is not None and self.parameter.grad is self.stray

    @property
    def value(self) -> Tensor:
        """This rank's range of the parameter's values, flat, in the precision the optimizer steps on."""
        return self.held.detach().reshape(-1)

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's place in a full-size buffer, in its shape."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)

    def part(self, shard: Tensor) -> Tensor:
        """This rank's range of the parameter in a shard-size buffer, flat."""
        start = self.offset + self.low - self.bucket.low
        return shard[start : start + self.high - self.low]
