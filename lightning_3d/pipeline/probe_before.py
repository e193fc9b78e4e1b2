"""WHAT was there before, and is something else now?  Buffers, attributes and memory around an event without data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.events import Event

if TYPE_CHECKING:
    from lightning_3d.pipeline.probe_run import TraceRun


def shares_memory(run: TraceRun, event: Event, inputs: list[Any]) -> bool:
    """Whether values of the event are views of its arguments, or of each other."""
    made = [run.fake_of[leaf.payload] for leaf in event.leaves if leaf.kind == "value"]
    given = {sharding.local(x).untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}
    storages = [sharding.local(x).untyped_storage()._cdata for x in made]
    return len(set(storages)) < len(storages) or not given.isdisjoint(storages)


def buffers_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which object every buffer is, and how often it was changed in place."""
    return {n: (id(x), -1 if x.is_inference() else x._version) for n, x in module.named_buffers()}


def differ(before: list[Any], now: list[Any]) -> bool:
    """Whether these are other objects."""
    return len(before) != len(now) or any(a is not b for a, b in zip(before, now, strict=True))


def attributes_of(module: nn.Module) -> dict[tuple[int, str], tuple[Any, list[Any]]]:
    """Python attributes of all submodules, and what is in those that are lists or dicts."""
    skipped = ("_parameters", "_buffers", "_modules", "_non_persistent")
    return {
        (id(m), key): (value, tree_flatten(value)[0] if isinstance(value, (list, dict)) and value else [])
        for m in module.modules()
        for key, value in m.__dict__.items()
        if not key.startswith(skipped) and key != "forward"
    }
