"""WHO knows what was logged?  From the last pipeline stage to every rank of the replica.

Only the last stage runs a step to its end, so only it knows the loss, what was logged, and what was returned. The
leader (global rank 0 of the replica) sends them; every rank then calls the real `LightningModule.log`, so callbacks,
progress bars, loggers and schedulers see the same values everywhere.

Values travel packed in one tensor on the device; names and options only when they change, over the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_3d.comm import Communicator

LEADER = 0
"""Index of the leader in the replica's communicators."""


@dataclass(frozen=True)
class LogCall:
    """What a step logged under one name, over its microbatches.

    Args:
        name: The key.
        values: One value per microbatch that logged it: 0-dim tensors, numbers, or one torchmetrics `Metric`.
        weights: Number of samples of each of those microbatches.
        options: Keyword arguments of `self.log`.
    """

    name: str
    values: Sequence[Any]
    weights: Sequence[float]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class _Entry:
    """One shared value in the schema: all but the number (a metric's is that of the step). No name: the loss."""

    name: str | None
    dtype: torch.dtype | None
    metric: str | None
    options: tuple[tuple[str, Any], ...]


@dataclass
class Shared:
    """What every rank of a replica knows after a step."""

    loss: Tensor | None = None
    logs: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    outputs: Any = None


@dataclass
class Relay:
    """Sends what the last stage knows to all ranks of a replica.

    Args:
        replica: The replica's axis, on the device.
        control: The same axis on the CPU.
        device: Where values are packed.
        inside_step: A pipeline schedule is running, so the stages are not at the same line of code.
    """

    replica: Communicator
    control: Communicator
    device: torch.device
    inside_step: bool = False
    _schemas: dict[tuple[_Entry, ...], int] = field(default_factory=dict)
    _known: list[tuple[_Entry, ...]] = field(default_factory=list)

    @property
    def is_leader(self) -> bool:
        return self.replica.rank == LEADER

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark what runs inside as a pipeline schedule."""
        self.inside_step = True
        try:
            yield
        finally:
            self.inside_step = False

    def broadcast(self, value: Any) -> Any:
        """The leader's object on every rank of the replica, tensors on the ranks' device."""
        on_cpu = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, value) if self.is_leader else None
        shared = self.control.broadcast_object(on_cpu, LEADER)
        return tree_map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, shared)

    def share(self, loss: Tensor | None, calls: Sequence[LogCall], outputs: Any, module: nn.Module) -> Shared:
        """Share the loss, the logged values and what else the step returned.

        Args:
            loss: On the leader the step's loss, or None where a step has none; ignored elsewhere.
            calls: On the leader what was logged; ignored elsewhere.
            outputs: On the leader what the step returned beside the loss, or None; ignored elsewhere.
            module: Where logged metric objects live.

        Collectives: a broadcast of two integers over the CPU axis and one of `1 + len(calls)` float64 over the
        replica; the outputs, if there are any, as a pickled object over the CPU axis.
        """
        packed: list[Tensor] = []
        schema: tuple[_Entry, ...] = ()
        if self.is_leader:
            entries, packed = self._pack(loss, calls, module)
            schema = tuple(entries)
        schema, has_outputs = self._agree_on(schema, outputs is not None)
        values = torch.stack(packed) if self.is_leader else torch.empty(len(schema), dtype=torch.float64)
        values = self.replica.broadcast(values.to(self.device), LEADER)
        shared = Shared()
        for entry, value in zip(schema, values, strict=True):
            content: Any = value if entry.dtype is None else value.to(entry.dtype)
            if entry.name is None:
                shared.loss = content if entry.dtype is not None else None
                continue
            if entry.metric is not None:
                metric: Any = module.get_submodule(entry.metric)
                if entry.dtype is not None:
                    metric._forward_cache = content  # what Lightning logs with `on_step`
                content = metric
            shared.logs.append((entry.name, content, dict(entry.options)))
        if has_outputs:
            shared.outputs = self.broadcast(outputs)
        return shared

    def _pack(
        self, loss: Tensor | None, calls: Sequence[LogCall], module: nn.Module
    ) -> tuple[list[_Entry], list[Tensor]]:
        nan = torch.full((), float("nan"), dtype=torch.float64, device=self.device)
        entries = [_Entry(None, None if loss is None else loss.dtype, None, ())]
        packed = [nan if loss is None else loss.detach().double()]
        for call in calls:
            first = call.values[0]
            if isinstance(first, nn.Module):
                step_value = _step_value(first)
                dtype = None if step_value is None else step_value.dtype
                entries.append(_Entry(call.name, dtype, path_of(first, module), _frozen(call.options)))
                packed.append(nan if step_value is None else step_value.to(self.device).double())
                continue
            dtype = first.dtype if isinstance(first, Tensor) else None
            entries.append(_Entry(call.name, dtype, None, _frozen(call.options)))
            packed.append(collapse(call, self.device))
        return entries, packed

    def _agree_on(self, schema: tuple[_Entry, ...], outputs: bool) -> tuple[tuple[_Entry, ...], bool]:
        """The leader's schema, which is sent whole only the first time, and whether it has outputs."""
        index = self._schemas.get(schema, -1) if self.is_leader else -1
        message = torch.tensor([index, int(outputs)], dtype=torch.int64)
        index, has_outputs = self.control.broadcast(message, LEADER).tolist()
        if index < 0:
            schema = self.control.broadcast_object(schema, LEADER)
            self._schemas[schema] = len(self._known)
            self._known.append(schema)
            return schema, bool(has_outputs)
        return self._known[index], bool(has_outputs)


def collapse(call: LogCall, device: torch.device) -> Tensor:
    """One value (float64) for the whole step out of the microbatches' values, by the call's `reduce_fx`."""
    values = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in call.values])
    reduce: str | Callable[[Tensor], Tensor] = call.options.get("reduce_fx", "mean")
    if reduce in ("mean", "avg") or reduce is torch.mean:
        weight = torch.tensor(list(call.weights), dtype=torch.float64, device=device)
        return (values * weight).sum() / weight.sum()
    for name, function in (("sum", torch.sum), ("max", torch.max), ("min", torch.min)):
        if reduce in (name, function):
            return function(values)
    assert callable(reduce)
    return reduce(values)


def _step_value(metric: Any) -> Tensor | None:
    """The value of a metric over the last batch, if it is one number."""
    value = metric._forward_cache
    if not isinstance(value, (Tensor, int, float)):
        return None
    value = torch.as_tensor(value).detach()
    return value.reshape(()) if value.numel() == 1 else None


def path_of(metric: nn.Module, module: nn.Module) -> str:
    """Name of a logged metric object inside the module.

    Raises:
        ValueError: It is no attribute of the module.
    """
    for name, child in module.named_modules():
        if child is metric:
            return name
    raise ValueError(
        f"self.log got a {type(metric).__name__} that is not an attribute of the LightningModule; the other ranks "
        "cannot find theirs. Assign it in __init__: self.metric = ..."
    )


def _frozen(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items()))
