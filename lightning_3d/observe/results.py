"""WHICH values were logged by any replica?  Means over the replicas need all of them, in the same order.

A replica without batches, or whose code logs under a condition, has no result for a name, so it would take no part in
the collective for it, and the others would wait. At the end of an epoch every replica adds what others have, empty.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_3d.comm import Communicator
from lightning_3d.errors import ConfigurationError
from lightning_3d.observe.relay import path_of


class _Entry(NamedTuple):
    """What every replica must know of a result."""

    key: str
    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    reduction: str
    add_dataloader_idx: bool
    dataloader_idx: int | None
    dtype: torch.dtype | None
    metric: str | None
    metric_attribute: str | None


def join_results(trainer: Any, module: nn.Module, replicas: Communicator, reduce: Callable[..., Any]) -> None:
    """Make the replicas agree on what was logged whenever an epoch ends.

    Args:
        trainer: Lightning's Trainer; its logger connector is patched.
        module: Where logged metric objects live.
        replicas: The data-parallel axis on the CPU.
        reduce: The strategy's `reduce`.
    """
    connector = trainer._logger_connector
    vars(connector).pop("epoch_end_reached", None)  # of an earlier run
    plain = connector.epoch_end_reached

    def joined() -> None:
        plain()
        _join(trainer._results, module, replicas, reduce)

    connector.epoch_end_reached = joined


def _join(results: Any, module: nn.Module, replicas: Communicator, reduce: Callable[..., Any]) -> None:
    """Collectives: an all-gather of a pickled list over `replicas`."""
    mine = [_entry(key, result, module) for key, result in results.valid_items() if _is_reduced(result)]
    everybody = replicas.all_gather_object((results.dataloader_idx, mine))
    if all(other == everybody[0] for other in everybody):
        return
    _check_loaders([index for index, entries in everybody if entries or index is not None])
    order = list(dict.fromkeys(entry for _, entries in everybody for entry in entries))
    for entry in order:
        result = results.get(entry.key)
        if result is None:
            result = results[entry.key] = _empty(entry, module, reduce, sys.modules[type(results).__module__])
        if result.has_reset or entry not in mine:
            # as an update would leave it: there is something to compute, and nothing is cached
            result.has_reset, result._update_count, result._computed = False, 1, None
            if entry.dtype is not None:
                result.value = result.value.to(entry.dtype)
    first = {entry.key: results[entry.key] for entry in order}
    rest = {key: result for key, result in results.items() if key not in first}
    results.clear()
    results.update({**first, **rest})


def _is_reduced(result: Any) -> bool:
    """Reading it at the end of an epoch is a collective over the replicas."""
    if not result.meta.on_epoch:
        return False
    sync = result.meta.sync
    return sync.should and sync.group is None and not sync.rank_zero_only if result.is_tensor else True


def _entry(key: str, result: Any, module: nn.Module) -> _Entry:
    meta = result.meta
    return _Entry(
        key,
        meta.fx,
        meta.name,
        meta.prog_bar,
        meta.logger,
        meta.on_step,
        meta.reduce_fx.__name__,
        meta.add_dataloader_idx,
        meta.dataloader_idx,
        result.value.dtype if result.is_tensor else None,
        None if result.is_tensor else path_of(result.value, module),
        meta.metric_attribute,
    )


def _empty(entry: _Entry, module: nn.Module, reduce: Callable[..., Any], room: Any) -> Any:
    """A result in which nothing is; `room` is the file of the Lightning package whose Trainer it is."""
    meta = room._Metadata(
        fx=entry.fx,
        name=entry.name,
        prog_bar=entry.prog_bar,
        logger=entry.logger,
        on_step=entry.on_step,
        reduce_fx=entry.reduction,
        add_dataloader_idx=entry.add_dataloader_idx,
        dataloader_idx=entry.dataloader_idx,
        metric_attribute=entry.metric_attribute,
    )
    meta.sync = room._Sync(_should=True, fn=reduce)
    result = room._ResultMetric(meta, entry.metric is None)
    if entry.metric is not None:
        result.value = module.get_submodule(entry.metric)
    return result.to(next(module.parameters()).device)


def _check_loaders(indices: list[int | None]) -> None:
    if len(set(indices)) > 1:
        raise ConfigurationError(
            "one of several evaluation loaders gives batches to some data-parallel replicas only, so these would wait "
            "for the others in its metrics. Give every replica a batch of every loader (drop_last=False, fewer "
            "replicas, a DistributedSampler, which repeats samples), or evaluate the loaders in separate runs."
        )
