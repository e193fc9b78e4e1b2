"""DOES cutting a batch into microbatches change the loss?  It does unless the loss is a mean over samples."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_3d.testing import relative_error

TOLERANCE = 1e-6
"""Both losses are float64, where rounding is far smaller."""


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
        f"warning: the loss of the whole batch is {loss.item():.6g}, but the mean over {count} microbatches (weighted "
        f"by samples) is {parts.item():.6g} (with the proof's weights). It is not a mean over samples: a sum, a loss "
        "that compares the samples of a batch (contrastive), a mean over unequal numbers of tokens, or batch norm. A "
        "pipeline trains on the mean over microbatches, as gradient accumulation does, and so differs from one "
        "process. Set num_microbatches=1, or return a mean over samples (divide a sum by their number), if that "
        "matters."
    )
