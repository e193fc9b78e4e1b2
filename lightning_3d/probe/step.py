"""HOW is one of the user's steps called?  With the arguments it takes, and outside of a running loop.

What a step reads by `self.parameters()` or `self.named_parameters()` is what it would read as an attribute: of a cut
parameter the view with the global shape (a penalty on all weights must not see one rank's shards).
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_3d.probe.alone import tried_alone
from lightning_3d.probe.shared_patch import SharedPatch


def call_step(module: nn.Module, step_name: str, *args: Any) -> Any:
    """Call the user's step with as many arguments as it takes (batch, batch_idx, dataloader_idx), like Lightning."""
    step = getattr(module, step_name)
    with parameters_as_read():
        return step(*args[: count_arguments(step, len(args))])


def try_step(module: nn.Module, step_name: str, *args: Any) -> Any:
    """As `call_step`, to find something out about the step. Other ranks may try it at another time, or not at all."""
    with tried_alone():
        return call_step(module, step_name, *args)


def count_arguments(step: Callable[..., Any], available: int) -> int:
    """How many positional arguments a step method takes."""
    if isinstance(step, MethodType):
        return min(available, _most_arguments(step.__func__) - 1)
    return min(available, _most_arguments(step))


@functools.lru_cache(maxsize=256)
def _most_arguments(function: Callable[..., Any]) -> int:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return sys.maxsize
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def probe_arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """Arguments for a trace: the batch, and zeros for the indices the method requires."""
    parameters = inspect.signature(step).parameters.values()
    required = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and (p.default is p.empty or p.name == "batch_idx")
    ]
    return (batch, *([0] * (len(required) - 1)))


_named_parameters: Any = nn.Module.named_parameters
_inside = threading.local()  # simulated ranks are threads


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters themselves, also inside a step."""
    return list(own_named_parameters(module).values())


def own_named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The same by name."""
    return dict(_named_parameters(module))


class parameters_as_read:
    """While open, this thread's `parameters()` and `named_parameters()` yield what attribute access gives.

    The two are replaced on `nn.Module` and not on instances, so subclasses that filter them, and submodules that are
    made meanwhile, work. The replacement is gone when the last context is closed. Code of ours that runs inside a step
    asks `own_parameters`.
    """

    def __enter__(self) -> None:
        parameters_shown.acquire()
        _inside.depth = getattr(_inside, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _inside.depth -= 1
        parameters_shown.release()


def _as_read(
    self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, Any]]:
    found = _named_parameters(self, prefix, recurse, remove_duplicate)
    inside = getattr(_inside, "depth", 0) > 0
    return _shown(self, prefix, found) if inside else found


def _read_by(method: Any) -> None:
    nn.Module.named_parameters = method  # type: ignore[method-assign]


parameters_shown = SharedPatch(lambda: _read_by(_as_read), lambda: _read_by(_named_parameters))
"""What `parameters_as_read` needs in place. Open around many steps it spares them a change of `nn.Module`, after which
Python looks up every attribute of every module anew."""


def _shown(module: nn.Module, prefix: str, found: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Any]]:
    for name, parameter in found:
        if hasattr(parameter, "placement"):
            path, _, leaf = name.removeprefix(f"{prefix}." if prefix else "").rpartition(".")
            yield name, getattr(module.get_submodule(path), leaf)
        else:
            yield name, parameter


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
