"""WHAT was there before, and is something else now?  Buffers, attributes and memory around an event without data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.events import Event

if TYPE_CHECKING:
    from lightning_3d.pipeline.probe_run import TraceRun


_NOT_THE_USERS = ("_parameters", "_buffers", "_modules", "_non_persistent")


def shares_memory(run: TraceRun, event: Event, inputs: list[Any]) -> bool:
    """Whether values of the event are views of its arguments, or of each other."""
    made = [run.fake_of[leaf.payload] for leaf in event.leaves if leaf.kind == "value"]
    given = {sharding.local(x).untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}
    storages = [sharding.local(x).untyped_storage()._cdata for x in made]
    return len(set(storages)) < len(storages) or not given.isdisjoint(storages)


def buffers_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which object every buffer is, and how often it was changed in place."""
    return {n: (id(x), -1 if x.is_inference() else x._version) for n, x in module.named_buffers()}


def kept_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that modules keep in buffers and plain attributes, under the names `kept_tensor` finds them by."""
    found = dict(module.named_buffers())
    for owner, m in module.named_modules():
        for key, value in m.__dict__.items():
            if key.startswith(_NOT_THE_USERS) or not isinstance(value, (Tensor, list, tuple, dict)):
                continue
            for number, x in enumerate(tree_flatten(value)[0]):
                if isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
                    name = f"{owner}.{key}" if owner else key
                    found[name if x is value else f"{name}[{number}]"] = x
    return found


def kept_tensor(module: nn.Module, name: str) -> Tensor:
    """The tensor with a name of `kept_tensors`, whichever object that is by now."""
    path, _, number = name.partition("[")
    owner, _, key = path.rpartition(".")
    value = getattr(module.get_submodule(owner), key)
    found: Tensor = tree_flatten(value)[0][int(number[:-1])] if number else value
    return found


def differ(before: list[Any], now: list[Any]) -> bool:
    """Whether these are other objects."""
    return len(before) != len(now) or any(a is not b for a, b in zip(before, now, strict=True))


def attributes_of(module: nn.Module) -> dict[tuple[int, str], tuple[Any, list[Any]]]:
    """Python attributes of all submodules, and what is in those that are lists or dicts."""
    return {
        (id(m), key): (value, tree_flatten(value)[0] if isinstance(value, (list, dict)) and value else [])
        for m in module.modules()
        for key, value in m.__dict__.items()
        if not key.startswith(_NOT_THE_USERS) and key != "forward"
    }
