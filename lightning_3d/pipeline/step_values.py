"""WHAT is a torchmetrics metric's value over a whole batch?  That of a copy which sees all its microbatches.

`metric(...)` leaves the value of the last call on the metric, and Lightning logs that with `on_step=True`. In a
pipeline the last call has seen one microbatch only, and values of microbatches cannot be averaged (an F1 score).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torchmetrics import Metric

from lightning_3d.pipeline.glue import replaced_forward

Resolve = Callable[[Any, Any], tuple[Any, Any]]


class StepValues:
    """The metrics whose step value is logged, each with a copy that is reset with every batch."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}
        self._now: list[tuple[Any, Any]] = []

    @property
    def collects(self) -> bool:
        """Whether this batch has such metrics."""
        return bool(self._now)

    def begin(self, metrics: Iterable[Metric]) -> None:
        """A batch begins; `metrics` are those its step logs for every step."""
        self._now = [(m, self._copy(m)) for m in {id(m): m for m in metrics}.values()]
        for _, whole in self._now:
            whole.reset()

    def _copy(self, metric: Any) -> Any:
        if id(metric) not in self._copies:
            groups = {id(m.process_group): m.process_group for m in metric.modules() if isinstance(m, Metric)}
            self._copies[id(metric)] = copy.deepcopy(metric, groups)  # process groups cannot be copied
        return self._copies[id(metric)]

    @contextmanager
    def collecting(self, resolve: Resolve, paused: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """While open, a call of a metric also updates its copy.

        Args:
            resolve: Replaces values of other stages in (args, kwargs) by what was received.
            paused: Entered around the update, which is no part of the user's step.
        """
        with ExitStack() as stack:
            for metric, whole in self._now:
                forward = _also_updating(metric.forward, whole, resolve, paused)
                stack.enter_context(replaced_forward(metric, forward))
            yield

    def finish(self) -> None:
        """The batch is over: the metrics that were called get the value over all of it as their last one."""
        for metric, whole in self._now:
            if whole._update_count:
                whole._to_sync = metric.dist_sync_on_step
                metric._forward_cache = whole.compute()
                whole.reset()


def _also_updating(
    forward: Callable[..., Any], whole: Any, resolve: Resolve, paused: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        value = forward(*args, **kwargs)
        with paused():
            args, kwargs = resolve(args, kwargs)
            whole.update(*args, **kwargs)
        return value

    return both
