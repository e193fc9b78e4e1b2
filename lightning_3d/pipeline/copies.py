"""WHERE are copies of weights (averages kept as a module) in a pipeline?  On the stages of their originals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.events import Trace
from lightning_3d.probe import copies_in


def copies_beside_trained(module: nn.Module, trace: Trace) -> dict[str, str]:
    """Name of a parameter that is not trained -> the one it is a copy of (`probe.copies_in`)."""
    return copies_in(module, _trained(module, trace), sharding.original_class)


def follow_originals(
    trace: Trace, holders: Mapping[str, tuple[int, ...]], copies: Mapping[str, str]
) -> dict[str, tuple[int, ...]] | None:
    """The holders, with the copies on the stages of their originals; None: a call would need several stages."""
    moved = {name: holders.get(copies.get(name, name), held) for name, held in holders.items()}
    for event in trace.events:
        stages = [set(moved[name]) for name in event.params if name in moved]
        if event.kind != "local" and stages and not set.intersection(*stages):
            return None
    return moved


def coarse_copies(trace: Trace, copies: Mapping[str, str]) -> list[str]:
    """Pieces that are copies of several ones, which may get different stages."""
    pieces = [event for _, event in trace.calls() if event.params]
    return [
        event.atom
        for event in pieces
        if event.params <= copies.keys()
        and not any({copies[name] for name in event.params} <= other.params for other in pieces)
        and any(copies[name] in other.params for other in pieces for name in event.params)
    ]


def apart(holders: Sequence[set[str]], copies: Mapping[str, str]) -> bool:
    """Whether a copy is used on another stage than its original."""
    return any((copy in held) != (original in held) for held in holders for copy, original in copies.items())


def _trained(module: nn.Module, trace: Trace) -> set[str]:
    with_graph: set[str] = set()
    for event in trace.events:
        made = (trace.meta[leaf.payload] for leaf in event.leaves if leaf.kind == "value")
        if any(meta.requires_grad for meta in made):
            with_graph |= event.params
    return {name for name, p in module.named_parameters() if p.requires_grad and name in with_graph}
