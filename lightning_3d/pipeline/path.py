"""DOES a microbatch take the path of a trace?  Found out before anything is sent, on every rank alike.

Glue code may branch on values all ranks know: a padding mask (`if mask.all()`), random numbers (LayerDrop), lengths,
the batch's index, the epoch, a flag. Such a step is followed without computing anything tracked, up to the last such
value (or to its end); where it leaves the trace, the microbatch gets a trace of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils._pytree import tree_flatten

from lightning_3d.absence import function_name
from lightning_3d.errors import DivergedError, PipelineError
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.events import Trace, Vid
from lightning_3d.pipeline.execution import Program, untouched_metrics
from lightning_3d.pipeline.glue import Unwind
from lightning_3d.pipeline.glue_state import put_back
from lightning_3d.pipeline.partition import Partition, Window
from lightning_3d.pipeline.phantom import Phantom
from lightning_3d.pipeline.rng import Seeds
from lightning_3d.pipeline.stage import StageRun
from lightning_3d.pipeline.trace import Contents
from lightning_3d.probe import ModuleState, python_state


class PathRun(StageRun):
    """An empty window at the trace's branch point (or end): nothing is computed, the path is compared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.final_reads: set[Vid] = set()

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

    def on_log(self, name: str, value: Any, kwargs: dict[str, Any]) -> None:
        if isinstance(value, Phantom):
            self.final_reads.add(value.vid)

    def arrives(self, step: Callable[[], Any]) -> bool:
        """Run the step; whether it came to the end of the window on the trace's path."""
        try:
            with self.active():
                out = step()
        except Unwind:
            return True
        if self.window.stop < len(self.trace.events):
            return self._unwound
        self.final_reads |= {x.vid for x in tree_flatten(out)[0] if isinstance(x, Phantom)}
        return self.n == len(self.trace.events) and self.final_reads == self.trace.final_reads


def follows(program: Program, trace: Trace, step: Callable[[], Any], seeds: Seeds, *, whole: bool = False) -> bool:
    """Whether the step, on this microbatch with these random numbers, takes the path of `trace`.

    Args:
        program: What is executed.
        trace: The path.
        step: Calls the user's step.
        seeds: Of the microbatch.
        whole: Compare the whole step, not only up to the last value all ranks know: Python state may have changed.
    """
    end = len(trace.events) if whole else trace.branch_point
    if not end:
        return True
    windows = [Window(0, 0, end, 0), Window(1, end, end, 0), Window(2, end, len(trace.events), 0)]
    partition = Partition(trace, windows, [set()], [{}, {}, {}])
    run = PathRun(
        partition, 1, {}, module=program.module, atoms=program.atoms, seeds=seeds,
        tensor_group=program.tensor_group, randomness=program.generators,
    )  # fmt: skip
    try:
        with (
            _whole_state(program) if whole else nullcontext(),
            put_back(trace.remembered),
            program.generators.window(seeds, 1),
            untouched_metrics(program),
            sharding.guarded(program.tensor_group),
            program.forward_context(),
        ):
            return run.arrives(step)
    except PipelineError:
        raise
    except Exception:  # the user's code on another path: its own trace will raise what is really wrong
        return False


@contextmanager
def _whole_state(program: Program) -> Iterator[None]:
    """Another path may change other things than the known one does: put back all Python state."""
    with python_state(program.module, closed=program.atoms.values()):
        state, contents = ModuleState(program.module, program.open_modules), Contents(program.open_modules)
        try:
            yield
        finally:
            state.restore()
            contents.restore()
