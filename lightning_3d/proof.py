"""WHEN is a tensor-parallel plan proved, and how?  Once per model, by rank zero, before training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_3d.deferred import is_deferred
from lightning_3d.errors import ConfigurationError, ParityError
from lightning_3d.mesh import Mesh
from lightning_3d.probe import shorter_batches
from lightning_3d.proof_memory import fingerprint, recall, remember
from lightning_3d.tensor import (
    NothingToProve,
    OperationReport,
    TensorPlan,
    TensorReport,
    prove_operations,
    verify_tensor_plan,
)

_log = logging.getLogger(__name__)
LARGEST_RUN = 50_000_000
"""Parameters of the largest model that is run for its proof; larger ones are proved by operations."""

StepOn = Callable[[nn.Module, Any], Any]
"""Runs the user's step of a module on a batch."""


def is_small(module: nn.Module) -> bool:
    """The model can be copied and run in float64 for its proof."""
    tensors = [*module.parameters(), *module.buffers()]
    with_values = not any(t.is_meta or is_deferred(t) for t in tensors)
    return with_values and sum(p.numel() for p in module.parameters()) <= LARGEST_RUN


def prove_plan(
    module: nn.Module, plan: TensorPlan, step_on: StepOn, batch: Any, *, run: bool
) -> TensorReport | OperationReport:
    """The best proof there is for this model, on as little of the batch as the step can use.

    Args:
        module: The whole model.
        plan: Its plan.
        step_on: Runs the user's step on a batch.
        batch: What the user trains on.
        run: Run copies of the model (all of it is proved, memory as `verify_tensor_plan`); else, and if the step does
            not run on a copy, its operations one by one (`prove_operations`).

    Raises:
        ParityError, NothingToProve, ConfigurationError, Exception: As the proof on the whole batch.

    Collectives: none.
    """
    try:
        return _on_little(module, plan, step_on, batch, run)
    except ConfigurationError:
        raise
    except Exception as error:
        if not run:
            raise
        # a copy is not always as good as the module: hooks and closures that know the module still know the first one
        try:
            report = _on_little(module, plan, step_on, batch, False)
        except Exception:
            raise error from None
        _log.warning(
            f"the step does not run on a copy of the module ({type(error).__name__}: {error}), so the tensor-parallel "
            "plan is proved operation by operation."
        )
        return report


def _on_little(
    module: nn.Module, plan: TensorPlan, step_on: StepOn, batch: Any, run: bool
) -> TensorReport | OperationReport:
    attempts = list(shorter_batches(batch))
    for short in attempts[:-1]:
        try:
            report = _attempt(module, plan, step_on, short, run)
        except Exception:  # the step cannot use such a batch
            continue
        if report.ok and not report.gathers:
            return report
    return _attempt(module, plan, step_on, attempts[-1], run)


def _attempt(
    module: nn.Module, plan: TensorPlan, step_on: StepOn, batch: Any, run: bool
) -> TensorReport | OperationReport:
    prove: Any = verify_tensor_plan if run else prove_operations
    report: TensorReport | OperationReport = prove(module, plan, lambda m: step_on(m, batch))
    return report


def prove(
    module: nn.Module, plan: TensorPlan, step_on: StepOn, batch: Any, mesh: Mesh, verify: bool | str
) -> str | None:
    """Prove a plan before training, unless this model was proved before on this machine.

    Args:
        module: The whole model.
        plan: Its plan.
        step_on: Runs the user's step on a batch.
        batch: The first batch.
        mesh: This rank's place.
        verify: The user's choice: "auto", True (run the model whatever its size) or False.

    Returns:
        What was proved, in words, on rank zero; None elsewhere, or if nothing was.

    Raises:
        ParityError: They differ, or the step does not run on a copy; on all ranks.

    Collectives: one broadcast of a text over the world.
    """
    if verify is False:
        return None
    message, found = "", None
    cause: Exception | None = None
    if mesh.rank == 0:
        try:
            message, found = _proved(module, plan, step_on, batch, verify)
        except NothingToProve as error:
            _log.warning(f"the tensor-parallel plan is not proved before training, with this batch: {error}")
        except ConfigurationError as error:  # all ranks must hear of it
            message, cause = f"the tensor-parallel plan could not be proved before training: {error}", error
        except Exception as error:
            cause = error
            message = (
                "the step does not run on a float64 copy of the module, which is made to prove the tensor-parallel "
                f"plan before training: {type(error).__name__}: {error}. If the step is right, train without the "
                "proof: ThreeDStrategy(verify=False)."
            )
    message = mesh.world.broadcast_object(message, 0)
    if message:
        raise ParityError(message) from cause
    return found


def _proved(
    module: nn.Module, plan: TensorPlan, step_on: StepOn, batch: Any, verify: bool | str
) -> tuple[str, str | None]:
    """(What is wrong, what was proved)."""
    key = fingerprint(module, plan, batch) if verify == "auto" else None
    before = None if key is None else recall(key)
    if before is not None:
        return "", f"{before} (in an earlier run)"
    run = verify is True or is_small(module)
    report = prove_plan(module, plan, step_on, batch, run=run)
    if not report.ok:
        return f"the tensor-parallel model does not compute what the original does: {report}. {report.advice}", None
    count = len(report.errors)
    what = "proved" if not isinstance(report, OperationReport) else f"its {count} kinds of operations proved"
    assert math.isfinite(report.worst)
    found = f"{what} equal to the original to {report.worst:.0e}"
    if isinstance(report, OperationReport) and report.unproved:
        names = "; ".join(f"{name}: {why}" for name, why in list(report.unproved.items())[:3])
        _log.warning(
            f"{len(report.unproved)} kinds of operations of the tensor-parallel plan could not be proved alone: {names}"
        )
    elif key is not None:
        remember(key, found)
    return "", found
