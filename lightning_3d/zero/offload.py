"""WHERE is what the optimizer steps on?  In the host's memory, if the device's is for the model (`offload_optimizer`).

Two things travel per step and bucket: this rank's gradient, down, once it is reduced, and its new values, up, once the
optimizer has stepped on the host. Both travel on a stream of their own, to and from pinned memory, so that the device
goes on computing. A device that is the host itself (CPU) gets the same copies, without streams.

Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.errors import ConfigurationError

HOST = torch.device("cpu")
_CHUNK = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HostCopy:
    """A rank's range of a bucket on the host: what the optimizer steps on.

    Args:
        shard: The range on the device.
        dtype: In what the optimizer steps; float32 where the shard has less.

    Attributes:
        values: The copy.
    """

    def __init__(self, shard: Tensor, dtype: torch.dtype) -> None:
        self._shard = shard
        self._stream = _stream(shard.device)
        self._rounded = _room(shard.numel(), shard.dtype, shard.device)  # what travels
        self._rounded.copy_(shard)
        self.values = self._rounded
        if dtype != shard.dtype:
            self.values = self._rounded.to(dtype)
        self._known = fingerprint(shard)

    def send(self) -> None:
        """The optimizer has stepped: its values go to the shard. Later work on the device waits for them."""
        if self.values is not self._rounded:
            self._rounded.copy_(self.values)
        _travel(self._rounded, self._shard, self._stream)
        if self._stream is not None:
            _current(self._shard.device).wait_stream(self._stream)
        self._known = fingerprint(self._shard)

    def receive(self, gradient: Tensor, room: Tensor | None) -> Arriving:
        """Begin to bring a gradient of the shard to the host.

        Args:
            gradient: On the device; nobody may change it afterwards.
            room: Where to, if there is some already.
        """
        if room is None:
            room = _room(gradient.numel(), gradient.dtype, gradient.device)
        return Arriving(gradient, room, self._stream)

    def _take(self, known: Tensor) -> None:
        """User code has changed the shard: so must the copy."""
        self._known = known
        now = self._shard.to(HOST)
        if self.values is self._rounded:
            self.values.copy_(now)
        else:  # elements that are what the last step left keep their precision
            torch.where(self.values.to(now.dtype) == now, self.values, now.to(self.values.dtype), out=self.values)


class Arriving:
    """A tensor on its way to the host.

    Args:
        source: On the device.
        room: Pinned memory on the host.
        stream: What the copy runs on; None: it is made at once.
    """

    def __init__(self, source: Tensor, room: Tensor, stream: Any) -> None:
        self.room = room
        _travel(source, room, stream)
        self._arrived = None if stream is None else stream.record_event()

    def wait(self) -> Tensor:
        """The host waits; then the values are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self.room


def follow(copies: Sequence[HostCopy]) -> None:
    """Take over what user code did to the shards since the last step. The host waits for the device, once."""
    if not copies:
        return
    now = [fingerprint(copy._shard) for copy in copies]
    known = [copy._known for copy in copies]
    for copy, mark, changed in zip(copies, now, (torch.stack(now) != torch.stack(known)).tolist(), strict=True):
        if changed:
            copy._take(mark)


def fingerprint(values: Tensor) -> Tensor:
    """A 0-dim integer that is another one where any element has changed: its bits times odd numbers, modulo 2^64.

    One changed element always shows; several hide each other once in 2^63.
    """
    plain = torch.view_as_real(values) if values.is_complex() else values
    bits = plain.reshape(-1).view(_BITS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    factors = _factors(values.device)
    for part in bits.split(_CHUNK):
        part = part.to(torch.int64)
        # high bits of float64 count among the low ones, too: there a product keeps nothing but their parity
        total = total * factors[0] + ((part ^ (part >> 32)) * factors[: len(part)]).sum()
    return total


def check_steps_on_host(optimizer: Optimizer, devices: Iterable[torch.device]) -> None:
    """Refuse what a torch optimizer cannot do on the host while the model is on a device.

    Raises:
        ConfigurationError: Options that need parameters on the device.
    """
    if all(device.type == "cpu" for device in devices):
        return
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if group.get("capturable"):
            raise ConfigurationError(
                f"{name}(capturable=True) needs its parameters on the device (it is for CUDA graphs), but with "
                "offload_optimizer=True they are on the host. Remove capturable, or offload_optimizer."
            )
        there = [key for key, value in group.items() if isinstance(value, Tensor) and value.device.type != "cpu"]
        if there:
            raise ConfigurationError(
                f"{', '.join(there)} of {name} is a tensor on {group[there[0]].device}, but with "
                "offload_optimizer=True the optimizer steps on the host. Give a number, or a tensor on the CPU."
            )


def check_offload(optimizers: Iterable[Any], device: torch.device, scaler: Any) -> None:
    """Warn where offloading has no use, and refuse optimizers that unscale fp16 gradients in their own kernel.

    The scale is on the device, they are not.

    Args:
        optimizers: The module's.
        device: This rank's.
        scaler: Scales gradients, or None.

    Raises:
        ConfigurationError: A fused optimizer, and gradients that are scaled.
    """
    if device.type == "cpu":
        rank_zero_warn(
            "offload_optimizer=True saves nothing on the CPU, where the model is in the host's memory, too: it costs a "
            "copy of the parameters. It is for GPUs."
        )
        return
    for optimizer in optimizers:
        inner = getattr(optimizer, "_optimizer", optimizer)
        if scaler is not None and getattr(inner, "_step_supports_amp_scaling", False):
            raise ConfigurationError(
                f"{type(inner).__name__}(fused=True) unscales the gradients of precision='16-mixed' in its kernel, "
                "which reads the scale on the device; with offload_optimizer=True it runs on the host. Remove fused, "
                "or use precision='bf16-mixed', which needs no scale."
            )


def _room(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory on the host that `device` can read and write by itself."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def _travel(source: Tensor, target: Tensor, stream: Any) -> None:
    if stream is None:
        target.copy_(source)
        return
    on_device = source if source.device.type != "cpu" else target
    stream.wait_stream(_current(on_device.device))  # which has to write it first, or may still read it
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    on_device.record_stream(stream)


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _current(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20210118)
    return (torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator) * 2 + 1).to(device)
