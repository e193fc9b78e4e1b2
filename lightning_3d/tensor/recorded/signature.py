"""WHAT kind of call is it?  The tensors of a call, and a key that fixes everything else the program depends on."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.recorded.tape import Refused
from lightning_3d.tensor.sharded import ShardedTensor

Key = tuple[Any, ...]
_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], key: list[Any]) -> None:
    """Append the (local) tensors of a call to `tensors`, and what describes the call to `key`.

    Raises:
        Refused: There is an argument of a type whose state is unknown.
    """
    for value in args:
        _one(value, tensors, key)
    for name, value in kwargs.items():
        key.append(name)
        _one(value, tensors, key)


def _one(value: Any, tensors: list[Tensor], key: list[Any]) -> None:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        key.append((value.shape, value.stride(), value.dtype, value.device, value.requires_grad))
        tensors.append(value)
    elif kind in _VALUES:
        key.append((kind, value))
    elif kind is ShardedTensor:
        shard = value.local
        key.append((shard.shape, shard.stride(), shard.dtype, shard.device, shard.requires_grad))
        key.append((value.placement, value.sources))
        tensors.append(shard)
    elif kind is tuple or kind is list or kind is torch.Size:
        key.append((kind, len(value)))
        for item in value:
            _one(item, tensors, key)
    elif kind is dict:
        key.append((kind, tuple(value)))
        for item in value.values():
            _one(item, tensors, key)
    else:
        raise Refused(f"it gets an argument of type {kind.__name__}, whose state a program cannot follow")


def signature(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], group: TensorGroup, device: str
) -> Key:
    """The key of a call; its tensors are appended to `tensors`.

    Raises:
        Refused: See `flatten`.
    """
    key: list[Any] = [
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.is_inference_mode_enabled(),
        torch._C._get_deterministic_algorithms(),
        group.sequence_dim,
        group.exact_dropout,
    ]
    flatten(args, kwargs, tensors, key)
    if len(tensors) > 1:
        ids = list(map(id, tensors))
        if len(set(ids)) != len(ids):  # one tensor twice
            key.append(tuple(map(ids.index, ids)))
    return tuple(key)


def without_default_dtype(key: Key) -> Key:
    """The rest of a key."""
    return key[1:]


def digest(key: Key) -> str:
    """A short name of a key that is the same on all ranks."""
    return hashlib.sha256(repr(_ordered(key)).encode()).hexdigest()[:16]


def _ordered(value: Any) -> Any:
    """Sets have another order in every process."""
    if isinstance(value, frozenset):
        return sorted(value)
    return tuple(map(_ordered, value)) if type(value) is tuple else value


def rewrapped(value: Any) -> Any:
    """The arguments with new wrappers around shards, which carry no memo of what other blocks made of them."""
    if type(value) is ShardedTensor:
        return ShardedTensor(value.local, value.placement, value.group, value.sources, value.shape)
    if type(value) in (tuple, list):
        return type(value)(map(rewrapped, value))
    if type(value) is dict:
        return {key: rewrapped(item) for key, item in value.items()}
    return value
