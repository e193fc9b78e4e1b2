"""WHICH layout does a run with `layout="auto"` get?  The question put to the planner, and its answer.

The batch that the user's loader gives is that of one replica, as everywhere; layouts are compared by samples per second
(docs/decisions/0013). All ranks ask the same question, since a step may talk to other ranks; rank zero's answer counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_3d.asked import Asked
from lightning_3d.comm import Communicator
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.pipeline import check_cut
from lightning_3d.pipeline.samples import batch_size
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.given import Given
from lightning_3d.planner.measured import cluster_of_run
from lightning_3d.planner.planning import Plan, plan_batches
from lightning_3d.planner.pricing import Priced
from lightning_3d.planner.reasons import why_best
from lightning_3d.planner.recipes import recipe_of_run
from lightning_3d.planner.strategy_file import write_strategy
from lightning_3d.planner.tables import choice_text
from lightning_3d.planner.user_model import ModuleChain, chain_of_module
from lightning_3d.recompute import check_modes
from lightning_3d.settings import Settings

Refusal = Callable[[Layout], str | None]
_LOW = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}
_LEAST_FIRST = ("none", "selective", "full")


@dataclass(frozen=True)
class Chosen:
    """What was chosen, and why.

    Attributes:
        layout: The sizes.
        arguments: Those of `ThreeDStrategy` to write in place of `layout="auto"`.
        reason: In one sentence.
        text: The table of what was compared, the reason, and how to write it down.
        compared: Name, predicted samples per second and arguments of every layout in it, best first.
    """

    layout: Layout
    arguments: Mapping[str, Any]
    reason: str
    text: str
    compared: tuple[tuple[str, float, Mapping[str, Any]], ...] = ()

    def settings(self, before: Settings) -> Settings:
        """The user's settings with what was open among them."""
        taken = ("num_microbatches", "sequence_parallel", "activation_checkpointing")
        return replace(before, **{name: self.arguments[name] for name in taken if name in self.arguments})

    def write(self, path: Path, class_path: str) -> None:
        """A file for LightningCLI.

        Raises:
            ConfigurationError: It cannot be written there.
        """
        write_strategy(path, self.arguments, class_path)


@dataclass(frozen=True)
class Question:
    """What the choice depends on.

    Attributes:
        module: The LightningModule, whole, on `device`.
        batch: Its first batch, the same on all ranks, on `device`.
        world: All ranks.
        device: This rank's.
        machines: How many there are.
        accumulate: Batches whose gradients are added up before a step.
        precision: The Trainer's.
        asked: What the user said about the layout.
        settings: And about the rest.
        refuses: Why a layout cannot be set up; None: it can (see `refusal`).
    """

    module: nn.Module
    batch: Any
    world: Communicator
    device: torch.device
    machines: int
    accumulate: int
    precision: str
    asked: Asked
    settings: Settings
    refuses: Refusal


def check_can_choose(trainer: Any, module: Any) -> None:
    """Refuse runs whose step cannot be looked at before it is known how it will be cut.

    Raises:
        ConfigurationError: No training, or optimizers that the step itself calls.
    """
    fn = trainer.state.fn.value
    if fn != "fit":
        raise ConfigurationError(
            f"layout='auto' compares layouts for training, but trainer.{fn} is the first that this Trainer runs. Give "
            "the sizes for it (tensor_parallel_size, pipeline_parallel_size; a run of fit with 'auto' prints them), or "
            f"call trainer.{fn} after trainer.fit, whose choice it keeps."
        )
    check_steps_itself(module)


def check_steps_itself(module: Any) -> None:
    """Refuse a step that calls optimizers, which are not there yet.

    Raises:
        ConfigurationError: With the way out.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} uses manual optimization: its training_step calls optimizers, which are made "
            "after the layout is known, so layout='auto' cannot look at the step. Give the sizes, for example "
            "ThreeDStrategy(tensor_parallel_size=2) or ThreeDStrategy() for data parallelism alone."
        )


def refusal(*checks: Callable[[Layout], None]) -> Refusal:
    """What set-up would say, in a sentence."""

    def refuses(layout: Layout) -> str | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for check in checks:
                    check(layout)
            except ConfigurationError as error:
                return _sentence(error)
        return None

    return refuses


def check_can_be_cut(batch: Any, layout: Layout) -> None:
    """Refuse a pipeline for a batch whose samples nobody can tell.

    Raises:
        ConfigurationError: With the reason.
    """
    if layout.pp > 1:
        batch_size(batch)


def _sentence(error: Exception) -> str:
    return str(error).splitlines()[0].partition(". ")[0].removesuffix(".")


def choose(question: Question) -> Chosen:
    """The layout of the most samples per second, of those that this run can be set up with.

    Collectives over `question.world`: those of `cluster_of_run`, whatever the user's step calls, a broadcast of the
    answer (a few kB).

    Raises:
        ConfigurationError: There is none, or the step cannot be looked at; on all ranks.
    """
    cluster, where = cluster_of_run(question.world, question.device, question.machines)
    answer: Chosen | str
    try:
        answer = _choose(question, cluster, where)
    except ConfigurationError as error:
        answer = str(error)
    answer = question.world.broadcast_object(answer, 0)
    if isinstance(answer, str):
        raise ConfigurationError(
            f"layout='auto' found nothing. {answer}\nSizes without layout='auto', "
            "ThreeDStrategy(tensor_parallel_size=..., pipeline_parallel_size=...), are tried without a plan."
        )
    return answer


def _choose(question: Question, cluster: Cluster, where: str) -> Chosen:
    demands = question.settings.tensor_parallel_plan
    chain = chain_of_module(
        question.module,
        question.batch,
        question.device,
        overrides=None if isinstance(demands, str) else demands,
        strict=question.settings.strict_tensor_parallel,
    )
    given = given_by(question.asked, question.settings, chain.samples, question.refuses)
    products, recipe = recipe_of_run(
        _precision(question),
        question.settings.masters,
        question.settings.float32_gradients,
        question.settings.offload_optimizer,
    )
    plan = plan_that_can_be_cut(
        chain,
        cluster,
        given,
        lambda best: _check_cut(question, best),
        precision=products,
        recipe=recipe,
        accumulate=question.accumulate,
    )
    layout = plan.best.run.candidate.layout
    said = {name: getattr(question.settings, name) for name in ("activation_checkpointing", "sequence_parallel")}
    said = {name: value for name, value in said.items() if value is not None}
    compared = tuple((str(p), p.samples_per_second, {**plan.strategy_arguments(p), **said}) for p in plan.ranked)
    arguments, reason = compared[0][2], why_best(plan)
    text = choice_text(plan, reason, arguments, where)
    return Chosen(layout, arguments, reason, text, compared)


def _precision(question: Question) -> str:
    """The Trainer's, or of a model that was built in less than that."""
    largest = max(nn.Module.parameters(question.module), key=lambda p: p.numel(), default=None)
    return question.precision if largest is None else _LOW.get(largest.dtype, question.precision)


def given_by(asked: Asked, settings: Settings, batch: int, refuses: Refusal) -> Given:
    """What the user has chosen, in the planner's words.

    Raises:
        ConfigurationError: A schedule that the planner cannot price.
    """
    schedule = asked.fields.get("schedule")
    if schedule is not None and asked.least().schedule_is_file:
        raise ConfigurationError(
            f"layout='auto' compares schedules by name; the one in {schedule} fits one number of stages and "
            "microbatches. Give the sizes that it is made for."
        )
    modes = settings.activation_checkpointing
    recompute = None if modes is None else min(check_modes(modes), key=_LEAST_FIRST.index)
    fields = {name: asked.fields.get(name) for name in ("tp", "pp", "dp", "zero", "virtual")}
    return Given(
        **fields,
        schedule=None if schedule is None else asked.least().schedule,
        order=asked.fields.get("order", "looped"),
        microbatches=None if isinstance(settings.num_microbatches, str) else settings.num_microbatches,
        recompute=recompute,
        sequence_parallel=settings.sequence_parallel,
        batch=batch,
        refuses=refuses,
    )


def plan_that_can_be_cut(
    chain: ModuleChain, cluster: Cluster, given: Given, check: Callable[[Priced], None], **job: Any
) -> Plan:
    """The plan whose best layout passes a check that is too long for every candidate: the pipeline's own cut.

    A number of windows that the module cannot be cut into rules out all larger ones.

    Args:
        chain, cluster, given: As in `plan_batches`.
        check: Raises `ConfigurationError` for a layout that cannot be cut.
        **job: The rest of `plan_batches`.

    Raises:
        ConfigurationError: None is left.
    """
    cannot: dict[int, str] = {}

    def refuses(layout: Layout) -> str | None:
        why = [text for windows, text in cannot.items() if layout.pp * layout.virtual >= windows]
        return why[0] if why else given.refuses(layout)

    while True:
        plan = plan_batches(chain, cluster, replace(given, refuses=refuses), **job)
        layout = plan.best.run.candidate.layout
        if layout.pp == 1:
            return plan
        try:
            check(plan.best)
        except ConfigurationError as error:
            cannot[layout.pp * layout.virtual] = _sentence(error)
        else:
            return plan


def _check_cut(question: Question, best: Priced) -> None:
    candidate = best.run.candidate
    check_cut(
        question.module,
        question.batch,
        candidate.layout,
        candidate.microbatches,
        question.settings.pipeline_split,
        question.settings.forward_context,
    )
