"""WHO holds this number?  Parameters that travel together, and this rank's part of each.

A bucket is a run of parameters of one dtype and optimizer. With `world` data-parallel ranks its flat buffers have
`world * size` elements, and rank r owns `[r * size, (r + 1) * size)`. One structure serves every stage:

    stage 0   gradients are all-reduced; the optimizer keeps the user's parameters
    stage 1   gradients are reduce-scattered; the optimizer holds a `Piece` per parameter, this rank's part of it,
              and the new parameters are all-gathered after its step
    stage 2   the same, after every backward: between backwards a rank keeps the sums of its range only
    stage 3   and the parameters are gathered for their use only (units.py)

Parameters of less than float32 precision may have float32 masters: then the optimizer holds pieces in stage 0, too (of
the whole parameter), and steps on the masters.

A gradient passes through four states: written (by the hook, into the full-size buffer), launched (reduction under
way), landed (pending, this rank's sum), published (`.grad` of what the optimizer holds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor, nn

from lightning_3d.comm import Communicator, Pending, PendingShard
from lightning_3d.zero.offload import Arriving
from lightning_3d.zero.piece import Slot
from lightning_3d.zero.storage import Storage

ALIGNMENT = 16
"""Elements; slots begin at multiples of it, so that kernels stay vectorised."""


class Bucket:
    """Parameters whose gradients are reduced by one collective.

    Args:
        parameters: (name, parameter, counted), one dtype and device.
        data: The data-parallel axis.
        owners: Who shares the optimizer's state: the data-parallel axis, or in stage 0 an axis of size one.
        whole: Give every parameter to one rank entirely (optimizers that look at whole matrices).
        holders: The axis over pipeline stages that share these parameters, or None.
        windows: The windows of this stage that use them; empty where nobody knows.
        master: The optimizer steps on float32 copies of the parameters.
        gradient_dtype: In what gradients are added up and reduced; None: the parameters' own.
        divided: Stage 3: the parameters may be released.
        offload: The optimizer steps on copies in the host's memory.
        sparse: It takes sparse gradients only: the rows they had are noted (they travel dense).

    Attributes:
        storage: The parameters' memory where the optimizer holds pieces; None where it holds the parameters.
        launched: Its reduction was started in the backward under way.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter, bool]],
        data: Communicator,
        owners: Communicator,
        *,
        whole: bool = False,
        holders: Communicator | None = None,
        windows: Set[int] = frozenset(),
        master: bool = False,
        gradient_dtype: torch.dtype | None = None,
        divided: bool = False,
        offload: bool = False,
        sparse: bool = False,
    ) -> None:
        self.sparse = sparse
        self.data, self.owners, self.whole, self.holders, self.windows = data, owners, whole, holders, windows
        self.sharded = sharded = owners.size > 1
        self.dtype, self.device = parameters[0][1].dtype, parameters[0][1].device
        self.gradient_dtype, self.divided = gradient_dtype or self.dtype, divided
        self.slots: list[Slot] = []
        shards, rank = self.owners.size, self.owners.rank
        self.size = self._deal(parameters, shards) if whole and sharded else self._line_up(parameters, shards)
        self.low, self.high, self.numel = rank * self.size, (rank + 1) * self.size, shards * self.size
        self.gradients: Tensor | None = None  # full size, from first write to landing
        self.filled: set[Slot] = set()  # slots written since `gradients` was taken
        self.pending: Tensor | None = None  # reduced, not yet published
        self.published: Tensor | None = None  # what `.grad` of the held parameters are views of, if it is kept
        self.flight: PendingShard | Pending | None = None
        self.travels: Tensor | None = None  # the buffer that is being reduced
        self.launched = False
        self._arriving: Arriving | None = None  # the pending sum is on its way to the host
        for slot in self.slots:
            low, high = max(slot.offset, self.low), min(slot.offset + slot.numel, self.high)
            if low < high:
                slot.low, slot.high = low - slot.offset, high - slot.offset
        self.storage: Storage | None = None
        if sharded or master or offload or self.gradient_dtype != self.dtype:
            keep = whole or not sharded
            self.storage = Storage(
                self.slots, self.size, self.owners, whole=keep, master=master, divided=divided, offload=offload
            )

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

    # -- gradients
    def write(self, slot: Slot, take: Callable[[Bucket], Tensor]) -> None:
        """Move the parameter's `.grad` into the full-size buffer, adding to what this window put there."""
        gradient = slot.parameter.grad
        assert gradient is not None
        if self.gradients is None:
            self.gradients = take(self)
        view = slot.view(self.gradients)
        slot.used = True
        if gradient.is_sparse:
            if self.sparse:
                slot.note_rows(gradient._indices()[0])
            gradient = gradient.to_dense()
        elif self.sparse:
            slot.note_rows(slice(None))
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
        full = self.gradients
        if self.sharded:
            self.flight = self.data.reduce_scatter_start(full)
        else:
            flight = self.data.all_reduce_start(full)
            self.flight = flight if self.storage is None else PendingShard(flight, lambda: full)
        self.travels, self.gradients, self.launched = full, None, True
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
        assert self._arriving is None, "what is on its way to the host has to be published first"
        add = self.pending is not None
        if self.pending is None:
            used = None if self.offloads else self._used_shard()
            self.pending = self._new_shard() if used is None else used
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
            self.pending = self._new_shard().zero_()
        self.holders.all_reduce(self.pending)

    def join_rows(self) -> None:
        """Of sparse gradients: the rows that any replica, or any other holder, had. Collective over both."""
        for slot in self.slots if self.sparse else ():
            if slot.used:
                rows = slot.note_rows([])
                for axis in (self.data, self.holders):
                    if axis is not None:
                        axis.all_reduce(rows, "max")

    @property
    def offloads(self) -> bool:
        """Its optimizer steps on the host."""
        return self.storage is not None and self.storage.host is not None

    def fetch(self) -> None:
        """The pending sum is final: it begins its way to the host, where its optimizer steps there."""
        if self.offloads and self.pending is not None and self._arriving is None:
            assert self.storage is not None
            assert self.storage.host is not None
            self._arriving = self.storage.host.receive(self.pending, self._used_shard())
            self.pending = self._arriving.room

    def publish(self, factor: float | Tensor = 1.0) -> bool:
        """Hand the pending sums over as `.grad`. A parameter that no rank used keeps what it has (None stays None).

        Returns:
            Whether there was something pending; the same on all ranks.
        """
        if self.pending is None:
            return False
        self.fetch()
        if self._arriving is not None:
            self.pending, self._arriving = self._arriving.wait(), None
        if self.storage is not None:
            self.pending = self.pending.to(self.storage.master.dtype)
        if isinstance(factor, Tensor) or factor != 1.0:
            self.pending.mul_(factor.to(self.pending.device) if isinstance(factor, Tensor) else factor)
        for slot in self.slots if self.sparse else ():
            slot.publish_rows()
        if self.storage is None:
            for slot in self.slots:
                if slot.used:
                    _assign_or_add(slot.parameter, slot.view(self.pending))
        else:
            self._publish_shard(self.pending)
        self.pending = None
        for slot in self.slots:
            slot.given, slot.used = slot.used, False
        return True

    def _used_shard(self) -> Tensor | None:
        """The memory of the gradients before, if nobody has them any more."""
        if self.published is None or any(slot.held.grad is not None for slot in self.slots):
            return None
        used, self.published = self.published, None
        return used

    def _new_shard(self) -> Tensor:
        return torch.empty(self.size, dtype=self.gradient_dtype, device=self.device)

    def _publish_shard(self, pending: Tensor) -> None:
        fresh = all(slot.held.grad is None for slot in self.slots)
        if fresh:  # kept to be used again for the next sums; in stage 3 memory is worth more than that
            again = not self.divided and pending.dtype == self.gradient_dtype
            self.published = pending if again else None
        for slot in self.slots:
            if not (slot.used and slot.owned):
                continue
            new = slot.part(pending).view(slot.held.shape)
            if fresh:
                slot.held.grad = new
            elif slot.held.grad is None:
                slot.held.grad = new.clone()
            else:
                slot.held.grad.add_(new)


def _assign_or_add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None or parameter.grad.data_ptr() == gradient.data_ptr():
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _round_up(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
