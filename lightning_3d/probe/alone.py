"""IS a step only tried?  Then nobody answers: ranks try steps at different times, and some steps on one rank only.

A collective of the user's own would wait for ever there. Lightning's (`self.all_gather`, ...) are answered by
stand-ins; one that the step calls in torch itself is refused, for it would also mix ranks of one replica, which all
have the same samples.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_3d import comm
from lightning_3d.errors import ConfigurationError
from lightning_3d.probe.shared_patch import SharedPatch
from lightning_3d.where import current_line, is_torch

_COLLECTIVE = re.compile(r"_?(all_?(reduce|gather|to_?all)|reduce|broadcast|gather|scatter|send|recv|\w*barrier)")
"""What begins like this is one; versions of torch differ in the rest (`_allgather_base`, `all_gather_single`)."""
_depth = 0


class tried_alone:
    """While open, steps that run are experiments of this rank."""

    def __enter__(self) -> None:
        global _depth
        _refusal.acquire()
        _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        _depth -= 1
        _refusal.release()


def is_tried_alone() -> bool:
    """Whether a step that runs now is an experiment, so that other ranks are not there to answer."""
    return _depth > 0


def _put() -> None:
    for name, plain in _plain.items():
        setattr(dist.ProcessGroup, name, _refusing(name, plain))


def _remove() -> None:
    for name, plain in _plain.items():
        setattr(dist.ProcessGroup, name, plain)


_plain: dict[str, Any] = (
    {name: method for name, method in vars(dist.ProcessGroup).items() if _COLLECTIVE.match(name)}
    if dist.is_available()
    else {}
)
_refusal = SharedPatch(_put, _remove)


def _refusing(name: str, plain: Any) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if _called_by_us():
            return plain.__get__(group, type(group))(*args, **kwargs)
        line = current_line()
        raise ConfigurationError(
            f"the step calls a collective of torch.distributed itself ({name.strip('_')})"
            + (f", in {line}" if line else "")
            + ". With tensor and pipeline parallelism, ranks of one replica work on the same samples, so over all "
            "ranks each sample would count several times; and the step is followed on single ranks to plan it, where "
            "nobody would answer. Use self.all_gather(x, sync_grads=True) or self.trainer.strategy.reduce(x), which "
            "go over the replicas, or tensor_parallel_size=1 and pipeline_parallel_size=1."
        )

    return call


def _called_by_us() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and is_torch(frame.f_code.co_filename):  # nobody else of ours calls them
        frame = frame.f_back
    return frame.f_code.co_filename == comm.__file__
