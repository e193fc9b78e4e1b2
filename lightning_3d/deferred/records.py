"""DO all ranks remember the same?  If not (nobody seeded), rank zero's records count, as its weights do."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from lightning_3d.comm import Communicator
from lightning_3d.deferred.cell import Window
from lightning_3d.deferred.files import Source
from lightning_3d.deferred.kept import checksum_of
from lightning_3d.deferred.tensor import Deferred
from lightning_3d.errors import ConfigurationError

_SAMPLE = 512
"""Elements at the beginning, the middle and the end of a tensor in a mapped file that are compared, not all."""


def agree_on_records(module: nn.Module, world: Communicator) -> None:
    """Make the parameters without values come to the same values on all ranks.

    Collectives: an all-gather of a digest over `world`; if they differ, a broadcast of what rank zero remembers (some
    5 kB per parameter, and the tensors that it copied from).

    Raises:
        ConfigurationError: On some ranks other parameters are without values.
    """
    windows = {n: p.window for n, p in module.named_parameters() if isinstance(p, Deferred)}
    names = world.all_gather_object(hashlib.sha256(repr(list(windows)).encode()).hexdigest())
    if len(set(names)) > 1:
        raise ConfigurationError(
            f"large parameters of {type(module).__name__} were built in configure_model on some ranks and elsewhere on "
            f"others (rank zero has {len(windows)} that get their values in set-up). Build the same model on all "
            "ranks: look for code that depends on the rank (`if self.global_rank == 0:`)."
        )
    digests = world.all_gather_object(hashlib.sha256(dumps(windows, sampled=True)).hexdigest())
    if len(set(digests)) == 1:
        return
    data = world.broadcast_object(dumps(windows) if world.rank == 0 else b"", 0)
    if world.rank != 0:
        for name, window in loads(data).items():
            parameter = module.get_parameter(name)
            assert isinstance(parameter, Deferred)
            parameter.window = window


def dumps(windows: Mapping[str, Window], sampled: bool = False) -> bytes:
    """Records as bytes, without the number of the device.

    Args:
        windows: By the name of their parameter.
        sampled: Only to be compared: some elements of a tensor stand for all.
    """
    out = io.BytesIO()
    _Pickler(out, sampled).dump(dict(windows))
    return out.getvalue()


def loads(data: bytes) -> dict[str, Window]:
    """Records of another rank, for this rank's device."""
    found: dict[str, Window] = pickle.loads(data)
    return found


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, sampled: bool) -> None:
        super().__init__(out, protocol=4)
        self._sampled = sampled

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload):
            namespace, _, name = value._schema.name.partition("::")
            return (_operation, (namespace, name, value._overloadname))
        if isinstance(value, torch.device):
            return (_device, (value.type,))
        if isinstance(value, Source) and self._sampled:
            return (tuple, (value.known_as(),))  # every node may have a copy of its own
        if isinstance(value, Tensor) and self._sampled:
            return (tuple, (_fingerprint(value),))
        if type(value) is Tensor and value.device.type not in ("cpu", "meta"):
            return (_tensor, (value.cpu(), value.device.type))
        return NotImplemented


def _fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """What a tensor is; torch's own way to pickle one gives other bytes every time."""
    form = (tuple(tensor.shape), tensor.stride(), str(tensor.dtype))
    if tensor.is_meta:
        return form
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.untyped_storage().resizable():
        return (*form, checksum_of(tensor))  # no file: rows anywhere may differ between ranks
    flat = tensor.detach().cpu().reshape(-1)
    starts = (0, flat.numel() // 2, max(flat.numel() - _SAMPLE, 0)) if flat.numel() > 3 * _SAMPLE else (0,)
    parts = [flat[i : i + _SAMPLE] if len(starts) > 1 else flat for i in starts]
    return (*form, *(part.clone().view(torch.uint8).numpy().tobytes() for part in parts))


def _operation(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _device(kind: str) -> torch.device:
    return torch.device(kind) if kind in ("cpu", "meta") else torch.device(kind, _current(kind))


def _current(kind: str) -> int:
    return int(torch.get_device_module(kind).current_device())


def _tensor(value: Tensor, kind: str) -> Tensor:
    return value.to(_device(kind))
