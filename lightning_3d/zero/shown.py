"""WHAT does a hook find in `.grad`?  The whole gradient, while somebody is known to look.

Gradients live in buckets, and with ZeRO-1 the optimizer holds parts of them. A hook that reads or changes `p.grad`
would find nothing there and its changes would be lost in silence. So, only where hooks of the user may look, the
gradient is put together in `.grad` after each backward, and what the optimizer holds are views of it: changes in place
reach it at once, a new tensor or None put there is taken over by `collect`. So are gradients that the user computed
otherwise. Where the optimizer steps on the host, it holds copies there, and `collect` takes over all changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigurationError
from lightning_3d.zero.bucket import Bucket
from lightning_3d.zero.groups import check_reduced
from lightning_3d.zero.offload import fingerprint
from lightning_3d.zero.piece import Piece, Slot


class Shown:
    """The gradients that stand in `.grad` of the module's parameters.

    Args:
        wanted: Somebody may look; otherwise every method does nothing.
        buckets: All there are.
    """

    def __init__(self, wanted: bool, buckets: Sequence[Bucket]) -> None:
        self.wanted, self._buckets = wanted, buckets
        self._shown: dict[Slot, Tensor] = {}
        self._aside: set[Slot] = set()
        self._whole: dict[Bucket, Tensor] = {}
        self._mirrors: dict[Bucket, _Mirror] = {}

    def show_reduced(self, buckets: Iterable[Bucket]) -> None:
        """The published gradients of buckets whose pieces hold them, whole.

        Collectives: per bucket an all-gather over dp of the gradients' bytes; every rank gives the same buckets.
        """
        if not self.wanted:
            return
        for bucket in buckets:
            assert bucket.storage is not None
            whole = torch.zeros(bucket.numel, dtype=bucket.storage.master.dtype, device=bucket.device)
            shard = whole[bucket.low : bucket.high]
            place = shard if bucket.storage.host is None else torch.zeros_like(bucket.storage.master)
            for slot in bucket.slots:
                if slot.owned and slot.held.grad is not None:
                    part = slot.part(place)
                    part.copy_(slot.held.grad.reshape(-1))
                    slot.held.grad = part.view(slot.held.shape)
            self._whole[bucket] = whole
            if place is not shard:
                self._mirrors[bucket] = _Mirror(bucket, shard, place)
            bucket.published = None  # its memory is the hook's now
            bucket.owners.all_gather_start(whole, shard).wait()
            for slot in bucket.slots:
                if slot.given:
                    self._show(slot, slot.view(whole))

    def show_local(self, buckets: Iterable[Bucket]) -> None:
        """This rank's sums of batches that are being accumulated, as DDP shows them."""
        if not self.wanted:
            return
        for bucket in buckets:
            for slot in bucket.slots:
                if bucket.gradients is not None and slot in bucket.filled and slot.parameter.grad is None:
                    self._show(slot, slot.view(bucket.gradients))

    def collect(self) -> None:
        """Take over what a hook put in place of a shown gradient, or where none was.

        Raises:
            ConfigurationError: The optimizer steps on the host, and cannot take it over.
        """
        for slot, gradient in list(self._shown.items()):
            now = slot.parameter.grad
            if now is gradient:
                continue
            if now is None:
                gradient.zero_()
                slot.held.grad = None
                slot.bucket.filled.discard(slot)
                del self._shown[slot]
            elif slot.owned and slot.held.grad is None:  # zeroed since
                del self._shown[slot]
            else:
                gradient.copy_(now)
                slot.parameter.grad = gradient
        for bucket in self._buckets if self.wanted else ():
            for slot in bucket.slots if bucket.storage is not None else ():
                if slot.parameter.grad is not None and slot not in self._shown and not slot.has_stray:
                    self._adopt(slot)
        for mirror in self._mirrors.values():
            mirror.agree()

    def hide(self) -> None:
        """Make room in `.grad` for the next backward.

        Raises:
            ConfigurationError: Another backward has added to what is shown.
        """
        check_reduced("a backward began", [slot.name for slot in self._shown if slot.has_stray])
        self.collect()
        for slot in self._shown:
            slot.parameter.grad = None
        self._shown.clear()
        self._whole.clear()
        self._mirrors.clear()

    def zeroed(self, buckets: Iterable[Bucket], accumulated: bool) -> None:
        """An optimizer has zeroed what it holds: nothing of these is shown any more.

        Args:
            buckets: The optimizer's.
            accumulated: So are the sums of batches that are being accumulated, where they are shown.
        """
        for bucket in buckets:
            for slot in bucket.slots:
                if self._shown.pop(slot, None) is not None and bucket.storage is not None:
                    slot.parameter.grad = None
                    if accumulated:
                        bucket.filled.discard(slot)
            self._whole.pop(bucket, None)
            self._mirrors.pop(bucket, None)

    def unscaled(self, buckets: Iterable[Bucket], factor: Tensor) -> None:
        """This rank's range was multiplied with a factor where the optimizer holds it; so is the rest."""
        for bucket in buckets:
            whole = self._whole.get(bucket)
            if whole is None:
                continue
            by = factor.to(whole.device)
            whole[: bucket.low].mul_(by)
            whole[bucket.high :].mul_(by)
            if bucket in self._mirrors:
                self._mirrors[bucket].agree()

    def whole(self, held: nn.Parameter) -> nn.Parameter:
        """The parameter whose shown gradient contains that of what an optimizer holds, or the latter itself."""
        return held.slot.parameter if isinstance(held, Piece) and held.slot in self._shown else held

    def set_aside(self, slot: Slot) -> None:
        """Leave this parameter's `.grad` to somebody else until `put_back`."""
        self._whole.pop(slot.bucket, None)
        self._mirrors.pop(slot.bucket, None)
        if slot in self._shown:
            del self._shown[slot]
            self._aside.add(slot)

    def put_back(self) -> None:
        """The gradients set aside stand in `.grad` again, where they were kept."""
        for slot in self._aside:
            if slot.parameter.grad is not None:
                self._shown[slot] = slot.parameter.grad
        self._aside.clear()

    def _adopt(self, slot: Slot) -> None:
        """A gradient of the user's own, whole and meant for all replicas alike."""
        storage, gradient = slot.bucket.storage, slot.parameter.grad
        assert storage is not None
        assert gradient is not None
        if storage.host is not None:
            raise ConfigurationError(
                f"parameter {slot.name!r} was given a gradient (name.grad = ...) that no backward computed. With "
                "offload_optimizer=True the optimizer has gradients in the host's memory, and would not see it. Use "
                "offload_optimizer=False, or let manual_backward compute it (of a loss that has this gradient)."
            )
        gradient = gradient.to(storage.master.dtype).contiguous()
        if slot.owned:
            slot.held.grad = gradient.view(-1)[slot.low : slot.high].view(slot.held.shape)
        self._show(slot, gradient)

    def _show(self, slot: Slot, gradient: Tensor) -> None:
        if gradient.dtype != slot.parameter.dtype:
            slot.parameter.grad_dtype = None  # it may be float32 where the parameter has less
        slot.parameter.grad = gradient
        self._shown[slot] = gradient


class _Mirror:
    """A rank's range of gradients twice: as hooks see it on the device, and on the host, where the optimizer steps."""

    def __init__(self, bucket: Bucket, seen: Tensor, held: Tensor) -> None:
        self._bucket, self._seen, self._held = bucket, seen, held
        seen.copy_(held)
        self._marks = self._look()

    def _look(self) -> list[int]:
        return [int(fingerprint(self._seen)), int(fingerprint(self._held))]

    def agree(self) -> None:
        """What was changed in one of them is changed in the other."""
        seen, held = (now != mark for now, mark in zip(self._look(), self._marks, strict=True))
        if seen and held and not torch.equal(self._seen.to(self._held.device), self._held):  # both zeroed: well
            names = ", ".join(repr(slot.name) for slot in self._bucket.slots[:3])
            raise ConfigurationError(
                f"the gradients of {names} (and others of their bucket) were changed twice before a step: in `.grad` "
                "of the module's parameters, and in that of the optimizer's. With offload_optimizer=True these are two "
                "tensors, so it is not known what comes first. Change one kind only: the module's parameters."
            )
        if seen:
            self._held.copy_(self._seen)
        elif held:
            self._seen.copy_(self._held)
        if seen or held:
            self._marks = self._look()
