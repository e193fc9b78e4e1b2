"""WHICH ranks add up a torchmetrics metric?  The replicas; inside one only the last stage has seen anything."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_3d.mesh import Mesh
from lightning_3d.observe.relay import Relay


def attach_metrics(module: nn.Module, mesh: Mesh, relay: Relay) -> None:
    """Make the module's metrics synchronise over the data-parallel axis, and agree inside a replica.

    A metric that was given a `process_group` of its own keeps it. With a pipeline only the last stage updates a
    metric, so it computes and the other stages receive the result.

    Args:
        module: The LightningModule.
        mesh: This rank's place.
        relay: How a replica shares results.
    """
    for metric in module.modules():
        if not isinstance(metric, Metric):
            continue
        if metric.process_group is None:
            metric.process_group = mesh.data.group
        if mesh.layout.pp > 1:
            _compute_on_last_stage(metric, mesh, relay)


def _compute_on_last_stage(metric: Any, mesh: Mesh, relay: Relay) -> None:
    compute = metric.compute

    @functools.wraps(compute)
    def shared(*args: Any, **kwargs: Any) -> Any:
        if relay.inside_step:  # `metric(...)` in the user's step: only the last stage is here
            return compute(*args, **kwargs)
        value = compute(*args, **kwargs) if mesh.is_last_stage else None
        metric._computed = relay.broadcast(value)
        metric._update_count = max(metric._update_count, 1)
        return metric._computed

    metric.compute = shared
