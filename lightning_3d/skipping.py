"""WHAT does a step that returns None do?  It is skipped, as on one process: nothing is trained by this batch.

Lightning refuses None in distributed training, since ranks that decide alone would wait for each other. Here the ranks
of a replica hear of it together. Replicas may disagree: one that skips counts with zeros, as a skipped batch does among
those that are accumulated; only if all of them skip, the optimizer finds no gradients (None: no momentum, no decay).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.comm import Communicator
from lightning_3d.zero import Zero

SKIPPED = object()
"""What the strategy's training_step returns in place of None, which Lightning would refuse."""


def let_steps_be_skipped(trainer: Any) -> None:
    """Lightning's loop understands `SKIPPED` from now on.

    Args:
        trainer: Lightning's Trainer; the loop's class of results is replaced.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    base = type(loop).output_result_cls

    class Result(base):  # type: ignore[misc, valid-type]
        @classmethod
        def from_training_step_output(cls, output: Any, *args: Any, **kwargs: Any) -> Any:
            return base.from_training_step_output(None if output is SKIPPED else output, *args, **kwargs)

    loop.output_result_cls = Result


class Skips:
    """Decides on the last stage whether the batches up to an optimizer step trained anything.

    Args:
        replicas: The data-parallel axis on the CPU.
    """

    def __init__(self, replicas: Communicator) -> None:
        self._replicas, self._trained = replicas, False

    def settle(self, loss: Tensor | None, last: bool, device: torch.device) -> Tensor | None:
        """The loss to go on with: None skips the batch on all replicas.

        Args:
            loss: What the step returned on the last stage of this replica.
            last: The optimizer steps after this batch.
            device: Where the loss lives.

        Collectives: one flag over `replicas`, where `last`.
        """
        self._trained = self._trained or loss is not None
        if not last:
            return loss
        trained, self._trained = torch.tensor([self._trained], dtype=torch.uint8), False
        if self._replicas.size > 1:
            trained = self._replicas.all_reduce(trained, "max")
        return torch.zeros((), device=device) if loss is None and trained.item() else loss


def drop_gradients(zero: Zero) -> None:
    """Forget what the backwards of skipped batches left: earlier stages got zeros, where one process has None."""
    for slot in zero.slots.values():
        slot.used = False
    zero.rescaled = None
    zero.publish()
