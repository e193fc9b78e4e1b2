"""WHEN is a tensor-parallel plan proved, and who hears of it?  Once per run, by rank zero, before training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_3d.errors import ConfigurationError, ParityError
from lightning_3d.mesh import Mesh
from lightning_3d.tensor import NothingToProve, TensorPlan, verify_tensor_plan

_log = logging.getLogger(__name__)
LARGEST_PROVED = 50_000_000
"""Parameters of the largest model that `verify="auto"` proves."""


def wants_proof(verify: bool | str, count: int, rank: int) -> bool:
    """Whether to prove the plan of a model with `count` parameters; rank zero says if "auto" decides against it."""
    if verify != "auto":
        return bool(verify)
    if count > LARGEST_PROVED and rank == 0:
        _log.info(
            f"the tensor-parallel plan of this model ({count / 1e6:.0f} million parameters) is not proved before "
            "training: that needs float64 copies of it. Prove a smaller configuration with lightning_3d.verify, or "
            "set verify=True."
        )
    return count <= LARGEST_PROVED


def prove(module: nn.Module, plan: TensorPlan, step: Callable[[nn.Module], Any], mesh: Mesh) -> float | None:
    """The original against the rewritten module on simulated ranks.

    Returns:
        The largest error, on rank zero; None elsewhere, or if the batch gives nothing to prove (a warning says so).

    Raises:
        ParityError: They differ, or the step does not run on a copy; on all ranks.

    Collectives: one broadcast of a text over the world.
    """
    message, worst = "", None
    cause: Exception | None = None
    if mesh.rank == 0:
        try:
            report = verify_tensor_plan(module, plan, step)
            worst = report.worst
            if not report.ok:
                message = f"the tensor-parallel model does not compute what the original does: {report}. "
                message += report.advice
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
    return worst
