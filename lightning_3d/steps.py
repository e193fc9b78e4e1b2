"""HOW is one of the user's steps called?  With the arguments it takes, and outside of a running loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric


def call_step(module: nn.Module, name: str, *args: Any) -> Any:
    """Call `module.<name>` with as many of `(batch, batch_idx, dataloader_idx)` as it takes, as Lightning does."""
    step = getattr(module, name)
    return step(*args[: _arity(step, len(args))])


def _arity(step: Any, available: int) -> int:
    count = 0
    for parameter in inspect.signature(step).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return available
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            count += 1
    return min(count, available)


@contextmanager
def metrics_alone(module: nn.Module) -> Iterator[None]:
    """Metrics do not synchronise: ranks may follow a step at different times, with values that do not exist."""
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    before = [m.distributed_available_fn for m in metrics]
    for metric in metrics:
        metric.distributed_available_fn = lambda: False
    try:
        yield
    finally:
        for metric, function in zip(metrics, before, strict=True):
            metric.distributed_available_fn = function


@contextmanager
def logging_silenced(module: nn.Module) -> Iterator[None]:
    """`self.log` and `self.log_dict` do nothing: at set-up there is no loop to log to."""

    def silent(*_: Any, **__: Any) -> None:
        return None

    object.__setattr__(module, "log", silent)
    object.__setattr__(module, "log_dict", silent)
    try:
        yield
    finally:
        module.__dict__.pop("log", None)
        module.__dict__.pop("log_dict", None)
