"""WHICH stage gets what?  From the trace of the first batch to the placement every later batch follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from torch import nn

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline.atoms import atoms_for_split, check_split_names, find_atoms
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
    windows_from_starts,
)

Split = Literal["auto"] | Sequence[str]
_SHARED_LIMIT = 1.5


class Plan(NamedTuple):
    """The atoms, the trace they were found with, and which stages hold which parameter."""

    atoms: dict[str, nn.Module]
    trace: Trace
    held: Held


def make_plan(module: nn.Module, stages: int, split: Split, tracer: Callable[[Mapping[str, nn.Module]], Trace]) -> Plan:
    """Find atoms, trace the step with them, and cut.

    Args:
        module: The root module.
        stages: Number of pipeline stages.
        split: "auto", or the name of the first module of every stage but the first.
        tracer: Records the step with the given atoms.

    Raises:
        PipelineError: Too few pieces, wrong names, or a step that walks through the model several times.
    """
    if split != "auto":
        names = list(split)
        check_split_names(names, module, stages)
        atoms = atoms_for_split(module, stages, names)
        trace = tracer(atoms)
        return _placed(module, atoms, trace, named_starts(trace, names), stages)
    atoms = find_atoms(module, stages)
    trace = tracer(atoms)
    block = _repeated_block(trace, stages)
    if block is not None:
        # one block called again and again (ALBERT): it is the piece, not its layers
        atoms = find_atoms(module, stages, closed=(block,))
        trace = tracer(atoms)
    return _placed(module, atoms, trace, automatic_starts(trace, stages), stages)


def _placed(module: nn.Module, atoms: dict[str, nn.Module], trace: Trace, starts: list[int], stages: int) -> Plan:
    partition = make_partition(trace, windows_from_starts(trace, starts), stages)
    _refuse_several_walks(partition)
    held = [set(names) for names in partition.held]
    names = {id(p): n for n, p in module.named_parameters()}
    place_unused(trace, held, [(n, [names[id(p)] for p in m.parameters()]) for n, m in atoms.items()])
    holders = {n: tuple(s for s in range(stages) if n in held[s]) for n in trace.sizes}
    calls = [n for n, _ in trace.calls()]
    ordinals = tuple(0 if start == 0 else calls.index(start) for start in starts)
    return Plan(atoms, trace, Held(stages, holders, tuple(trace.call_names()), ordinals))


def cut(trace: Trace, held: Held, *, training: bool) -> Partition:
    """Cut any trace so that every parameter is used where it is held.

    Raises:
        PipelineError: A training step walks through the stages more than once.
    """
    windows = owned_windows(trace, held)
    if training:
        stages = [w.stage for w in windows]
        if stages != sorted(set(stages)):
            raise _several_walks(trace.step, -(-len(windows) // held.stages))
        windows = _one_per_stage(windows, held.stages)
    return make_partition(trace, windows, held.stages)


def _one_per_stage(windows: list[Window], stages: int) -> list[Window]:
    """Stages that have nothing to do on this path get an empty window: schedules count on one per stage."""
    full, start = [], 0
    by_stage = {w.stage: w for w in windows}
    for stage in range(stages):
        stop = by_stage[stage].stop if stage in by_stage else start
        full.append(Window(stage, start, stop, stage))
        start = stop
    return full


def _refuse_several_walks(partition: Partition) -> None:
    """A step that calls the model twice would need every parameter in several stages: no memory is saved."""
    trace, windows = partition.trace, partition.windows
    stage_of: dict[str, int] = {}
    walk: list[int] = []
    for n, event in trace.calls():
        current = next(w.stage for w in windows if w.start <= n < w.stop)
        owner = stage_of.setdefault(event.atom, current)
        if not walk or walk[-1] != owner:
            walk.append(owner)
    total = sum(trace.sizes[n] for n in set().union(*partition.held))
    held = sum(trace.sizes[n] for names in partition.held for n in names)
    one_block = len(set(trace.call_names())) < len(trace.call_names()) and _repeats_one_piece(trace)
    if len(walk) > partition.stages and held > _SHARED_LIMIT * total and not one_block:
        raise _several_walks(trace.step, -(-len(walk) // partition.stages))


def _repeats_one_piece(trace: Trace) -> bool:
    """Whether the only pieces called several times are called several times in a row."""
    names = trace.call_names()
    runs = [name for k, name in enumerate(names) if k == 0 or names[k - 1] != name]
    return len(runs) == len(set(runs))


def _several_walks(step: str, count: int) -> PipelineError:
    return PipelineError(
        f"{step} walks through the model {count} times (it calls the same modules again in a later part of the step). "
        "Pipeline parallelism of such a training step is not supported in this version of lightning_3d yet: use "
        "pipeline_parallel_size=1, or concatenate the inputs along the batch dim and call the model once."
    )


def _repeated_block(trace: Trace, stages: int) -> str | None:
    """The module that holds all atoms called often, if each of its calls is a fine enough piece of the step."""
    names = trace.call_names()
    counts = {name: names.count(name) for name in set(names)}
    repeated = [name for name, count in counts.items() if count >= 2 * stages]
    if len(repeated) < 2:
        return None
    paths = [name.split(".") for name in repeated]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    block = ".".join(common)
    return block or None
