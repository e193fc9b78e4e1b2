"""WHAT do Lightning's collectives mean here?  A mean is one over the replicas, a decision one of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_3d.comm import ProcessCommunicator
from lightning_3d.errors import ConfigurationError
from lightning_3d.lifecycle import Lifecycle


class Exchange(Lifecycle):
    """Collectives that Lightning and users call."""

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel axis (all ranks of a replica hold the same value), or over `group`.

        Returns a new tensor; the argument is left alone. The mean of integers is exact (float64).
        """
        if not isinstance(tensor, Tensor) or self._world is None:
            return tensor
        self._before_collective()
        axis = self.mesh.data if group is None else ProcessCommunicator("user", group, self.root_device)
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower().rpartition(".")[2]
        value = tensor.detach().clone()
        if name in ("mean", "avg"):
            value = value if value.is_floating_point() else value.double()
            return axis.all_reduce(value) / axis.size
        if name not in ("sum", "max", "min"):
            raise ConfigurationError(f"cannot reduce by {reduce_op!r}; use 'mean', 'sum', 'max' or 'min'.")
        return axis.all_reduce(value, name)  # type: ignore[arg-type]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One decision over all ranks."""
        if self._world is None:
            return decision
        self._before_collective()
        flag = torch.tensor([int(decision)], device=self.root_device)
        return bool(self._world.all_reduce(flag, "min" if all else "max").item())

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._before_collective()
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._before_collective()
        return super().broadcast(obj, src)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self._before_collective()
        return super().all_gather(*args, **kwargs)

    def _before_collective(self) -> None:
        """With ZeRO-3 nobody may wait here for a replica that waits for this one's part in a gather."""
        if self._engine is not None and self._engine.units is not None:
            self._engine.units.before_collective()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The batches inside accumulate: nothing is reduced over the replicas."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before
