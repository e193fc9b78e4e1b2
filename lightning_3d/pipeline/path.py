"""DOES a microbatch take the path of a trace?  Found out before anything is sent, on every rank alike.

Glue code may branch on values all ranks know: a padding mask (`if mask.all()`), random numbers (LayerDrop), lengths.
Such a step is followed once without computing anything tracked, up to the last such value; where it leaves the trace,
the microbatch gets a trace of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_3d.errors import DivergedError, PipelineError
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.events import Trace
from lightning_3d.pipeline.execution import Program, untouched_state
from lightning_3d.pipeline.partition import Partition, Window
from lightning_3d.pipeline.phantom import function_name
from lightning_3d.pipeline.rng import Seeds, window_randomness
from lightning_3d.pipeline.stage import StageRun


class PathRun(StageRun):
    """An empty window at the trace's branch point: nothing is computed, the path is compared."""

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        events = self.trace.events
        if self._unwound or self.n >= len(events) or not events[self.n].looks:
            return super().on_op(func, args, kwargs)
        n, event = self._next(function_name(func))
        assert event is not None
        if event.kind == "read":
            return event.answer  # as invented in the trace
        out = func(*args, **kwargs)
        if event.answer is not None and out != event.answer:
            raise DivergedError(f"{event.name} (event {n}) is {out!r}, in the trace it was {event.answer!r}")
        return out


def follows(program: Program, trace: Trace, step: Callable[[], Any], seeds: Seeds) -> bool:
    """Whether the step, on this microbatch with these random numbers, takes the path of `trace`."""
    end = trace.branch_point()
    if not end:
        return True
    windows = [Window(0, 0, end, 0), Window(1, end, end, 0), Window(2, end, len(trace.events), 0)]
    partition = Partition(trace, windows, [set()], [{}, {}, {}])
    run = PathRun(
        partition, 1, {}, module=program.module, atoms=program.atoms, seeds=seeds,
        tensor_group=program.tensor_group, device=program.device,
    )  # fmt: skip
    saved = [(x, x.clone()) for x in trace.changed]
    try:
        with (
            window_randomness(seeds, 1, program.device),
            untouched_state(program, partition, True, True),
            sharding.guarded(),
            program.forward_context(),
        ):
            run.run(step)
    except PipelineError:
        raise
    except Exception:  # the user's code on another path: its own trace will raise what is really wrong
        return False
    finally:
        with torch.no_grad():
            for x, before in saved:
                x.copy_(before)
    return True
