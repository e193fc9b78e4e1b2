"""WHICH arguments does the strategy refuse?  Unknown ones, and those that would be accepted and ignored."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_3d.errors import ConfigurationError, near, not_yet
from lightning_3d.layout import LONG_NAMES, Layout
from lightning_3d.recompute import check_choice
from lightning_3d.settings import Settings
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


def check_effect(layout: Layout, settings: Settings) -> None:
    """Refuse values of the wrong kind, and settings without effect.

    Raises:
        ConfigurationError: Names the setting and the way out.
    """
    _check_values(settings)
    check_choice(settings.activation_checkpointing, layout.pp)
    microbatches = settings.num_microbatches
    pipeline = {
        f"num_microbatches={microbatches}": microbatches != "auto",
        f"pipeline_split={settings.pipeline_split!r}": settings.pipeline_split != "auto",
        f"pipeline_schedule={layout.schedule!r}": layout.schedule != "1f1b",
    }
    if layout.pp == 1 and any(pipeline.values()):
        raise ConfigurationError(
            f"{_given(pipeline)} has no effect with pipeline_parallel_size=1, where there is no pipeline to cut or "
            "fill. Set pipeline_parallel_size > 1, or remove it"
            + (
                " (to accumulate gradients use Trainer(accumulate_grad_batches=...))."
                if microbatches != "auto"
                else "."
            )
        )
    tensor = {
        "sequence_parallel=True": settings.sequence_parallel,
        f"tensor_parallel_plan={settings.tensor_parallel_plan!r}": settings.tensor_parallel_plan != "auto",
        f"strict_tensor_parallel={settings.strict_tensor_parallel}": settings.strict_tensor_parallel is not None,
        "exact_dropout=True": settings.exact_dropout,
        "record=False": not settings.record,
    }
    if layout.tp == 1 and any(tensor.values()):
        raise ConfigurationError(
            f"{_given(tensor)} has no effect with tensor_parallel_size=1. Set tensor_parallel_size > 1, or remove it."
        )


def check_loss_weighting(value: Any) -> None:
    """Refuse all but the one way that is built.

    Raises:
        ConfigurationError: With the known values.
    """
    if value not in ("microbatch_mean", "tokens"):
        raise ConfigurationError(
            f"loss_weighting is {value!r}; it must be 'microbatch_mean' or 'tokens'."
            + near(str(value), ("microbatch_mean", "tokens"))
        )
    if value == "tokens":
        raise not_yet("loss_weighting='tokens'", "Use 'microbatch_mean'.")


def _check_values(settings: Settings) -> None:
    microbatches, plan, least = (
        settings.num_microbatches,
        settings.tensor_parallel_plan,
        settings.strict_tensor_parallel,
    )
    if microbatches != "auto":
        if isinstance(microbatches, bool) or not isinstance(microbatches, int):
            raise ConfigurationError(f"num_microbatches is {microbatches!r}; it must be 'auto' or an integer.")
        if microbatches < 1:
            raise ConfigurationError(f"num_microbatches is {microbatches}; it must be at least 1.")
    if not _is_split(settings.pipeline_split):
        raise ConfigurationError(
            f"pipeline_split is {settings.pipeline_split!r}; it must be 'auto', 'measured' or a list with the name of "
            "the first module of every part but the first, as named_modules() spells it (['layers.6', 'layers.12'] for "
            "three parts)."
        )
    if settings.hang_report_after is not None and not settings.hang_report_after > 0:
        raise ConfigurationError(
            f"hang_report_after is {settings.hang_report_after!r}; it must be a number of seconds, or None (no report)."
        )
    if not isinstance(settings.verify, bool) and settings.verify != "auto":
        raise ConfigurationError(f"verify is {settings.verify!r}; it must be 'auto', True or False.")
    if least is not None and not 0 <= least <= 1:
        raise ConfigurationError(f"strict_tensor_parallel is {least!r}; it is a part of all parameters, from 0 to 1.")
    for pattern, kind in plan.items() if isinstance(plan, Mapping) else ():
        if kind not in DEMANDS:
            raise ConfigurationError(
                f"tensor_parallel_plan: {kind!r} for {pattern!r} is not one of {', '.join(DEMANDS)}."
                + near(str(kind), DEMANDS)
            )


def _is_split(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("auto", "measured")
    return isinstance(value, Sequence) and all(isinstance(name, str) for name in value)


def _given(settings: dict[str, bool]) -> str:
    return ", ".join(text for text, given in settings.items() if given)
