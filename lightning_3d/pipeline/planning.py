"""WHICH stage gets what?  From the trace of the first batch to the placement every later batch follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

from torch import nn

from lightning_3d.pipeline.atoms import atoms_for_split, check_split_names, find_atoms, used_by_methods
from lightning_3d.pipeline.copies import apart, coarse_copies, copies_beside_trained, follow_originals
from lightning_3d.pipeline.events import Trace
from lightning_3d.pipeline.partition import (
    Held,
    Partition,
    Window,
    automatic_starts,
    make_partition,
    named_starts,
    owned_windows,
    place_unused,
    stages_of_pieces,
    windows_from_starts,
)

Split = Literal["auto", "measured"] | Sequence[str]
_AGAIN = 0.5


class Plan(NamedTuple):
    """The atoms, the trace they were found with, and which stages hold which parameter."""

    atoms: dict[str, nn.Module]
    trace: Trace
    held: Held


def make_plan(
    module: nn.Module,
    stages: int,
    split: Split,
    tracer: Callable[[Mapping[str, nn.Module]], Trace],
    owners: Sequence[int] | None = None,
    measure: Callable[[Trace, Mapping[str, nn.Module]], None] | None = None,
) -> Plan:
    """Find atoms, trace the step with them, and cut.

    Args:
        module: The root module.
        stages: Number of pipeline stages.
        split: "auto", "measured", or the name of the first module of every window but the first.
        tracer: Records the step with the given atoms.
        owners: Stage of every window; default: one window per stage.
        measure: Puts measured times into a trace.

    Raises:
        PipelineError: Too few pieces, or wrong names.
    """
    owners = tuple(range(stages)) if owners is None else tuple(owners)
    if not isinstance(split, str):
        names = list(split)
        check_split_names(names, module, len(owners), stages)
        atoms, trace, _ = _traced(module, partial(atoms_for_split, module, len(owners), names), tracer)
        return _placed(module, atoms, trace, named_starts(trace, names), stages, owners, names)
    atoms, trace, opened = _traced(module, partial(find_atoms, module, len(owners)), tracer)
    block = _repeated_block(module, trace, len(owners))
    if block is not None:
        # one block called again and again (ALBERT): it is the piece, not its layers
        atoms = find_atoms(module, len(owners), closed=(block,), opened=opened)
        trace = tracer(atoms)
    if split == "measured" and measure is not None:
        measure(trace, atoms)
    return _placed(module, atoms, trace, automatic_starts(trace, len(owners), stages), stages, owners)


def _traced(
    module: nn.Module, find: Callable[..., dict[str, nn.Module]], tracer: Callable[[Mapping[str, nn.Module]], Trace]
) -> tuple[dict[str, nn.Module], Trace, list[str]]:
    """The atoms, their trace, and what had to be opened: the step calls its methods, or its original is opened."""
    opened: list[str] = []
    while True:
        atoms = find(opened=opened)
        trace = tracer(atoms)
        more = used_by_methods(module, atoms, trace) or coarse_copies(trace, copies_beside_trained(module, trace))
        if not more:
            return atoms, trace, opened
        opened += more


def _placed(
    module: nn.Module,
    atoms: dict[str, nn.Module],
    trace: Trace,
    starts: list[int],
    stages: int,
    owners: tuple[int, ...],
    named: Sequence[str] = (),
) -> Plan:
    partition = make_partition(trace, windows_from_starts(trace, starts, owners), stages)
    calls = [n for n, _ in trace.calls()]
    names: tuple[str, ...] = tuple(trace.call_names())
    ordinals: tuple[int, ...] = tuple(0 if start == 0 else calls.index(start) for start in starts)
    copies = copies_beside_trained(module, trace)
    placed: Mapping[str, tuple[int, ...]] | None = None
    if _walks_again(partition):
        placed = stages_of_pieces(trace, owners, stages)
    beside = _beside_originals(trace, partition, placed, copies, owners, named)
    if beside is not None:
        placed = beside
    if placed is not None:
        # every piece to one stage, and the walk goes round as often as the step does
        names, ordinals = (), ()
        partition = make_partition(trace, owned_windows(trace, Held(stages, placed, owners=owners)), stages)
    held = [set(found) for found in partition.held]
    for mine in held:
        mine.update(copy for copy, original in copies.items() if original in mine and not any(copy in x for x in held))
    by_id = {id(p): n for n, p in module.named_parameters()}
    place_unused(trace, held, [(n, [by_id[id(p)] for p in m.parameters()]) for n, m in atoms.items()])
    holders = {n: tuple(s for s in range(stages) if n in held[s]) for n in trace.sizes}
    return Plan(atoms, trace, Held(stages, holders, names, ordinals, owners))


def cut(trace: Trace, held: Held, *, training: bool) -> Partition:
    """Cut any trace so that every parameter is used where it is held."""
    windows = owned_windows(trace, held)
    if training:
        windows = padded(windows, held.owners or range(held.stages)) or windows
    return make_partition(trace, windows, held.stages)


def padded(windows: Sequence[Window], owners: Sequence[int]) -> list[Window] | None:
    """The windows in a chain with these owners: stages with nothing to do get empty ones. None: not possible."""
    full: list[Window] = []
    waiting = list(windows)
    for number, owner in enumerate(owners):
        start = full[-1].stop if full else 0
        if waiting and waiting[0].stage == owner:
            window = waiting.pop(0)
            full.append(Window(number, window.start, window.stop, owner))
        else:
            full.append(Window(number, start, start, owner))
    return None if waiting else full


def along(partitions: Sequence[Partition], owners: Sequence[int]) -> tuple[list[Partition], tuple[int, ...]]:
    """The microbatches of a batch in one common chain, which a schedule can be made for.

    Args:
        partitions: Of every microbatch.
        owners: The planned chain.

    Returns:
        The partitions, padded where needed, and the stage of every window.
    """
    chains = {tuple(w.stage for w in p.windows) for p in partitions}
    if len(chains) == 1:
        return list(partitions), chains.pop()
    common = tuple(owners)
    while any(padded(p.windows, common) is None for p in partitions):
        common = (*common, *owners)
    out = []
    for p in partitions:
        windows = padded(p.windows, common)
        assert windows is not None
        out.append(p if windows == p.windows else make_partition(p.trace, windows, p.stages))
    return out, common


def _beside_originals(
    trace: Trace,
    partition: Partition,
    placed: Mapping[str, tuple[int, ...]] | None,
    copies: Mapping[str, str],
    owners: Sequence[int],
    named: Sequence[str],
) -> dict[str, tuple[int, ...]] | None:
    """A placement that has copies of weights, which the step uses, with their originals; None: they are, or cannot be.

    Where the user named the parts, those decide where the originals are; a name inside a copy decides for copies, too.
    """
    used = {copy: original for copy, original in copies.items() if any(copy in held for held in partition.held)}
    by_the_user = any(copy.startswith(name + ".") for copy in used for name in named)
    if by_the_user or (placed is None and not apart(partition.held, used)):
        return None
    if placed is None and named:
        stages = range(partition.stages)
        placed = {n: tuple(s for s in stages if n in partition.held[s]) for n in trace.params_used()}
    elif len(set(trace.call_names())) - len(_pieces_of(trace, used)) >= len(owners):
        placed = stages_of_pieces(trace, owners, partition.stages, _pieces_of(trace, used))
    return None if placed is None else follow_originals(trace, placed, used)


def _pieces_of(trace: Trace, copies: Mapping[str, str]) -> dict[str, str]:
    """Piece of which all parameters are copies -> the piece of the originals."""
    of = {name: event.atom for _, event in reversed(trace.calls()) for name in event.params}
    found = {}
    for _, event in trace.calls():
        if event.params and event.params <= copies.keys():
            found[event.atom] = next((of[o] for o in map(copies.get, sorted(event.params)) if o in of), event.atom)
    return {copy: original for copy, original in found.items() if copy != original}


def _walks_again(partition: Partition) -> bool:
    """Whether the step walks through the model several times: most of its work is in pieces several stages would hold.

    A small piece that is called twice (the embedding of an encoder and its decoder) is better held twice.
    """
    trace = partition.trace
    stages: dict[str, set[int]] = {}
    for n, event in trace.calls():
        stages.setdefault(event.atom, set()).update(w.stage for w in partition.windows if w.start <= n < w.stop)
    costs = [(len(stages[event.atom]) > 1, trace.cost(event)) for _, event in trace.calls()]
    again = sum(cost for shared, cost in costs if shared)
    return again > _AGAIN * sum(cost for _, cost in costs) and not _repeats_one_piece(trace)


def _repeats_one_piece(trace: Trace) -> bool:
    """Whether the only pieces called several times are called several times in a row."""
    names = trace.call_names()
    runs = [name for k, name in enumerate(names) if k == 0 or names[k - 1] != name]
    return len(runs) == len(set(runs))


def _repeated_block(module: nn.Module, trace: Trace, parts: int) -> str | None:
    """The module that holds all atoms called often, if each of its calls is a fine enough piece of the step.

    A stack of layers that is called often (an encoder, several views) is none: its layers are the pieces.
    """
    names = trace.call_names()
    counts = {name: names.count(name) for name in set(names)}
    repeated = [name for name, count in counts.items() if count >= max(parts, 2)]
    if len(repeated) < 2:
        return None
    paths = [name.split(".") for name in repeated]
    common = []
    for keys in zip(*paths, strict=False):
        if len(set(keys)) > 1:
            break
        common.append(keys[0])
    block = ".".join(common)
    inside = module.get_submodule(block).modules() if block else ()
    stacks = [m for m in inside if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) >= parts]
    return None if not block or any(_whole_layers(m) for m in stacks) else block


def _whole_layers(stack: nn.Module) -> bool:
    """Whether at least two elements consist of several layers."""
    return sum(sum(1 for m in child.modules() if m._parameters) > 1 for child in stack.children()) > 1
