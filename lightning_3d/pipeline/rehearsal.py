"""CAN a step be cut into these stages?  Asked without processes, before anything is made for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from lightning_3d.layout import Layout
from lightning_3d.pipeline.events import Trace
from lightning_3d.pipeline.microbatch import split
from lightning_3d.pipeline.planning import Split, cut, make_plan
from lightning_3d.pipeline.trace import trace
from lightning_3d.pipeline.training_schedule import TrainingSchedule
from lightning_3d.probe import call_step, probe_arguments


def check_cut(
    module: nn.Module,
    batch: Any,
    layout: Layout,
    microbatches: int,
    how: Split = "auto",
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Follow `training_step` without values and cut it, as set-up will; the module is left as it was.

    Tensor parallelism, which comes before the cut, is not looked at: it exchanges layers and keeps the pieces.

    Args:
        module: The root module, whole.
        batch: A batch of one replica.
        layout: Stages and schedule.
        microbatches: Into how many the batch is cut.
        how: As in `PipelineRunner`; "measured" is not measured.
        forward_context: As in `PipelineRunner`.

    Raises:
        PipelineError: It cannot be cut.
    """
    microbatch = split(batch, microbatches)[0]
    step = partial(call_step, module, "training_step", *probe_arguments(module.training_step, microbatch))  # type: ignore[arg-type]

    def tracer(atoms: Mapping[str, nn.Module]) -> Trace:
        return trace(module, atoms, step, forward_context=forward_context)

    owners = TrainingSchedule(layout.schedule, layout.pp, layout.virtual, layout.order).owners
    plan = make_plan(module, layout.pp, how, tracer, owners)
    cut(plan.trace, plan.held, training=True)
