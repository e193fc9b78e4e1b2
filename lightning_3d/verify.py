"""IS the parallel model the same function, and what would become of it?  Both in one process, without launching.

report = lightning_3d.verify(module, batch, "tp2-pp2")
print(lightning_3d.explain(module, batch, "tp2-pp2"))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_3d.batch_loss import warning_of_cut_loss
from lightning_3d.errors import ConfigurationError, ParityError
from lightning_3d.explain import describe_plan, stages_of
from lightning_3d.layout import Layout
from lightning_3d.pipeline import Simulation, simulate
from lightning_3d.pipeline.training_schedule import TrainingSchedule
from lightning_3d.probe import intercept_functions, try_step
from lightning_3d.proof import LARGEST_RUN, is_small, prove_plan
from lightning_3d.tensor import (
    OperationReport,
    TensorGroup,
    TensorPlan,
    TensorReport,
    ThreadCommunicator,
    function_guard,
    plan_tensor_parallel,
    rewrite,
    run_simulated,
    verify_tensor_plan,
)
from lightning_3d.tensor.exact import Exactly, experiment
from lightning_3d.tensor.replica import exact_copy, redraw
from lightning_3d.testing import relative_error

TOLERANCE = 1e-6
"""Largest relative error that passes; what is compared is float64, where a fault is larger and rounding far smaller."""

_NOTHING_CUT = (
    "warning: nothing of this model can be cut over {size} tensor-parallel ranks: every rank would hold and compute "
    "all of it. explain says why for each parameter; most often a dimension or the number of heads is no multiple of "
    "{size}."
)


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Args:
        layout: The layout that was simulated.
        tensor: The proof of the tensor-parallel rewrite, or None for tp=1.
        loss_error: Relative error of the loss through the pipeline stages.
        errors: Parameter name -> relative error of its gradient through the stages; empty for pp=1.
        tolerance: Largest error that passes.
        pipeline_run: The stages were run; False for a model that is too large to be copied.
        warnings: What is equal and may still not be what the user wants; no part of `ok`.
    """

    layout: Layout
    tensor: TensorReport | OperationReport | None
    loss_error: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    pipeline_run: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """Largest relative error of all that was compared."""
        tensor = self.tensor.worst if self.tensor is not None else 0.0
        errors = [tensor, self.loss_error, *self.errors.values()]
        return math.nan if any(math.isnan(e) for e in errors) else max(errors)

    @property
    def ok(self) -> bool:
        return self.worst <= self.tolerance

    @property
    def first_difference(self) -> str | None:
        """The first parameter (in the model's order) whose gradient differs, or None."""
        if self.tensor is not None and not self.tensor.ok:
            return self.tensor.first_difference
        return next((name for name, error in self.errors.items() if not error <= self.tolerance), None)

    def __str__(self) -> str:
        verdict = "equal to one process" if self.ok else f"DIFFERS, first in {self.first_difference or 'the loss'}"
        lines = [f"{self.layout}: {verdict}, largest relative error {self.worst:.1e} (allowed {self.tolerance:.0e})"]
        if self.tensor is not None:
            lines.append(str(self.tensor))
        if self.errors:
            lines.append(
                f"pipeline over {self.layout.pp} stages: loss error {self.loss_error:.1e}, largest gradient error "
                f"{max(self.errors.values()):.1e} over {len(self.errors)} parameters"
            )
        if not self.pipeline_run:
            lines.append(
                f"pipeline over {self.layout.pp} stages: not run, the model has more than {LARGEST_RUN / 1e6:.0f} "
                "million parameters or no values; verify a smaller configuration of it"
            )
        return "\n".join([*lines, *self.warnings])

    def raise_if_wrong(self) -> None:
        """Raise `ParityError` unless everything agrees."""
        if not self.ok:
            raise ParityError(str(self))


def verify(module: nn.Module, batch: Any, layout: Layout | str, *, num_microbatches: int = 2) -> Report:
    """Compare a layout with one process: the loss and the gradient of every parameter, in float64.

    Runs in this process: tensor-parallel ranks are threads, pipeline stages run one after the other. Copies of the
    module are used, with redrawn weights and dropout off; the module is left as it was. Data parallelism and ZeRO do
    not change what is computed and take no part.

    A model of more than 50 million parameters, or one on the meta device, is not run: the tensor-parallel plan is then
    proved by its operations, each of them alone (`OperationReport`; seconds and some gigabytes at most for 70 billion
    parameters), and the pipeline is not proved.

    Args:
        module: A LightningModule with `training_step`, whole, on the CPU or meta device.
        batch: A batch as the training loader gives it.
        layout: The layout, e.g. "tp2-pp2"; dp and zero are ignored.
        num_microbatches: Microbatches the pipeline cuts the batch into.

    Raises:
        ConfigurationError: The model cannot be cut this way.

    Collectives: none.
    """
    layout = _checked(module, layout)
    with _without_trainer(module):
        return _verify(module, batch, layout, num_microbatches)


def _verify(module: nn.Module, batch: Any, layout: Layout, num_microbatches: int) -> Report:
    step = _step(batch)
    plan = plan_tensor_parallel(module, step, layout.tp) if layout.tp > 1 else None
    run = is_small(module)
    tensor: TensorReport | OperationReport | None = None
    warnings: tuple[str, ...] = ()
    if plan is not None:
        tensor = verify_tensor_plan(module, plan, step) if run else prove_plan(module, plan, _step_on, batch, run=False)
        if not plan.sharded_fraction:
            warnings = (_NOTHING_CUT.format(size=layout.tp),)
    if layout.pp == 1 or (tensor is not None and not tensor.ok):
        return Report(layout, tensor, warnings=warnings)
    if not run:
        return Report(layout, tensor, pipeline_run=False, warnings=warnings)
    loss_error, errors, warning = _through_stages(module, batch, layout, plan, num_microbatches)
    warnings = warnings if warning is None else (*warnings, warning)
    return Report(layout, tensor, loss_error, errors, warnings=warnings)


def explain(module: nn.Module, batch: Any, layout: Layout | str) -> str:
    """The mesh, what becomes of every matrix and which module goes to which stage, as a table.

    Args:
        module: A LightningModule with `training_step`, whole.
        batch: A batch as the training loader gives it.
        layout: The layout, e.g. "tp2-pp2-dp2".

    Raises:
        ConfigurationError: The model cannot be cut this way.
    """
    layout = _checked(module, layout)
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
    with _without_trainer(module):
        plan = plan_tensor_parallel(module, _step(batch), layout.tp) if layout.tp > 1 else None
        stages = None
        if layout.pp > 1:
            stages = stages_of(simulate(module, layout.pp, batch, owners=_owners(layout)).partitions[0])
    return describe_plan(layout, plan, shapes, stages)


def _checked(module: Any, layout: Any) -> Layout:
    """The layout; both arguments are of the right kind.

    Raises:
        ConfigurationError: They are not, or this version cannot do the layout.
    """
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            f"the first of module and batch is a {type(module).__name__}, not a LightningModule. The order is module, "
            "batch, layout; a factory for the command line returns (module, batch)."
        )
    if not isinstance(layout, (str, Layout)):
        raise ConfigurationError(
            f"layout is {layout!r}; it must be a text like 'tp2-pp2', or lightning_3d.Layout(tp=2, pp=2)."
        )
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    layout.check_supported()
    return layout


@contextmanager
def _without_trainer(module: nn.Module) -> Iterator[None]:
    """A short error for a step that needs a Trainer, which is not there."""
    try:
        yield
    except RuntimeError as error:
        if "not attached to a `Trainer`" not in str(error):
            raise
        raise ConfigurationError(
            f"training_step of {type(module).__name__} uses self.trainer, or what needs it (self.optimizers(), "
            "self.lr_schedulers()), but verify and explain call the step without a Trainer. With ThreeDStrategy in a "
            "Trainer it works, and the plan is proved there before training (print(strategy.explain()) shows it). To "
            "use them here, guard those lines: `if self._trainer is not None: ...`."
        ) from None


def _owners(layout: Layout) -> tuple[int, ...]:
    """Which stage runs which part of the model."""
    return TrainingSchedule(layout.schedule, layout.pp, layout.virtual, layout.order).owners


def _step(batch: Any) -> Callable[[nn.Module], Any]:
    return lambda module: _step_on(module, batch)


def _step_on(module: nn.Module, batch: Any) -> Any:
    return try_step(module, "training_step", batch, 0)


def _through_stages(
    module: nn.Module, batch: Any, layout: Layout, plan: TensorPlan | None, num_microbatches: int
) -> tuple[float, dict[str, float], str | None]:
    """Errors of the loss and gradients when the (rewritten) model runs in stages, and a warning of the microbatches."""
    batch = tree_map(_exact, batch)
    options: dict[str, Any] = {"num_microbatches": num_microbatches, "forward_context": Exactly}
    with experiment(0):
        original = exact_copy(module)
        redraw(original, 0)
        whole = simulate(original, 1, batch, **options)

        def body(comm: ThreadCommunicator) -> Simulation:
            model = exact_copy(original)
            group = None
            if plan is not None:
                group = TensorGroup(comm)
                rewrite(model, plan, group)
            return simulate(model, layout.pp, batch, tensor_group=group, owners=_owners(layout), **options)

        def uncut(seed: int) -> Tensor | None:
            return simulate(original, 1, batch, forward_context=Exactly, seed=seed).result.loss

        assert whole.result.loss is not None
        with intercept_functions(function_guard, 1):
            ranks = run_simulated(layout.tp, body)
        found = warning_of_cut_loss(uncut, whole.result.loss, len(whole.partitions))
        warning = None if found is None else f"warning: {found}"
    loss_error = max(relative_error(r.result.loss, whole.result.loss) for r in ranks)
    errors = {}
    for name, want in whole.gradients.items():
        parts = [rank.gradients[name] for rank in ranks]
        errors[name] = _gradient_error(parts, want, plan, name)
    return loss_error, errors, warning


def _exact(value: Any) -> Any:
    """Floating-point inputs in float64, as the copies of the model are."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _gradient_error(parts: list[Tensor | None], want: Tensor | None, plan: TensorPlan | None, name: str) -> float:
    placement = plan.decisions[name].placement if plan is not None else None
    if placement is None or all(part is None for part in parts):
        return max(relative_error(part, want) for part in parts)
    shape = next(tuple(part.shape) for part in parts if part is not None)
    shards = [part if part is not None else torch.zeros(shape, dtype=torch.float64) for part in parts]
    return relative_error(placement.to_global(shards, len(shards)), want)
