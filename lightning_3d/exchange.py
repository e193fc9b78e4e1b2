"""WHAT do Lightning's collectives mean here?  A mean is one over the replicas, a decision one of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from lightning_3d.comm import DONE, Communicator, Pending, ProcessCommunicator, Reduction, is_world
from lightning_3d.errors import ConfigurationError
from lightning_3d.lifecycle import Lifecycle
from lightning_3d.pipeline.glue import current
from lightning_3d.probe import is_tried_alone


class Exchange(Lifecycle):
    """Collectives that Lightning and users call."""

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel axis (all ranks of a replica hold the same value), or over `group`.

        Returns a new tensor; the argument is left alone. The mean of integers is exact (float64).
        """
        if not isinstance(tensor, Tensor) or self._world is None:
            return tensor
        axis = self._replicas() if group is None else ProcessCommunicator("user", group, self.root_device)
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower().rpartition(".")[2]
        value = tensor.detach().clone()
        if name in ("mean", "avg"):
            value = value if value.is_floating_point() else value.double()
            return _reduced(value, axis, "sum") / axis.size
        if name not in ("sum", "max", "min"):
            raise ConfigurationError(f"cannot reduce by {reduce_op!r}; use 'mean', 'sum', 'max' or 'min'.")
        return _reduced(value, axis, name)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One decision over all ranks; in a step that stages run at different times, over the replicas."""
        if self._world is None:
            return decision
        with _not_followed() as in_stages:
            axis = self._replicas() if in_stages else self._every_rank()
            flag = torch.tensor([int(decision)], device=self.root_device)
            return bool(axis.all_reduce(flag, "min" if all else "max").item())

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with _not_followed() as in_stages:
            if in_stages:
                self._replicas().barrier()
            else:
                self._before_collective()
                super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with _not_followed() as in_stages:
            if in_stages:
                axis = self._replicas()
                return axis.broadcast_object(obj, src * axis.size // self._all_ranks.size)
            self._before_collective()
            return super().broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """(replicas, ...): what each replica has (all ranks of one hold the same samples), or each rank of `group`."""
        if self._world is None or not is_world(group):
            self._before_collective()
            return super().all_gather(tensor, group, sync_grads)
        axis = self._replicas()
        tensor = tensor if sync_grads else tensor.detach()
        return tensor.unsqueeze(0) if axis.size == 1 else cast(Tensor, _GatherReplicas.apply(tensor, axis))

    def _replicas(self) -> Communicator:
        """The data-parallel axis, as a collective of the user's needs it."""
        if is_tried_alone():
            data = self.mesh.data if self._mesh is not None else Communicator("dp")
            return _AllAlike("dp", data.rank, data.size)
        self._before_collective()
        return self.mesh.data

    def _every_rank(self) -> Communicator:
        self._before_collective()
        return self._all_ranks

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


@contextmanager
def _not_followed() -> Iterator[bool]:
    """Around what is no event of the user's step.

    Yields:
        Whether a step runs in which not all ranks are at the same place: an experiment, or stages of a pipeline.
    """
    interpreter = current()
    with interpreter.paused() if interpreter is not None else nullcontext():
        yield interpreter is not None or is_tried_alone()


def _reduced(value: Tensor, axis: Communicator, op: str) -> Tensor:
    return value if axis.size == 1 else cast(Tensor, _ReduceReplicas.apply(value, axis, op))


class _AllAlike(Communicator):
    """An axis whose other ranks are not there to answer; they are taken to have what this one has."""

    def all_reduce_start(self, tensor: Tensor, op: Reduction = "sum") -> Pending:
        if op == "sum":
            tensor.mul_(self.size)
        return DONE

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.size

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.sum(dim, keepdim=True)


class _GatherReplicas(torch.autograd.Function):
    """What each replica has; the gradient is the sum of all replicas' for this one's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Communicator) -> Tensor:
        ctx.axis = axis
        return torch.stack(axis.all_gather(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.reduce_scatter(gradient, 0).squeeze(0), None


class _ReduceReplicas(torch.autograd.Function):
    """The sum (or largest, smallest) over the replicas, without a gradient. A Function, so that it is one event."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Communicator, op: Reduction) -> Tensor:
        return axis.all_reduce(tensor.clone(), op)
