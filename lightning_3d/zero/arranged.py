"""HOW must what an optimizer holds be arranged while it steps?  Then, and only then, some need it otherwise."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.zero.piece import Slot


class Arranged(abc.ABC):
    """What one optimizer's groups hold, arranged for its steps."""

    @abc.abstractmethod
    def join(self) -> None:
        """Before the step, once its gradients are there."""

    @abc.abstractmethod
    def part(self) -> None:
        """After it."""

    @abc.abstractmethod
    def restore(self) -> None:
        """As it was, if it is arranged for a step that failed."""

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Join now, or once the closure has run that the optimizer is given.

        Args:
            args, kwargs: Of its `step` (the optimizer first).

        Returns:
            What to call it with instead.
        """
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.join()
            return args, kwargs

        def joined_after() -> Any:
            self.part()
            out = closure()
            self.join()
            return out

        if "closure" in kwargs:
            return args, {**kwargs, "closure": joined_after}
        return (args[0], joined_after, *args[2:]), kwargs


class SparseGradients(Arranged):
    """Gradients travel, are clipped and shown dense; an optimizer that takes sparse ones only gets the rows they had.

    Args:
        optimizer: It.
        slot_of: The place of what it holds in a bucket.
    """

    def __init__(self, optimizer: Optimizer, slot_of: Callable[[nn.Parameter], Slot | None]) -> None:
        self._optimizer, self._slot_of = optimizer, slot_of
        self._dense: list[tuple[nn.Parameter, Tensor]] = []

    def join(self) -> None:
        self.restore()
        for group in self._optimizer.param_groups:
            for held in group["params"]:
                slot, gradient = self._slot_of(held), held.grad
                if slot is None or gradient is None or gradient.is_sparse or slot.given_rows is None:
                    continue
                rows = slot.given_rows.to(gradient.device).nonzero().t()
                self._dense.append((held, gradient))
                held.grad = torch.sparse_coo_tensor(rows, gradient[rows[0]], gradient.shape, is_coalesced=True)

    def part(self) -> None:
        self.restore()

    def restore(self) -> None:
        for held, gradient in self._dense:
            held.grad = gradient
        self._dense = []
