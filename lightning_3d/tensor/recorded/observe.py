"""HOW does the recorder see what is not a torch function?  Collectives, random streams, custom autograd Functions.

All of it is in place only while a call is recorded; other threads go straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_3d.probe import SharedPatch, intercept_functions
from lightning_3d.tensor import collectives, rules_attention, rules_random
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.recorded import operations
from lightning_3d.tensor.recorded.recorder import Recorder, current

_STREAM_USERS: tuple[Any, ...] = (rules_random, rules_attention)
_METHODS = ("all_reduce", "all_gather", "reduce_scatter")
rank_stream = rules_random.rank_stream


@contextmanager
def observed(recorder: Recorder, group: TensorGroup) -> Iterator[None]:
    """Record everything this thread does while open.

    Args:
        recorder: Takes the notes.
        group: The ranks whose collectives are noted; rules call some of them directly.
    """
    with _streams_routed(), intercept_functions(_on_function, 2):
        collectives.recording.observe = recorder.leaf
        for name in _METHODS:
            group.__dict__[name] = _method(recorder, group, getattr(TensorGroup, name))
        try:
            with recorder.recording():
                yield
        finally:
            for name in _METHODS:
                del group.__dict__[name]
            collectives.recording.observe = None


def _method(recorder: Recorder, group: TensorGroup, method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: recorder.leaf(method, (group, *args), kwargs)


def _on_function(proceed: Callable[..., Any], function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A custom autograd Function on local tensors is one operation."""
    recorder = current()
    if recorder is None:
        return proceed(*args, **kwargs)
    return recorder.leaf(operations.applied(function), args, kwargs, proceed)


def _observed_stream(group: TensorGroup, x: Tensor) -> Any:
    recorder = current()
    return rank_stream(group, x) if recorder is None else recorder.stream(rank_stream, group, x)


def _stream_by(function: Any) -> None:
    for module in _STREAM_USERS:
        module.rank_stream = function


_streams_routed = SharedPatch(lambda: _stream_by(_observed_stream), lambda: _stream_by(rank_stream))
"""The random streams of the rules are regions of the tape."""
