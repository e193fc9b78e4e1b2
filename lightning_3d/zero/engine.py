"""WHEN is a gradient reduced, published, and a parameter gathered?  The state machine around the buckets.

    begin() -> (backward)* -> finish() -> publish() -> optimizer.step -> parameters gathered

Hooks on the parameters take each gradient as it is ready. With `reducing` on, a bucket's reduction starts as soon as
its last gradient is there, so it overlaps the rest of the backward: in stages 0 and 1 in the last backward of an
optimizer step, from stage 2 on in every backward, in a pipeline in that of every window and microbatch. Buckets are
launched in one fixed order on all ranks: that of the gradient that comes last in each (parameters registered first get
their gradient last).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.comm import Communicator
from lightning_3d.zero.bucket import Bucket
from lightning_3d.zero.piece import Slot
from lightning_3d.zero.share import Share
from lightning_3d.zero.shown import Shown
from lightning_3d.zero.steps import Steps

_PATIENCE = 1.0
"""Seconds a backward waits for a reduction before it takes another buffer."""


class Zero(Steps):
    """Reduces gradients over the data-parallel axis and shards the optimizers' state (ZeRO stages 0 to 3).

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. Collectives per
    optimizer step over dp: stage 0 all-reduces all gradients, stage 1 reduce-scatters them and all-gathers the new
    parameters; both send 2 (n-1)/n of the parameters' bytes per rank. Stage 2 reduce-scatters after every backward, so
    with a backwards per step (batches, microbatches of a pipeline) it sends (1 + a) (n-1)/n. Stage 3 gathers parameters
    for every forward and backward of a batch in place of once: 3 a (n-1)/n, in a pipeline (one gather for all
    microbatches) (a + b) (n-1)/n with b batches. One byte per parameter goes over `control`.

    Args:
        optimizers: The user's optimizers. In stage 1 their groups hold `Piece`s afterwards, at the same places.
        share: What this rank holds, and with whom.
        stage: 0, 1, 2 or 3.
        publish_later: The backward runs before Lightning zeroes gradients (pipeline), so they are kept apart from
            `.grad` until `publish`.
        watched: Hooks of the user may look at `.grad`, so it is shown to them whole.
        keeps: They may look at it between the backwards of a step, so stage 2 reduces after the last one only.
        master_weights: Parameters of less than float32 precision are stepped as float32 copies.
        float32_gradients: Their gradients are added up and reduced in float32.
        offload: The optimizers' state, and what they step on, is in the host's memory; they step there.
        bucket_bytes: Size at which a bucket is closed.
        in_flight: Reductions that may be under way at once (each keeps a full-size gradient buffer).

    Raises:
        ConfigurationError: An optimizer looks at more than the part of the model that this rank holds, or holds
            tensors that are not the module's.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        share: Share,
        stage: int,
        *,
        publish_later: bool = False,
        watched: bool = False,
        keeps: bool = False,
        master_weights: bool = False,
        float32_gradients: bool = False,
        offload: bool = False,
        bucket_bytes: int = 4 << 20,
        in_flight: int = 3,
    ) -> None:
        super().__init__(
            optimizers,
            share,
            stage,
            publish_later=publish_later,
            keeps=keeps,
            master_weights=master_weights,
            float32_gradients=float32_gradients,
            offload=offload,
            bucket_bytes=bucket_bytes,
        )
        self._control, self._in_flight, self._later = share.control, in_flight, publish_later
        self._turn: list[Bucket] = []  # the buckets the backward under way may launch, in order
        self._pool: list[Tensor] = []
        self._flying: list[Bucket] = []
        self._next = 0
        self._patience = _PATIENCE
        self._limits: list[int] = []  # stage 3: how many buckets of the turn the first units of the sequence have
        self.reducing = self._taking = False
        self.gradient_bytes = self.gradient_peak = 0
        self.rescaled: Tensor | None = None  # what a `backward` hook multiplied the losses of accumulated batches with
        self.shown = Shown(watched and not self.passive, self.buckets)
        for optimizer in self.optimizers:
            self._take_over(optimizer)
        self._divide_frozen()

    # -- parameters
    def _after_step(self, optimizer: Optimizer) -> None:
        """All-gather the new parameters, in the order the next forward needs them."""
        storages = [bucket.storage for bucket in reversed(self._of_optimizer[optimizer]) if bucket.storage is not None]
        if self.units is not None:
            for storage in storages:
                storage.stepped()
            self.units.refresh()  # the others are gathered when they are needed
            return
        with self.data.ledger.during("optimizer"):
            for storage in storages:
                storage.stepped()
                storage.gather_start()  # while the next is on its way from the host
            for storage in storages:
                storage.gather_wait()

    # -- gradients
    def _after_zeroing(self, optimizer: Optimizer) -> None:
        # in a pipeline the first of the batches that are accumulated has run before Lightning zeroes
        self.shown.zeroed(self._of_optimizer[optimizer], accumulated=not self._later)

    def begin(self) -> None:
        """Before a forward that a backward will follow: take over parameters that are new or newly trainable."""
        for optimizer in self.optimizers:
            if any(self._is_new(p) for group in optimizer.param_groups for p in group["params"]):
                self._adopt(optimizer)
                self._divide_frozen()

    def set_aside(self, keep: bool) -> None:
        """Clear the module's `.grad` before a pipeline schedule, which runs ahead of Lightning's `zero_grad`.

        Args:
            keep: Somebody looks at the old gradients when they are zeroed: `put_back` them after the schedule. This
                costs a second gradient buffer in stage 0; otherwise its memory is used again at once.
        """
        self.shown.collect()
        self._taking = True
        for bucket in self.buckets:
            if bucket.storage is None and keep and bucket.gradients is None:
                bucket.published = None
            for slot in bucket.slots:
                slot.aside = slot.parameter.grad if keep else None
                slot.parameter.grad = None
                self.shown.set_aside(slot)

    def put_back(self) -> None:
        """Show again what `set_aside` kept."""
        self._taking = False
        for slot in self.slots.values():
            if slot.aside is not None:
                slot.parameter.grad, slot.aside = slot.aside, None
        self.shown.put_back()

    def start_reducing(self) -> None:
        """The backward that follows is the last before `finish`: reduce each bucket as it fills."""
        self._arm()
        self.reducing = True

    @contextmanager
    def gathering_backward(self, last: bool) -> Iterator[None]:
        """Around a backward: its gradients are taken into the buckets.

        In stage 3 parameters are gathered while this is open, where a forward has begun it.

        Args:
            last: The step ends with it.
        """
        self._taking = True
        try:
            with self._gathering(last):
                yield
        finally:
            self._taking = False

    @contextmanager
    def _gathering(self, last: bool) -> Iterator[None]:
        units = self.units
        if units is None or not units.is_open:
            yield
            return
        buckets = {b.storage: b for b in self.buckets}
        order = [[buckets[s] for s in storages if s in buckets] for storages in units.begin_backward(self._passed)]
        if self.reducing:
            first = [bucket for unit in order for bucket in unit]
            self._arm([*first, *(b for b in self.buckets if b not in first)])
            self._limits = [0, *itertools.accumulate(map(len, order))]
        with units.active():
            yield
        units.end(close=last)

    def _passed(self, count: int) -> None:
        """The backward has passed so many units of stage 3: their buckets are reduced with what they have."""
        if self.reducing:
            while self._next < self._limits[count]:
                self._launch(self._turn[self._next])
                self._next += 1

    @contextmanager
    def backward_of(self, window: int) -> Iterator[None]:
        """Around the backward of one window and microbatch, the same on all replicas: what it gives is reduced."""
        self._arm([bucket for bucket in self.buckets if window in bucket.windows])
        self.reducing = True
        try:
            yield
            for bucket in self._turn[self._next :]:
                self._launch(bucket)
        finally:
            self.reducing = False
            self._arm()

    def _arm(self, buckets: list[Bucket] | None = None) -> None:
        self._turn, self._next = self.buckets if buckets is None else buckets, 0
        self._patience = _PATIENCE
        for bucket in self._turn:
            bucket.launched = False
            for slot in bucket.slots:
                slot.fired = False

    def _on_gradient(self, slot: Slot) -> None:
        # frozen between forward and backward, or let into a sharded region and not used: there is no gradient
        if not _expects(slot) or slot.parameter.grad is None:
            return
        if not (self._taking or self.reducing):  # a backward of user code, for something else
            slot.stray = slot.parameter.grad
            return
        slot.stray = None
        bucket = slot.bucket
        if self.reducing and bucket.launched:
            raise RuntimeError(
                f"parameter {slot.name!r} got a gradient in one backward after its gradient was reduced. Reentrant "
                "activation checkpointing does this (use checkpoint(..., use_reentrant=False)), and a `backward` hook "
                "that runs two backwards (add the losses, and run one). With zero_stage=3, where a block's gradients "
                "are reduced when the backward comes to the block before it, also a hook that reads weights of another "
                "block (use zero_stage=2)."
            )
        bucket.write(slot, self._take)
        slot.fired = True
        if self.reducing:
            while self._next < len(self._turn):
                bucket = self._turn[self._next]
                if not all(s.fired or not _expects(s) for s in bucket.slots):
                    break
                self._launch(bucket)
                self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        if bucket.flight is not None:  # of the microbatch before
            bucket.land(self._give)
            self._flying.remove(bucket)
        with self.data.ledger.during("reduce"):
            bucket.launch(self._take)
        self._flying.append(bucket)
        if self.units is not None and bucket.storage is not None:
            self.units.launched(bucket.storage)

    def finish(self, final: bool = True) -> None:
        """After a backward that reduces: launch what is left and wait for what is under way. The sums become pending.

        Args:
            final: They will be published: all backwards of the optimizer step are done.

        Collectives: see the class; every rank of the axis calls it, also one whose backward gave no gradient.
        """
        if self.passive:
            return
        with self.data.ledger.during("reduce"):
            touched = self._exchange_flags()
        for bucket in self.buckets:
            # with several optimizers a backward reaches some buckets only; on all ranks the same ones, by now
            if bucket in touched and not bucket.launched:
                self._launch(bucket)
        for bucket in self._flying:
            self._land(bucket)
        self._flying.clear()
        if final:
            with self.data.ledger.during("reduce"):
                for bucket in self.buckets:
                    bucket.sum_holders()
                    bucket.join_rows()
            for bucket in self.buckets:
                bucket.fetch()
        self.gradient_bytes -= sum(buffer.nbytes for buffer in self._pool)
        self._pool.clear()
        self.reducing = False
        self._arm()

    def publish(self, factor: float | Tensor = 1.0) -> None:
        """Add `factor` times the pending gradients to `.grad` of what the optimizers hold."""
        published = [bucket for bucket in self.buckets if bucket.publish(factor)]
        with self.data.ledger.during("show"):
            self.shown.show_reduced(bucket for bucket in published if bucket.storage is not None)

    def unscaled(self, optimizer: Optimizer, factor: Tensor) -> None:
        """What an optimizer holds of the gradients was multiplied with a factor: so is what hooks see of them."""
        self.shown.unscaled(self._of_optimizer[optimizer], factor)

    def _exchange_flags(self) -> set[Bucket]:
        """A parameter counts as used when any rank used it; the others then add zeros to the mean.

        Returns:
            The buckets any rank has something for.
        """
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        if not slots:
            return set()
        flags = torch.tensor([*(s.used for s in slots), *(b.touched for b in self.buckets)], dtype=torch.uint8)
        shared: dict[int, tuple[Communicator, list[int]]] = {}
        for index, slot in enumerate(slots):
            if slot.bucket.holders is not None:
                shared.setdefault(id(slot.bucket.holders), (slot.bucket.holders, []))[1].append(index)
        for index, bucket in enumerate(self.buckets, len(slots)):
            if bucket.holders is not None:
                shared[id(bucket.holders)][1].append(index)
        for holders, indices in shared.values():
            device = getattr(holders, "device", torch.device("cpu"))
            flags[indices] = holders.all_reduce(flags[indices].to(device), "max").cpu()
        self._control.all_reduce(flags, "max")
        of_slots, of_buckets = flags.tolist()[: len(slots)], flags.tolist()[len(slots) :]
        for slot, used in zip(slots, of_slots, strict=True):
            slot.used = bool(used)
        return {bucket for bucket, touched in zip(self.buckets, of_buckets, strict=True) if touched}

    # -- buffers
    def _take(self, bucket: Bucket) -> Tensor:
        """A full-size gradient buffer: the bucket's own in stage 0, else from the pool, else new."""
        if bucket.storage is None:
            if bucket.published is None:
                bucket.published = self._allocate(bucket)
            return bucket.published
        while self.reducing and len(self._flying) >= self._in_flight and self._is_down(self._flying[0]):
            self._land(self._flying.pop(0))
        for index, buffer in enumerate(self._pool):
            fits = buffer.dtype == bucket.gradient_dtype and buffer.device == bucket.device
            if fits and buffer.numel() >= bucket.numel:
                return self._pool.pop(index)[: bucket.numel]
        return self._allocate(bucket)

    def _land(self, bucket: Bucket) -> None:
        bucket.land(self._give)
        if not self.reduces_always and bucket.holders is None:
            bucket.fetch()  # while the backward goes on: nothing will be added

    def _is_down(self, bucket: Bucket) -> bool:
        """Wait for a reduction for a while, so that buffers do not pile up.

        For a while only: a replica whose batch takes another path launches it at the end of its backward, when it waits
        for this one's flags.
        """
        flight = bucket.flight
        assert flight is not None
        if bucket.device.type != "cpu":
            return True  # there only the device's stream waits
        until = time.monotonic() + self._patience
        while not flight.is_completed():
            if time.monotonic() > until:
                self._patience = 0.0
                return False
            time.sleep(1e-4)
        return True

    def _allocate(self, bucket: Bucket) -> Tensor:
        buffer = torch.zeros(bucket.numel, dtype=bucket.gradient_dtype, device=bucket.device)
        self.gradient_bytes += buffer.nbytes
        self.gradient_peak = max(self.gradient_peak, self.gradient_bytes)
        return buffer

    def _give(self, bucket: Bucket) -> None:
        assert bucket.travels is not None
        base = bucket.travels._base
        self._pool.append(bucket.travels if base is None else base)
        bucket.travels = None


def _expects(slot: Slot) -> bool:
    return slot.parameter.requires_grad
