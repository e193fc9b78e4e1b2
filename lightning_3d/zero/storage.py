"""WHERE do the values of a bucket's parameters live?

flat      everybody's ranges in one buffer, of which the module's parameters are views
shard     this rank's range of it; in stage 3 memory of its own, and `flat` has some only while it is needed
master    what the optimizer steps on: the shard itself, its float32 copy where parameters have less precision, or a
          copy on the host (offload.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lightning_3d.absence import check_have_values, nothing
from lightning_3d.comm import Communicator, Pending
from lightning_3d.deferred import is_deferred
from lightning_3d.errors import ConfigurationError
from lightning_3d.zero.offload import HostCopy
from lightning_3d.zero.piece import Piece, Slot
from lightning_3d.zero.released import ReleasedParameter


class Storage:
    """The flat memory of some parameters of one dtype and device.

    Args:
        slots: Their places; the parameters' data moves here (the objects stay), and `held` becomes a piece.
        size: Elements of one rank's range.
        axis: The ranks that share them; of size one where every replica keeps all.
        whole: Pieces keep the parameter's shape (every parameter belongs to one rank entirely).
        master: The optimizer steps on float32 copies.
        divided: Stage 3: `flat` may be released.
        offload: The optimizer steps on the host.

    Attributes:
        is_whole: The parameters have their values.
        host: What it steps on there.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        size: int,
        axis: Communicator,
        *,
        whole: bool,
        master: bool,
        divided: bool = False,
        offload: bool = False,
    ) -> None:
        first = slots[0].parameter
        self.slots, self._axis, self.divided = slots, axis, divided
        self.dtype, self.device = first.dtype, first.device
        low, high = axis.rank * size, (axis.rank + 1) * size
        make = torch.empty if divided else torch.zeros  # the rest of it is let go at once
        self.flat = make(axis.size * size, dtype=self.dtype, device=self.device)
        self._mine = self.flat[low:high].zero_()
        self._views = [slot.view(self.flat) for slot in slots]
        self._bytes = self.flat.untyped_storage().nbytes()
        self._gathering: Pending | None = None
        self.is_whole = True
        for slot, view in zip(slots, self._views, strict=True):
            _take(slot, view, only_own=divided)
        self.shard = self._mine.clone() if divided else self._mine
        precise = torch.float32 if master else self.dtype
        self.host = HostCopy(self.shard, precise) if offload else None
        self.master = self.shard.to(precise) if self.host is None else self.host.values
        for slot in slots:
            data = slot.part(self.master) if slot.owned else self.master[:0]
            # a scalar keeps its shape, else its moments could not be told from the optimizer's `step`
            if slot.owned and (whole or not slot.shape):
                data = data.view(slot.shape)
            slot.held = Piece(data, slot)

    @property
    def has_master(self) -> bool:
        return self.master is not self.shard

    def reclaim(self) -> None:
        """Take over what user code did to the parameters since the last step: in place, or by replacing `.data`.

        Raises:
            ConfigurationError: The new data has another shape or type.
        """
        if self.is_whole:
            for slot, place in zip(self.slots, self._views, strict=True):
                _take_back(slot, place)
            if self.divided:
                self.shard.copy_(self._mine)
        if self.has_master and self.host is None:  # what is on the host follows when it is needed
            # where the parameter is not what the last step left, it is right and the master is not
            torch.where(self.master.to(self.dtype) == self.shard, self.master, self.shard.float(), out=self.master)

    def stepped(self) -> None:
        """The optimizer has stepped."""
        if self.host is not None:
            self.host.send()
        elif self.has_master:
            self.shard.copy_(self.master)

    def gather_start(self) -> None:
        """Start collecting everybody's values; until `gather_wait` nobody may read the parameters."""
        if self._gathering is None:
            if self.divided:
                self.flat.untyped_storage().resize_(self._bytes)
            self._gathering = self._axis.all_gather_start(self.flat, self.shard)

    def gather_wait(self) -> None:
        """The parameters have everybody's values."""
        if self._gathering is None:
            return
        self._gathering.wait()
        self._gathering = None
        if not self.is_whole:
            self.is_whole = True
            for slot, view in zip(self.slots, self._views, strict=True):
                _restore(slot.parameter, view)

    # -- stage 3
    def release(self, before_read: Callable[[str, str], None]) -> None:
        """Give back the memory of everybody else's values. What user code changed in this rank's range is kept.

        Args:
            before_read: Told the name of a parameter and what somebody wants to do with its values, which are not here.
        """
        self.gather_wait()
        self.reclaim()
        self.is_whole = False
        for slot in self.slots:
            parameter = slot.parameter
            parameter.data = nothing(slot.shape, self.dtype, self.device)
            parameter.__dict__.update(
                parameter_name=slot.name, before_read=before_read, class_while_whole=parameter.__class__
            )
            parameter.__class__ = ReleasedParameter
        self.flat.untyped_storage().resize_(0)

    def dissolve(self) -> None:
        """Every parameter gets memory of its own again; it must be whole."""
        for slot, view in zip(self.slots, self._views, strict=True):
            slot.parameter.data = view.clone()
            slot.held = slot.parameter


def _take(slot: Slot, place: torch.Tensor, only_own: bool) -> None:
    data = slot.parameter.data
    if only_own and is_deferred(data):  # memory that nobody writes to takes none
        place.view(-1)[slot.low : slot.high].copy_(data.reshape(-1)[slot.low : slot.high])
    else:
        place.copy_(data)
    slot.parameter.data = place


def _take_back(slot: Slot, place: torch.Tensor) -> None:
    data = slot.parameter.data
    if data.data_ptr() == place.data_ptr() and data.dtype == place.dtype and data.shape == place.shape:
        return
    check_have_values({slot.name: data})
    if data.shape != place.shape or data.dtype != place.dtype:
        raise ConfigurationError(
            f"the data of parameter {slot.name!r} was replaced during training by a tensor of shape "
            f"{tuple(data.shape)} and {data.dtype}; its optimizer state is for {tuple(place.shape)} and "
            f"{place.dtype}. Keep shape and type, or use zero_stage=0."
        )
    place.copy_(data)
    slot.parameter.data = place


def _restore(parameter: nn.Parameter, view: torch.Tensor) -> None:
    attributes = parameter.__dict__
    parameter.__class__ = attributes.pop("class_while_whole")
    for name in ("parameter_name", "before_read"):
        del attributes[name]
    parameter.data = view
