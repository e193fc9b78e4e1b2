"""WHICH tensors with values does a remembered operation use, and are they still what they were?"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_3d.errors import ConfigurationError

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Kept:
    """A tensor with values that an operation used; it must not change any more.

    Args:
        tensor: It.
        at: Its version when it was used.
        checksum: Of its bytes (changes by `.data` have no version); None if it is not checked.
    """

    tensor: Tensor
    at: int
    checksum: int | None = None

    @property
    def value(self) -> Tensor:
        """The tensor.

        Raises:
            ConfigurationError: It was changed in place meanwhile.
        """
        changed = self.tensor._version != self.at
        if changed or (self.checksum is not None and checksum_of(self.tensor) != self.checksum):
            raise ConfigurationError(
                f"a tensor of shape {tuple(self.tensor.shape)} was copied into a parameter (or one was computed from "
                "it) while the model was built, and was then changed in place. Parameters get their values when "
                "the model is set up, each rank only its part, so the old values are needed: copy a clone of it."
            )
        return self.tensor

    def __reduce__(self) -> Any:
        return (keep, (self.value,))


def keep(tensor: Tensor, large: bool = True) -> Kept:
    """Remember a tensor as it is now.

    Args:
        tensor: The tensor.
        large: It is worth being shared, where changes of it can be seen; small ones are copied.
    """
    if not large or tensor.is_inference() or _is_of_others(tensor):
        with torch.inference_mode(False), _disable_current_modes():
            copied = tensor.detach().clone()
        return Kept(copied, copied._version)
    tensor = tensor.detach()
    checked = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.untyped_storage().resizable()
    return Kept(tensor, tensor._version, checksum_of(tensor) if checked else None)


def checksum_of(tensor: Tensor) -> int:
    """Of a tensor's values."""
    with _disable_current_modes():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)


def _is_of_others(tensor: Tensor) -> bool:
    """Whether its memory is numpy's, say, which changes without a trace. Files in memory are no such memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.untyped_storage().resizable():
        return False
    return not _is_mapped(tensor.data_ptr())


def _is_mapped(address: int) -> bool:
    """Whether an address is in a memory-mapped file, as far as the system tells; copying it would read it."""
    if not _MAPS.exists():
        return False
    for line in _MAPS.read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, last = (int(x, 16) for x in span.split("-"))
        if first <= address < last:
            return inode != "0"
    return False
