"""WHICH tensors make up the state of a run?  Model and optimizers, by the names one device would use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.boxes import Box, GlobalTensor, boxes_of
from lightning_3d.tensor import Placement
from lightning_3d.zero import Slot, Zero

StatePart = Literal["none", "part", "whole"]


@dataclass(frozen=True)
class ParameterRecord:
    """Everything a checkpoint needs to know of one parameter on this rank.

    Args:
        name: Its (first) name in the module.
        parameter: The parameter; absent ones show the global shape and hold nothing.
        global_shape: Shape on one device.
        placement: How it is cut over tp, or None.
        held: This rank has the data.
        counted: Of all (tp, pp) ranks that have these elements, this one writes them.
        slot: Its place in ZeRO's buckets, if it has one.
        dtype: In what it is written, equal on all ranks: float32 where an optimizer may step on a float32 copy.
    """

    name: str
    parameter: nn.Parameter
    global_shape: tuple[int, ...]
    placement: Placement | None
    held: bool
    counted: bool
    slot: Slot | None
    dtype: torch.dtype


@dataclass(frozen=True)
class RunState:
    """What is saved and loaded, and this rank's coordinates.

    Args:
        module: The LightningModule.
        records: One per parameter of the module, in its order, equal on all ranks but for `held` and `counted`.
        keeps_buffer: Whether this rank is the one that writes a key that is no parameter.
        tp: (rank, size) on the tensor-parallel axis.
        dp_rank: Rank on the data-parallel axis.
        assemble: Adds up disjoint parts over all ranks, in place.
        zero: The optimizers' shards; None before `fit`.
        device: This rank's device.
    """

    module: nn.Module
    records: Sequence[ParameterRecord]
    keeps_buffer: Callable[[str], bool]
    tp: tuple[int, int]
    dp_rank: int
    assemble: Callable[[Tensor], Tensor]
    zero: Zero | None
    device: torch.device

    def model(self, whole: bool = False) -> dict[str, Any]:
        """The module's `state_dict`, tensors as `GlobalTensor`s; to write, float32 masters in place of parameters.

        Args:
            whole: Boxes to read into: all that this rank holds. Otherwise to write: every element on one rank only.
        """
        by_id = {id(record.parameter): record for record in self.records}
        out: dict[str, Any] = {}
        for key, value in self.module.state_dict(keep_vars=True).items():
            record = by_id.get(id(value))
            if record is not None:
                out[key] = self._parameter_entry(record, whole)
            elif isinstance(value, Tensor):
                value = value.detach()
                boxes: list[Box] = [((0,) * value.ndim, value)] if whole or self.keeps_buffer(key) else []
                out[key] = GlobalTensor(value.shape, boxes, value.dtype, value.device, self.assemble)
            else:
                out[key] = value
        return out

    def parameter(self, record: ParameterRecord) -> GlobalTensor:
        """One parameter, every element on one rank only."""
        return self._parameter_entry(record, False)

    def masters(self) -> dict[str, tuple[GlobalTensor, Slot, Tensor]]:
        """Room for what a checkpoint says of the parameters this rank steps in float32, and their places."""
        out = {}
        for record in self.records:
            slot = record.slot
            if slot is not None and slot.owned and slot.held.dtype != record.parameter.dtype:
                room = torch.zeros_like(slot.value)
                out[record.name] = (self._entry(record, self.boxes(record, room, slot.low), room.dtype), slot, room)
        return out

    def gradient(self, record: ParameterRecord) -> GlobalTensor:
        """One parameter's gradient as its optimizer holds it, every element on one rank only."""
        slot = record.slot
        held = record.parameter if slot is None else slot.held
        boxes: list[Box] = []
        if held.grad is not None and self._writes(record):
            boxes = self.boxes(record, held.grad.detach(), low_of(slot))
        return self._entry(record, boxes, held.dtype)

    def _entry(self, record: ParameterRecord, boxes: Sequence[Box], dtype: torch.dtype) -> GlobalTensor:
        return GlobalTensor(record.global_shape, boxes, dtype, self.device, self.assemble)

    def _parameter_entry(self, record: ParameterRecord, whole: bool) -> GlobalTensor:
        slot = record.slot
        if not (record.held if whole else self._writes(record)):
            return self._entry(record, [], record.dtype)
        if not whole:
            value = record.parameter.detach() if slot is None else slot.value
            flat = value.reshape(-1).to(record.dtype)
            return self._entry(record, self.boxes(record, flat, low_of(slot)), record.dtype)
        divided = slot is not None and slot.bucket.divided
        flat = (slot.value if slot is not None and divided else record.parameter.detach()).reshape(-1)
        return self._entry(record, self.boxes(record, flat, low_of(slot) if divided else 0), flat.dtype)

    def _writes(self, record: ParameterRecord) -> bool:
        """Replicas share the writing: ZeRO's ranges where there are any, else the first replica writes all."""
        sharded = record.slot is not None and record.slot.bucket.sharded
        return record.held and record.counted and (sharded or self.dp_rank == 0)

    def boxes(self, record: ParameterRecord, flat: Tensor, low: int) -> list[Box]:
        """Boxes for elements `[low, low + len)` of this rank's shard of a parameter (or of a tensor of its shape)."""
        local_shape = tuple(record.parameter.shape)
        return boxes_of(flat, local_shape, low, record.global_shape, record.placement, *self.tp)

    # -- optimizers
    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """State by parameter name: tensors of the parameter's shape as `GlobalTensor`s, others as they are.

        Every rank lists what it has; `optimizer_keys` over all ranks tells the whole.
        """
        out: dict[str, dict[str, Any]] = {}
        for record, held in self._optimized(optimizer):
            state = optimizer.state.get(held)
            if state:
                whole = self.state_of(optimizer, record, held) == "whole"
                out[record.name] = {key: self._state_entry(record, held, value, whole) for key, value in state.items()}
        return out

    def _optimized(self, optimizer: Optimizer) -> Iterator[tuple[ParameterRecord, nn.Parameter]]:
        """(record, what the optimizer holds for it) for all parameters of an optimizer on this rank."""
        by_id = {id(record.slot.held if record.slot else record.parameter): record for record in self.records}
        for group in optimizer.param_groups:
            for held in group["params"]:
                record = by_id.get(id(held))
                if record is not None:
                    yield record, held

    def state_of(self, optimizer: Optimizer, record: ParameterRecord, held: nn.Parameter) -> StatePart:
        """Of what this rank's optimizer may have state: nothing, its part of a parameter, or the whole."""
        steps_whole = None if self.zero is None else self.zero.steps_whole(optimizer, record.name)
        if not held.numel() or steps_whole is False:
            return "none"
        return "whole" if steps_whole else "part"

    def _state_entry(self, record: ParameterRecord, held: nn.Parameter, value: Any, whole: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        low = low_of(record.slot)
        writes = self._writes(record) and held.numel() > 0
        if whole or value.numel() != held.numel() or (value.ndim == 0 and held.ndim != 0):
            # step counters, factored moments, what is stepped as a whole: written by the owner of the first element
            boxes: list[Box] = [((0,) * value.ndim, value.detach())] if writes and low == 0 else []
            return GlobalTensor(value.shape, boxes, value.dtype, value.device, None)
        return self._entry(record, self.boxes(record, value, low) if writes else [], value.dtype)

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Names of the parameters of every group, as one process would number them."""
        assert self.zero is not None
        return self.zero.names_of(optimizer)


def low_of(slot: Slot | None) -> int:
    """The first element of the flattened parameter that this rank's optimizer holds."""
    return 0 if slot is None else slot.low


def parameter_groups(optimizer: Optimizer, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The options of every group, with names in place of parameters."""
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": list(group_names)}
        for group, group_names in zip(optimizer.param_groups, names, strict=True)
    ]


def numbered_groups(groups: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Named groups as a plain `Optimizer.state_dict` numbers them, and the number of every name."""
    numbers: dict[str, int] = {}
    out = []
    for group in groups:
        for name in group["params"]:
            numbers[name] = len(numbers)
        out.append({**group, "params": [numbers[name] for name in group["params"]]})
    return out, numbers
