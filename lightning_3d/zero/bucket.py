"""WHO holds this number?  Parameters that travel together, and this rank's part of each.

A bucket is a run of parameters of one dtype and optimizer. With `world` data-parallel ranks its flat buffers have
`world * size` elements, and rank r owns `[r * size, (r + 1) * size)`. One structure serves every stage:

    stage 0   gradients are all-reduced; the optimizer keeps the user's parameters
    stage 1   gradients are reduce-scattered; the optimizer holds a `Piece` per parameter, this rank's part of it,
              and the new parameters are all-gathered after its step
    stage 2   the same, after every backward: between backwards a rank keeps the sums of its range only

A gradient passes through four states: written (by the hook, into the full-size buffer), launched (reduction under
way), landed (pending, this rank's sum), published (`.grad` of what the optimizer holds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.comm import DONE, Communicator, Pending, PendingShard
from lightning_3d.errors import ConfigurationError

ALIGNMENT = 16
"""Elements; slots begin at multiples of it, so that kernels stay vectorised."""


class Piece(nn.Parameter):
    """This rank's part of a parameter: what the user's optimizer holds in place of it.

    Its `requires_grad` is the parameter's, since `toggle_optimizer` and freezing callbacks set it on what they find in
    the optimizer.
    """

    slot: Slot

    def __new__(cls, data: Tensor, slot: Slot) -> Piece:
        piece: Piece = torch.Tensor._make_subclass(cls, data, True)
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
        held: What the optimizer holds: the piece, or in stage 0 the parameter.
        aside: The gradient published before, kept while a pipeline schedule runs ahead of Lightning's `zero_grad`.
        used: Some microbatch since the last publication gave it a gradient, on any rank once flags are exchanged.
        fired: It got its gradient in the backward under way.
        given: The gradients published last had one for it, on all ranks alike.
    """

    def __init__(self, bucket: Bucket, name: str, parameter: nn.Parameter, offset: int, counted: bool) -> None:
        self.bucket, self.name, self.parameter, self.offset, self.counted = bucket, name, parameter, offset, counted
        self.shape, self.numel = parameter.shape, parameter.numel()
        self.low, self.high = 0, 0
        self.held: nn.Parameter = parameter
        self.aside: Tensor | None = None
        self.used = self.fired = self.given = False

    @property
    def owned(self) -> bool:
        return self.high > self.low

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's place in a full-size buffer, in its shape."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)

    def part(self, shard: Tensor) -> Tensor:
        """This rank's range of the parameter in a shard-size buffer, flat."""
        start = self.offset + self.low - self.bucket.low
        return shard[start : start + self.high - self.low]


class Bucket:
    """Parameters whose gradients are reduced by one collective.

    Args:
        parameters: (name, parameter, counted), one dtype and device.
        data: The data-parallel axis.
        sharded: Stages 1 and 2: cut over `data` (False: stage 0).
        whole: Give every parameter to one rank entirely (optimizers that look at whole matrices).
        holders: The axis over pipeline stages that share these parameters, or None.
        windows: The windows of this stage that use them; empty where nobody knows.

    Attributes:
        launched: Its reduction was started in the backward under way.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter, bool]],
        data: Communicator,
        *,
        sharded: bool,
        whole: bool = False,
        holders: Communicator | None = None,
        windows: Set[int] = frozenset(),
    ) -> None:
        self.data, self.sharded, self.whole, self.holders, self.windows = data, sharded, whole, holders, windows
        self.dtype, self.device = parameters[0][1].dtype, parameters[0][1].device
        self.slots: list[Slot] = []
        shards = data.size if sharded else 1
        self.size = self._deal(parameters, shards) if whole and sharded else self._line_up(parameters, shards)
        self.low, self.high = (data.rank * self.size, (data.rank + 1) * self.size) if sharded else (0, self.size)
        self.numel = shards * self.size
        self.parameters: Tensor | None = None  # stage 1: the flat buffer the module's parameters are views of
        self.gradients: Tensor | None = None  # full size, from first write to landing
        self.filled: set[Slot] = set()  # slots written since `gradients` was taken
        self.pending: Tensor | None = None  # reduced, not yet published
        self.published: Tensor | None = None  # what `.grad` of the held parameters are views of
        self.flight: PendingShard | Pending | None = None
        self.travels: Tensor | None = None  # the buffer that is being reduced
        self.launched = False
        self.gathering: Pending | None = None
        for slot in self.slots:
            low, high = max(slot.offset, self.low), min(slot.offset + slot.numel, self.high)
            if low < high:
                slot.low, slot.high = low - slot.offset, high - slot.offset
        if sharded:
            self._flatten()

    def _line_up(self, parameters: Sequence[tuple[str, nn.Parameter, bool]], shards: int) -> int:
        offset = 0
        for name, parameter, counted in parameters:
            self.slots.append(Slot(self, name, parameter, offset, counted))
            offset += _round_up(parameter.numel())
        return _round_up(-(-offset // shards))

    def _deal(self, parameters: Sequence[tuple[str, nn.Parameter, bool]], shards: int) -> int:
        """Largest first to the rank with the least so far (LPT); every share is padded to the largest."""
        share = [0] * shards
        dealt: dict[str, tuple[int, int]] = {}
        for name, parameter, _ in sorted(parameters, key=lambda p: -p[1].numel()):
            rank = share.index(min(share))
            dealt[name] = (rank, share[rank])
            share[rank] += _round_up(parameter.numel())
        size = max(share)
        for name, parameter, counted in parameters:
            rank, start = dealt[name]
            self.slots.append(Slot(self, name, parameter, rank * size + start, counted))
        return size

    def _flatten(self) -> None:
        """Make the parameters views of one buffer (identity kept), and a piece of each."""
        self.parameters = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        shard = self.parameters[self.low : self.high]
        for slot in self.slots:
            view = slot.view(self.parameters)
            view.copy_(slot.parameter.data)
            slot.parameter.data = view
            data = slot.part(shard) if slot.owned else shard[:0]
            # a scalar keeps its shape, else its moments could not be told from the optimizer's `step`
            if slot.owned and (self.whole or not slot.shape):
                data = data.view(slot.shape)
            slot.held = Piece(data, slot)

    def reclaim(self) -> None:
        """Take back parameters whose `.data` user code replaced (pruning, updates by hand), values and all.

        Raises:
            ConfigurationError: The new data has another shape or type.
        """
        if self.parameters is None:
            return
        for slot in self.slots:
            data, place = slot.parameter.data, slot.view(self.parameters)
            if data.data_ptr() == place.data_ptr() and data.dtype == place.dtype and data.shape == place.shape:
                continue
            if data.shape != place.shape or data.dtype != place.dtype:
                raise ConfigurationError(
                    f"the data of parameter {slot.name!r} was replaced during training by a tensor of shape "
                    f"{tuple(data.shape)} and {data.dtype}; its optimizer state is for {tuple(place.shape)} and "
                    f"{place.dtype}. Keep shape and type, or use zero_stage=0."
                )
            place.copy_(data)
            slot.parameter.data = place

    # -- gradients
    def write(self, slot: Slot, take: Callable[[Bucket], Tensor]) -> None:
        """Move the parameter's `.grad` into the full-size buffer, adding to what this window put there."""
        gradient = slot.parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise ConfigurationError(
                f"parameter {slot.name!r} got a sparse gradient (Embedding(sparse=True)?). Gradients are reduced in "
                "dense flat buffers; build the layer with sparse=False."
            )
        if self.gradients is None:
            self.gradients = take(self)
        view = slot.view(self.gradients)
        slot.used = True
        if gradient.data_ptr() == view.data_ptr():  # stage 0: autograd added in place to what was published
            self.filled.add(slot)
            return
        if slot in self.filled:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.filled.add(slot)
        slot.parameter.grad = None

    @property
    def touched(self) -> bool:
        """It has something of the backward under way."""
        return self.launched or bool(self.filled)

    def launch(self, take: Callable[[Bucket], Tensor]) -> None:
        """Start the reduction (mean over the data-parallel ranks)."""
        if self.gradients is None:
            self.gradients = take(self)
        for slot in self.slots:
            # stage 0: a parameter this backward did not reach may still have published gradient in its place
            if slot not in self.filled and slot.parameter.grad is None:
                slot.view(self.gradients).zero_()
        if self.data.size > 1:
            # the mean of (already reduced + new local) is reduced + mean(new local), so stage 0 may reduce repeatedly
            self.gradients.mul_(1 / self.data.size)
        if self.sharded:
            self.flight = self.data.reduce_scatter_start(self.gradients)
        else:
            self.flight = self.data.all_reduce_start(self.gradients)
        self.travels, self.gradients, self.launched = self.gradients, None, True
        self.filled.clear()

    def land(self, give: Callable[[Bucket], None]) -> None:
        """Wait for the reduction; the sum becomes pending."""
        flight, self.flight = self.flight, None
        if flight is None:
            return
        if not isinstance(flight, PendingShard):
            flight.wait()
            self.pending, self.travels = self.travels, None
            return
        add = self.pending is not None
        if self.pending is None:
            free = self.published is not None and all(slot.held.grad is None for slot in self.slots)
            self.pending = self.published if free else torch.empty(self.size, dtype=self.dtype, device=self.device)
            if free:
                self.published = None
        assert self.pending is not None
        flight.finish(self.pending, add=add)
        give(self)

    def sum_holders(self) -> None:
        """Stages that share the parameters: the sum of their parts is the gradient. Collective over the holders.

        Flags are exchanged before, so that all of them know whether any has used one; another gives zeros.
        """
        if self.holders is None or not any(slot.used for slot in self.slots):
            return
        if self.pending is None:
            self.pending = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self.holders.all_reduce(self.pending)

    def publish(self, factor: float | Tensor = 1.0) -> bool:
        """Hand the pending sums over as `.grad`. A parameter that no rank used keeps what it has (None stays None).

        Returns:
            Whether there was something pending; the same on all ranks.
        """
        if self.pending is None:
            return False
        if isinstance(factor, Tensor) or factor != 1.0:
            self.pending.mul_(factor)
        if not self.sharded:
            for slot in self.slots:
                if slot.used:
                    _assign_or_add(slot.parameter, slot.view(self.pending))
        else:
            self._publish_shard(self.pending)
        self.pending = None
        for slot in self.slots:
            slot.given, slot.used = slot.used, False
        return True

    def _publish_shard(self, pending: Tensor) -> None:
        fresh = all(slot.held.grad is None for slot in self.slots)
        if fresh:
            self.published = pending
        elif self.published is None:
            self.published = torch.empty_like(pending)
        for slot in self.slots:
            if not (slot.used and slot.owned):
                continue
            new = slot.part(pending).view(slot.held.shape)
            if fresh:
                slot.held.grad = new
            elif slot.held.grad is None:
                assert self.published is not None
                slot.held.grad = slot.part(self.published).view(slot.held.shape).copy_(new)
            else:
                slot.held.grad.add_(new)

    # -- parameters
    def gather_start(self) -> None:
        """Start collecting everybody's new part of the parameters (after the optimizer's step)."""
        if self.parameters is not None:
            self.gathering = self.data.all_gather_start(self.parameters, self.parameters[self.low : self.high])

    def gather_wait(self) -> None:
        gathering, self.gathering = self.gathering or DONE, None
        gathering.wait()


def _assign_or_add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None or parameter.grad.data_ptr() == gradient.data_ptr():
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _round_up(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
