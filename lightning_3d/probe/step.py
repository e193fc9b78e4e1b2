"""HOW is one of the user's steps called?  With the arguments it takes, and outside of a running loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric


def call_step(module: nn.Module, step_name: str, *args: Any) -> Any:
    """Call the user's step with as many arguments as it takes (batch, batch_idx, dataloader_idx), like Lightning."""
    step = getattr(module, step_name)
    return step(*args[: count_arguments(step, len(args))])


def count_arguments(step: Callable[..., Any], available: int) -> int:
    """How many positional arguments a step method takes."""
    parameters = inspect.signature(step).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return available
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return min(available, len(positional))


def probe_arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """Arguments for a trace: the batch, and zeros for the indices the method requires."""
    parameters = inspect.signature(step).parameters.values()
    required = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and (p.default is p.empty or p.name == "batch_idx")
    ]
    return (batch, *([0] * (len(required) - 1)))


@contextmanager
def metrics_alone(module: nn.Module) -> Iterator[None]:
    """Metrics do not synchronise: ranks may follow a step at different times, with values that do not exist."""
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    before = [m.distributed_available_fn for m in metrics]
    for metric in metrics:
        metric.distributed_available_fn = _never
    try:
        yield
    finally:
        for metric, function in zip(metrics, before, strict=True):
            metric.distributed_available_fn = function


def _never() -> bool:
    return False
