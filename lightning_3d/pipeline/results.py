"""WHAT comes out of one batch?  The microbatches' losses, outputs and logs, put together on the last stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_3d.pipeline.merge import merge
from lightning_3d.pipeline.stage import Logged


class LogEntry(NamedTuple):
    """One name the user logged, with one value per microbatch that logged it.

    Attributes:
        name: As given to `self.log`.
        values: A detached tensor, a number, or a torchmetrics `Metric`, per microbatch.
        weights: What the values count: the `batch_size` given to `self.log`, else the share of the samples.
        kwargs: The other arguments of `self.log`; a `batch_size` is the sum over the microbatches.
    """

    name: str
    values: list[Any]
    weights: list[float]
    kwargs: dict[str, Any]


@dataclass
class StepResult:
    """The result of one batch.

    Attributes:
        loss: Weighted sum of the microbatches' losses, not scaled; a tensor on the last stage, else None.
        outputs: What the step returned, merged over the microbatches (last stage).
        logs: What the step logged (last stage).
        microbatches: Number of microbatches.
    """

    loss: Tensor | None = None
    outputs: Any = None
    logs: list[LogEntry] = field(default_factory=list)
    microbatches: int = 0


def collect(
    outputs: Sequence[Any],
    losses: Sequence[Tensor | None],
    logged: Sequence[list[Logged]],
    sizes: Sequence[int],
    weights: Sequence[float],
) -> StepResult:
    """Merge what the microbatches gave. All lists have one entry per microbatch."""
    merged = merge([detached(out) for out in outputs], sizes, weights)
    loss = None
    parts = [(w, x.detach()) for w, x in zip(weights, losses, strict=True) if x is not None]
    if parts:
        loss = parts[0][1] * parts[0][0]
        for weight, x in parts[1:]:
            loss = loss + x * weight
        if isinstance(merged, Tensor) and merged.dim() == 0:
            merged = loss
        elif isinstance(merged, dict) and "loss" in merged:
            merged["loss"] = loss
    return StepResult(loss, merged, _entries(logged, weights), len(sizes))


def detached(out: Any) -> Any:
    """What a step returned, without the graph its tensors hang on."""
    if isinstance(out, Tensor):
        return out.detach()
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)


def _entries(logged: Sequence[list[Logged]], weights: Sequence[float]) -> list[LogEntry]:
    found: dict[tuple[str, int], LogEntry] = {}
    for calls, share in zip(logged, weights, strict=True):
        seen: dict[str, int] = {}
        for call in calls:
            seen[call.name] = seen.get(call.name, -1) + 1
            size = call.kwargs.get("batch_size")
            weight = share if size is None else float(size)
            key = (call.name, seen[call.name])  # the same name twice in one step stays two entries
            if key not in found:
                found[key] = LogEntry(call.name, [call.value], [weight], dict(call.kwargs))
                continue
            entry = found[key]
            entry.values.append(call.value)
            entry.weights.append(weight)
            if call.kwargs.get("batch_size") is not None and entry.kwargs.get("batch_size") is not None:
                entry.kwargs["batch_size"] += call.kwargs["batch_size"]
    return list(found.values())
