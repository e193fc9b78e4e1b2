"""WHOSE error is it?  What cannot be followed without values is said so; what is wrong in a step stays what it is."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import ConfigurationError, DivergedError, PipelineError
from lightning_3d.pipeline.events import Trace
from lightning_3d.where import is_ours, is_torch, lines_of

_FUNCTORCH: Any = torch._C._functorch


@contextmanager
def of_the_user() -> Iterator[None]:
    """Around code of the user's that our code calls: its errors are not ours, although we stand in their stack."""
    try:
        yield
    except Exception as error:
        error.of_the_user = True  # type: ignore[attr-defined]
        raise


@contextmanager
def converted(trace: Trace) -> Iterator[None]:
    """Errors out of the machinery that plans become `PipelineError`s which name the event and the user's line."""
    try:
        yield
    except (ConfigurationError, DivergedError):
        raise
    except Exception as error:
        if not _is_ours(error):
            _explain(error, trace)
            raise
        names = [f"  in {line}" for line in lines_of(error)]
        new = PipelineError(
            "\n".join([f"{_what(trace)} cannot be followed ({type(error).__name__}: {error!s:.300})", *names])
            + f"\nTo find out how {trace.step} can be cut, it is run once without values, on the shapes of weights and "
            "activations, and this call does something that is only possible with the tensors themselves. Put it into "
            "the forward of one module, which one stage runs as a whole, or use pipeline_parallel_size=1."
        )
        new.names_line = True  # type: ignore[attr-defined]
        raise new from error


def _is_ours(error: Exception) -> bool:
    if getattr(error, "of_the_user", False):
        return False
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return next((is_ours(file) for file in reversed(files) if not is_torch(file)), False)


def _what(trace: Trace) -> str:
    if not trace.events:
        return f"The beginning of {trace.step}"
    event = trace.events[-1]
    return f"{event.atom!r}, which {trace.step} calls," if event.kind == "atom" else f"{event.name} in {trace.step}"


def _explain(error: Exception, trace: Trace) -> None:
    """A note below an error of the user's; Python 3.10 has none."""
    note = getattr(error, "add_note", None)
    if note is not None:
        note(
            f"(lightning_3d was planning {trace.step}: weights and activations had shapes, but no values. If the step "
            "works with pipeline_parallel_size=1, put what needs values into the forward of one module.)"
        )


def check_transforms(name: str, leaves: Sequence[Any], is_weight: Callable[[Tensor], bool]) -> None:
    """Refuse `torch.vmap`, `torch.func.grad` and the like around what depends on the model.

    Args:
        name: Of the event.
        leaves: Its arguments.
        is_weight: Whether a tensor is a parameter, or derives from one.

    Raises:
        PipelineError: An argument is a weight or derives from one, and a transform is active.
    """
    if _FUNCTORCH.maybe_current_level() is None:
        return
    for x in leaves:
        while isinstance(x, Tensor) and _FUNCTORCH.is_functorch_wrapped_tensor(x):
            x = _FUNCTORCH.get_unwrapped(x)
        if isinstance(x, Tensor) and is_weight(x):
            raise PipelineError(
                f"{name} runs inside of a transform of torch.func (vmap, grad, jvp, ...) in the step, on weights or on "
                "what the model made of them. A transform cannot reach over several pipeline stages: put it into the "
                "forward of one module (inside of a module it works), write the batch dim out (a Linear takes any "
                "number of leading dims), or use pipeline_parallel_size=1."
            )
