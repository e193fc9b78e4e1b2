"""WHICH arguments does the strategy refuse?  Unknown ones, and those that would be accepted and ignored."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_3d.errors import ConfigurationError, near
from lightning_3d.layout import LONG_NAMES, Layout
from lightning_3d.tensor.facts import DEMANDS


class CheckedArguments(abc.ABCMeta):
    """Refuses unknown constructor arguments with the names that exist."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        known = [n for n in inspect.signature(cls.__init__).parameters if n != "self"]  # type: ignore[misc]
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            hints = "".join(f"\n  {name!r}:{_hint(name, known)}" for name in unknown)
            raise ConfigurationError(
                f"{cls.__name__} got unknown arguments {', '.join(map(repr, unknown))}.{hints}\n"
                f"It takes: {', '.join(known)}."
            )
        return super().__call__(*args, **kwargs)


def _hint(name: str, known: Sequence[str]) -> str:
    long = LONG_NAMES.get(name)
    return f" Did you mean {long!r}?" if long else near(name, known) or " no name is close."


def check_effect(
    layout: Layout, num_microbatches: Any, pipeline_split: Any, sequence_parallel: bool, tensor_parallel_plan: Any
) -> None:
    """Refuse values of the wrong kind, and settings without effect.

    Raises:
        ConfigurationError: Names the setting and the way out.
    """
    if num_microbatches != "auto":
        if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int):
            raise ConfigurationError(f"num_microbatches is {num_microbatches!r}; it must be 'auto' or an integer.")
        if num_microbatches < 1:
            raise ConfigurationError(f"num_microbatches is {num_microbatches}; it must be at least 1.")
    if isinstance(tensor_parallel_plan, Mapping):
        for pattern, kind in tensor_parallel_plan.items():
            if kind not in DEMANDS:
                raise ConfigurationError(
                    f"tensor_parallel_plan: {kind!r} for {pattern!r} is not one of {', '.join(DEMANDS)}."
                    + near(str(kind), DEMANDS)
                )
    pipeline = {
        f"num_microbatches={num_microbatches}": num_microbatches != "auto",
        f"pipeline_split={pipeline_split!r}": pipeline_split != "auto",
        f"pipeline_schedule={layout.schedule!r}": layout.schedule != "1f1b",
    }
    if layout.pp == 1 and any(pipeline.values()):
        accumulate = num_microbatches != "auto"
        raise ConfigurationError(
            f"{_given(pipeline)} has no effect with pipeline_parallel_size=1, where there is no pipeline to cut or "
            "fill. Set pipeline_parallel_size > 1, or remove it"
            + (" (to accumulate gradients use Trainer(accumulate_grad_batches=...))." if accumulate else ".")
        )
    tensor = {
        "sequence_parallel=True": sequence_parallel,
        f"tensor_parallel_plan={tensor_parallel_plan!r}": tensor_parallel_plan != "auto",
    }
    if layout.tp == 1 and any(tensor.values()):
        raise ConfigurationError(
            f"{_given(tensor)} has no effect with tensor_parallel_size=1. Set tensor_parallel_size > 1, or remove it."
        )


def _given(settings: dict[str, bool]) -> str:
    return ", ".join(text for text, given in settings.items() if given)
