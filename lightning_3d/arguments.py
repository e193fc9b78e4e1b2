"""WHICH arguments does the strategy refuse?  Unknown ones, and those that would be accepted and ignored."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_3d.errors import ConfigurationError, LayoutError, near, not_yet
from lightning_3d.layout import LONG_NAMES, Layout
from lightning_3d.pipeline.training_schedule import TrainingSchedule
from lightning_3d.recompute import check_choice, check_modes
from lightning_3d.settings import Settings


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
    """Refuse settings without effect.

    Raises:
        ConfigurationError: Names the setting and the way out.
    """
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
        "sequence_parallel=True": bool(settings.sequence_parallel),
        f"tensor_parallel_plan={settings.tensor_parallel_plan!r}": settings.tensor_parallel_plan != "auto",
        f"strict_tensor_parallel={settings.strict_tensor_parallel}": settings.strict_tensor_parallel is not None,
        "exact_dropout=True": settings.exact_dropout,
        "record=False": not settings.record,
    }
    if layout.tp == 1 and any(tensor.values()):
        raise ConfigurationError(
            f"{_given(tensor)} has no effect with tensor_parallel_size=1. Set tensor_parallel_size > 1, or remove it."
        )
    if settings.verify is True and layout.tp == layout.pp == 1:
        raise ConfigurationError(
            "verify=True has no effect with tensor_parallel_size=1 and pipeline_parallel_size=1: nothing is cut, so "
            "there is nothing to prove. Remove it."
        )
    if layout.pp > 1:
        _check_pipeline(layout, settings)


def check_machines(layout: Layout, machines: int, per_machine: int, cross: bool) -> None:
    """Refuse tensor-parallel ranks on different machines, unless the user wants them there.

    Raises:
        LayoutError: With the sizes and the way out.
    """
    if machines > 1 and per_machine % layout.tp and not cross:
        raise LayoutError(
            f"tensor_parallel_size={layout.tp} does not fit into machines of {per_machine} devices: "
            "its all-reduces (several per layer) would cross the network, which is 10 to 30 times slower than the "
            "links inside a machine. Use a divisor of the devices per machine and more pipeline stages, or set "
            "allow_cross_node_tensor_parallel=True."
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


def _check_pipeline(layout: Layout, settings: Settings) -> None:
    """The schedule's file, and what must fit it; the model is not needed for that.

    Raises:
        ConfigurationError: The file, or a number that does not fit it.
    """
    schedule = TrainingSchedule(layout.schedule, layout.pp, layout.virtual, layout.order)
    made_for, asked, split = schedule.microbatches, settings.num_microbatches, settings.pipeline_split
    if made_for is not None and asked not in ("auto", made_for):
        raise ConfigurationError(
            f"num_microbatches={asked}, but the schedule in {layout.schedule} is made for {made_for} microbatches. "
            f"Set num_microbatches={made_for}, or leave it 'auto', which takes the file's number."
        )
    parts = len(schedule.owners)
    if not isinstance(split, str) and len(split) != parts - 1:
        raise ConfigurationError(
            f"pipeline_split names {len(split)} modules, but the model is cut into {parts} parts "
            f"(pipeline_parallel_size={layout.pp}, {parts // layout.pp} on each rank), which have {parts - 1} borders. "
            "Name the first module of every part but the first."
        )
    recomputed = settings.activation_checkpointing
    if layout.schedule in ("zb_h1", "zb_v") and recomputed is not None and set(check_modes(recomputed)) != {"none"}:
        rank_zero_warn(
            f"pipeline_schedule={layout.schedule!r} fills idle time with the gradients of weights, which a recomputed "
            "block cannot leave for later (it would be recomputed twice): stages with activation_checkpointing="
            f"{recomputed!r} have little or nothing to fill it with. Use '1f1b', or recompute fewer blocks."
        )


def _given(settings: dict[str, bool]) -> str:
    return ", ".join(text for text, given in settings.items() if given)
