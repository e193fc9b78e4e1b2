"""WHY is it cut this way?  The mesh, the tensor plan and the stages as tables."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_3d.layout import Layout
from lightning_3d.observe import StageRow, TensorRow, axis_table, mesh_table, render, stage_table, tensor_table
from lightning_3d.pipeline import Partition
from lightning_3d.tensor import TensorPlan

if TYPE_CHECKING:
    from lightning_3d.engine import Engine


class Stage(NamedTuple):
    """Its modules (and parameters used outside of any) in the order they run, what it holds, and what crosses."""

    modules: tuple[str, ...]
    parameters: frozenset[str]
    receives: tuple[str, ...]
    sends: tuple[str, ...]


Stages = Sequence[Stage]


def describe(engine: Engine) -> str:
    """The tables for what was built on this mesh."""
    stages = stages_of(engine.partition) if engine.partition is not None else None
    return describe_plan(engine.layout, engine.tensor_plan, engine.global_shapes, stages)


def stages_of(partition: Partition) -> Stages:
    """What every stage of a cut step runs, holds, gets and gives."""
    held, meta = partition.held, partition.trace.meta
    modules: list[list[str]] = [[] for _ in held]
    receives: list[list[str]] = [[] for _ in held]
    sends: list[list[str]] = [[] for _ in held]
    for n, event in enumerate(partition.trace.events):
        stage = next(w.stage for w in partition.windows if w.start <= n < w.stop)
        for name in [event.atom] if event.kind == "atom" else sorted(event.params):
            if name not in modules[stage]:
                modules[stage].append(name)
    for target, sources in enumerate(partition.receives):
        for source, vids in sources.items():
            shapes = " ".join("x".join(map(str, meta[vid].size)) or "scalar" for vid in vids)
            to, since = partition.windows[target].stage, partition.windows[source].stage
            receives[to].append(f"{shapes} from {since}")
            sends[since].append(f"{shapes} to {to}")
    return [Stage(tuple(modules[s]), frozenset(held[s]), tuple(receives[s]), tuple(sends[s])) for s in range(len(held))]


def describe_plan(
    layout: Layout, plan: TensorPlan | None, shapes: Mapping[str, tuple[int, ...]], stages: Stages | None
) -> str:
    """The tables for a layout.

    Args:
        layout: Sizes of the axes.
        plan: How parameters are cut over tp; None for tp=1.
        shapes: Global shape of every parameter, by name.
        stages: What every pipeline stage runs and holds; None for pp=1.
    """
    parts: list[Any] = [mesh_table(layout), axis_table(layout)]
    if plan is not None:
        title = f"tensor plan: {plan.sharded_fraction:.1%} of the parameters are divided over {layout.tp} ranks"
        parts.append(tensor_table(_tensor_rows(plan, shapes), title=title))
    if stages is not None:
        parts.append(stage_table(_stage_rows(layout, plan, shapes, stages)))
    return render(*parts, width=max(80, shutil.get_terminal_size((100, 24)).columns))


def _tensor_rows(plan: TensorPlan, shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRow]:
    return [
        TensorRow(name, decision.kind, shapes[name], _local_shape(plan, name, shapes[name]), _short(plan.why(name)))
        for name, decision in plan.decisions.items()
        if name in shapes
    ]


def _short(reason: str) -> str:
    """Long names of modules by their last two parts; the whole ones stand in the first column."""
    return re.sub(r"\b(?:[^\W\d][\w*]*\.|[\d*]+\.|\{[\d,-]+\}\.){2,}(\w+\.\w+)", r"..\1", reason)


def _stage_rows(
    layout: Layout, plan: TensorPlan | None, shapes: Mapping[str, tuple[int, ...]], stages: Stages
) -> list[StageRow]:
    rows = []
    for number, stage in enumerate(stages):
        count = sum(math.prod(_local_shape(plan, name, shapes[name])) for name in stage.parameters)
        rows.append(StageRow(number, stage.modules, count, 4 * count, stage.receives, stage.sends))
    return rows


def _local_shape(plan: TensorPlan | None, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    decision = plan.decisions.get(name) if plan is not None else None
    if plan is None or decision is None or decision.placement is None:
        return shape
    return decision.placement.local_shape(shape, plan.size)
