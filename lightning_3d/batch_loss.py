"""DOES cutting a batch into microbatches change the loss?  It does unless the loss is a mean over samples."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.pipeline.microbatch import split_with_sizes
from lightning_3d.probe import try_step
from lightning_3d.proof import is_small
from lightning_3d.tensor.exact import Exactly, experiment
from lightning_3d.tensor.replica import exact_copy, redraw
from lightning_3d.tensor.untouched import untouched
from lightning_3d.tensor.verify import loss_of
from lightning_3d.testing import relative_error

_log = logging.getLogger(__name__)
TOLERANCE = 1e-6
"""Both losses are float64, where rounding is far smaller."""

_WAYS_OUT = (
    "A pipeline trains on the mean over microbatches, as gradient accumulation does, and so differs from one process. "
    "Set num_microbatches=1 to keep the loss of the whole batch; or return a mean over samples (divide a sum by their "
    "number), and give tensors with the batch as their first dim."
)


def warning_of_cut_loss(whole: Callable[[int], Tensor | None], parts: Tensor, count: int) -> str | None:
    """What to tell the user when the loss of a whole batch is not the mean over its microbatches, or None.

    Args:
        whole: Seed -> loss of the uncut batch.
        parts: The mean of the microbatches' losses, weighted by samples.
        count: Number of microbatches.
    """
    if count == 1:
        return None
    loss = whole(0)
    if loss is None or relative_error(parts, loss) <= TOLERANCE:
        return None
    again = whole(1)
    if again is None or relative_error(again, loss) > TOLERANCE:
        return None  # the step draws random numbers: two losses cannot be compared
    return (
        f"the loss of the whole batch is {loss.item():.6g}, but the mean over {count} microbatches (weighted by "
        f"samples) is {parts.item():.6g} (with random weights, without dropout). It is not a mean over samples: a sum, "
        "a loss that compares the samples of a batch (contrastive, in-batch negatives), a mean over unequal numbers of "
        "tokens, batch norm, or a batch that was cut along another dim than the samples (time-major: time x batch). "
        + _WAYS_OUT
    )


def warn_of_cut_loss(module: nn.Module, batch: Any, count: int, verify: bool | str) -> None:
    """Compare, unless the user does not want proofs or the model is too large to be copied, and warn once.

    Args:
        module: The whole module.
        batch: Its first training batch.
        count: Number of microbatches.
        verify: The user's choice: "auto", True or False.

    Collectives: as `compare_first_batch`.
    """
    if count > 1 and (verify is True or (verify == "auto" and is_small(module))):
        warning = compare_first_batch(module, batch, count)
        if warning is not None:
            rank_zero_warn(warning)


def compare_first_batch(module: nn.Module, batch: Any, count: int) -> str | None:
    """What to tell the user before a batch is cut into microbatches for the first time, or None.

    Runs the step on a float64 copy in evaluation mode, without gradients: once on the whole batch, once per microbatch.
    What cannot be compared (the step does not run on a copy, gives no loss, draws random numbers) is no reason to
    complain. The module, random generators and what its code holds are left as they were.

    Args:
        module: The whole module.
        batch: Its first training batch.
        count: Number of microbatches.

    Collectives: none of its own; those of the user's step, so every rank of a replica calls it.
    """
    with untouched(module), experiment(0), torch.no_grad(), Exactly():
        try:
            model = exact_copy(module).eval()
            redraw(model, 0)
            if _loss(model, batch, 0) is None:
                return None
        except Exception as error:
            _log.debug("the loss of microbatches is not compared with that of the batch: %s", error)
            return None
        try:
            microbatches, sizes = split_with_sizes(batch, count)
            losses = [_loss(model, part, 0) for part in microbatches]
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            return (
                f"training_step runs on the whole batch, but not on one of its {count} microbatches "
                f"({type(error).__name__}: {said}). Was the batch cut along another dim than the samples "
                f"(time-major: time x batch)? {_WAYS_OUT}"
            )
        if any(loss is None for loss in losses):
            return None
        mean = torch.stack([n * x for n, x in zip(sizes, losses, strict=True) if x is not None]).sum() / sum(sizes)
        return warning_of_cut_loss(lambda seed: _loss(model, batch, seed), mean, len(sizes))


def _loss(model: nn.Module, batch: Any, seed: int) -> Tensor | None:
    """The loss of one number, or None; the step may do with its batch what it likes."""
    torch.manual_seed(seed)
    output = try_step(model, "training_step", copy.deepcopy(batch), 0)
    if output is None:
        return None
    loss = loss_of(output)
    return loss.detach() if loss.numel() == 1 else None
