"""HOW LONG does each atom take on this device?  Measured, for `pipeline_split="measured"`."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_3d.mesh import Mesh
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.events import Event, Trace
from lightning_3d.pipeline.holders import copy_holder, is_opaque
from lightning_3d.pipeline.probe_atom import is_fake
from lightning_3d.pipeline.rng import forked
from lightning_3d.pipeline.trace import Contents
from lightning_3d.probe import ModuleState

_log = logging.getLogger(__name__)
_REPEATS, _SECONDS = 5, 0.5


def measure(trace: Trace, atoms: Mapping[str, nn.Module], mesh: Mesh) -> None:
    """Run every kind of atom forward and backward on this device, and put its seconds into the events.

    Equal modules with equal arguments are run once; the ranks of a replica share them out. The module is left as it
    was. Arguments are invented (zeros for integers, small numbers else).

    Collectives: an exchange of a few numbers over the replica and dp; with tensor parallelism those of the atoms.
    """
    kinds: dict[Hashable, list[Event]] = {}
    for _, event in trace.calls():
        kinds.setdefault(_kind(trace, event, atoms[event.atom]), []).append(event)
    workers, mine = mesh.layout.pp * mesh.layout.dp, mesh.at.pp * mesh.layout.dp + mesh.at.dp
    found: dict[int, float | None] = {}
    for number, events in enumerate(kinds.values()):
        if number % workers == mine:  # tensor-parallel peers run the same ones
            found[number] = _measured(events[0], atoms[events[0].atom], mesh.device)
    parts = [part for dp in mesh.data.all_gather_object(mesh.replica.all_gather_object(found)) for part in dp]
    for number, events in enumerate(kinds.values()):
        seconds = [s for part in parts if (s := part.get(number)) is not None]
        for event in events:
            event.seconds = median(seconds) if seconds else None


def _kind(trace: Trace, event: Event, atom: nn.Module) -> Hashable:
    shapes = tuple((n.rpartition(".")[2], trace.sizes[n]) for n in sorted(event.params))
    inputs = tuple(trace.meta[vid].plain() for vid in sorted(event.reads))
    return (sharding.original_class(atom), shapes, inputs, event.flops, event.moved)


def _measured(event: Event, atom: nn.Module, device: torch.device) -> float | None:
    try:
        return _seconds(event, atom, device)
    except Exception as error:  # the user's code, on invented values
        _log.warning(
            f"pipeline_split='measured': {event.atom} cannot be run by itself on invented values ({error!r:.200}), so "
            "its cost is estimated from its operations."
        )
        return None


def _seconds(event: Event, atom: nn.Module, device: torch.device) -> float:
    assert event.arguments is not None
    leaves, spec = event.arguments
    times: list[float] = []
    with _left_alone(atom), forked(device), torch.enable_grad(), sharding.guarded():
        while len(times) < 2 or (len(times) < 1 + _REPEATS and sum(times[1:]) < _SECONDS):
            fresh = [copy_holder(x) if is_opaque(x) else _real(x, device) for x in leaves]
            args, kwargs = tree_unflatten(fresh, spec)
            _synchronize(device)
            start = time.perf_counter()
            outputs = [x for x in tree_flatten(atom(*args, **kwargs))[0] if isinstance(x, Tensor)]
            wanted = [sharding.local(x) for x in outputs if sharding.local(x).requires_grad]
            inputs = [p for p in atom.parameters() if p.requires_grad]
            if wanted and inputs:
                torch.autograd.grad(wanted, inputs, [torch.ones_like(x) for x in wanted], allow_unused=True)
            _synchronize(device)
            times.append(time.perf_counter() - start)
    return median(times[1:])


@contextmanager
def _left_alone(atom: nn.Module) -> Iterator[None]:
    """Attributes and buffers are put back."""
    state, contents = ModuleState(atom), Contents(atom.modules())
    try:
        yield
    finally:
        contents.restore()
        state.restore()


def _real(x: Any, device: torch.device) -> Any:
    if not isinstance(x, Tensor):
        return x
    if not is_fake(x):
        return x

    def make(piece: Tensor) -> Tensor:
        if piece.is_floating_point() or piece.is_complex():
            made = torch.randn(piece.shape, dtype=piece.dtype, device=device) * 0.1
            return made.requires_grad_() * 1 if piece.requires_grad else made
        return torch.zeros(piece.shape, dtype=piece.dtype, device=device)

    return sharding.on_local(make, x)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
