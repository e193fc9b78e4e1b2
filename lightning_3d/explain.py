"""WHY is it cut this way?  The mesh, the tensor plan and the stages as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_3d.layout import Layout
from lightning_3d.observe import StageRow, TensorRow, axis_table, mesh_table, render, stage_table, tensor_table
from lightning_3d.pipeline import Partition
from lightning_3d.tensor import TensorPlan

if TYPE_CHECKING:
    from lightning_3d.engine import Engine

Stages = Sequence[tuple[tuple[str, ...], set[str]]]
"""Per stage: its modules in the order they run, and the names of the parameters it holds."""


def describe(engine: Engine) -> str:
    """The tables for what was built on this mesh."""
    stages = stages_of(engine.partition) if engine.partition is not None else None
    return describe_plan(engine.layout, engine.tensor_plan, engine.global_shapes, stages)


def stages_of(partition: Partition) -> Stages:
    """Modules and parameters of every stage of a cut step."""
    held = partition.held
    modules: list[list[str]] = [[] for _ in held]
    for n, event in partition.trace.calls():
        stage = next(w.stage for w in partition.windows if w.start <= n < w.stop)
        if event.atom not in modules[stage]:
            modules[stage].append(event.atom)
    return [(tuple(names), set(parameters)) for names, parameters in zip(modules, held, strict=True)]


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
    return render(*parts, width=100)


def _tensor_rows(plan: TensorPlan, shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRow]:
    return [
        TensorRow(name, decision.kind, shapes[name], _local_shape(plan, name, shapes[name]), decision.reason)
        for name, decision in plan.decisions.items()
        if name in shapes
    ]


def _stage_rows(
    layout: Layout, plan: TensorPlan | None, shapes: Mapping[str, tuple[int, ...]], stages: Stages
) -> list[StageRow]:
    rows = []
    for stage, (modules, names) in enumerate(stages):
        count = sum(math.prod(_local_shape(plan, name, shapes[name])) for name in names)
        rows.append(StageRow(stage, modules, count, 4 * count))
    return rows


def _local_shape(plan: TensorPlan | None, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    decision = plan.decisions.get(name) if plan is not None else None
    if plan is None or decision is None or decision.placement is None:
        return shape
    return decision.placement.local_shape(shape, plan.size)
