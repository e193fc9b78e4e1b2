"""HOW is the result of an event written down, so that any rank can make it again without computing it?"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.events import MUTATED, Event, Leaf, TensorMeta, Vid
from lightning_3d.pipeline.holders import Same, has_tensor, holders, is_opaque
from lightning_3d.pipeline.phantom import Phantom

if TYPE_CHECKING:
    from lightning_3d.pipeline.probe_run import TraceRun


def describe(
    run: TraceRun,
    event: Event,
    n: int,
    leaves: list[Any],
    inputs: list[Any],
    versions: list[int | None],
    combined: tuple[Any, list[Any], list[Any], list[Any]],
    *,
    arguments: Any = None,
    copies: dict[int, Any] | None = None,
    invented: bool = False,
) -> Any:
    """Fill in the event from a run without data, and return its result as phantoms.

    Args:
        run: The tracing run.
        event, n: The event and its number.
        leaves: Argument leaves as glue code passed them.
        inputs: The same leaves as the event ran on them (fake or zeros).
        versions: Version counters of `inputs` before.
        combined: (result, results of hooked submodules, attributes, contents of changed holders).
        arguments: (args, kwargs) as glue code passed them, for holders.
        copies: `id(copied holder)` -> original holder.
        invented: The event ran on zeros: numbers it computed mean nothing.
    """
    fresh = _mutations(run, event, n, leaves, inputs, versions)
    results, event.spec = tree_flatten(combined)
    describer = _Describer(run, event, n, inputs, arguments, copies or {}, invented, fresh)
    event.leaves = [describer.leaf(j, x) for j, x in enumerate(results)]
    nothing_else = not event.mutations and not any(combined[1:])
    if nothing_else and [leaf.kind for leaf in event.leaves] == ["value"] and isinstance(combined[0], Tensor):
        event.single = event.leaves[0].payload
    run._made.clear()
    out = run.emit(event, leaves, arguments)
    for vid, fake in fresh.items():
        run.fake_of[vid] = fake
    for x in [*leaves, *run._made]:
        if isinstance(x, Phantom) and x.vid in fresh:
            run._aliases[sharding.local(fresh[x.vid]).untyped_storage()._cdata].append(weakref.ref(x))
    return out


def _mutations(
    run: TraceRun, event: Event, n: int, leaves: list[Any], inputs: list[Any], versions: list[int | None]
) -> dict[Vid, Tensor]:
    """Arguments that were changed in place get a new name; views of them that exist already become stale."""
    fresh: dict[Vid, Tensor] = {}
    for i, x in enumerate(inputs):
        if not isinstance(x, Tensor) or sharding.local(x)._version == versions[i]:
            continue
        vid = (n, MUTATED + i)
        event.mutations[i] = vid
        changed = leaves[i]
        written = run.weight_behind(x)
        if written is not None:
            raise PipelineError(
                f"{event.name} changes the parameter {written!r} in place, in {run.trace.step}. Every stage runs the "
                "step for each microbatch, up to its own part, so a weight would change several times, or between a "
                "forward and its backward. Do it in a hook (on_train_batch_end, on_before_zero_grad), for the "
                "parameters this stage holds (those without `.is_absent`). An average of weights (EMA, BYOL, MoCo) "
                "needs both copies of a weight on one stage: make the layer and its copy one module, which calls both "
                "in its forward. Or use pipeline_parallel_size=1."
            )
        if isinstance(changed, Phantom):
            run.trace.overwritten.add(changed.vid)
        for buffer in run.shared.names(changed):
            run.trace.buffer_writes[buffer] = n
        run.shared.changed(changed, event.name)
        run.trace.meta[vid] = TensorMeta.of(x)
        fresh[vid] = _faked(run, x)
        for reference in run._aliases[sharding.local(x).untyped_storage()._cdata]:
            alias: Any = reference()
            if alias is not None and alias is not changed and alias.vid[0] != n:
                alias.stale = (alias.vid[0], n, event.name)
    return fresh


def _faked(run: TraceRun, x: Tensor) -> Tensor:
    if isinstance(sharding.local(x), FakeTensor):
        return x

    def fake(piece: Tensor) -> Tensor:
        shape_only = run.fakes.mode.from_tensor(piece.detach())
        if not piece.requires_grad:
            return shape_only
        with torch.enable_grad(), run.fakes.mode:
            return shape_only.requires_grad_() * 1  # not a leaf: in-place operations are legal

    return sharding.on_local(fake, x)


class _Describer:
    def __init__(
        self,
        run: TraceRun,
        event: Event,
        n: int,
        inputs: list[Any],
        arguments: Any,
        copies: dict[int, Any],
        invented: bool,
        fresh: dict[Vid, Tensor],
    ) -> None:
        self.run, self.event, self.n, self.copies, self.invented, self.fresh = run, event, n, copies, invented, fresh
        self.inputs = inputs
        self.tensor_inputs = {id(x): i for i, x in enumerate(inputs) if isinstance(x, Tensor)}
        simple = (Tensor, int, float, str, type(None))
        self.object_inputs = {id(x): i for i, x in enumerate(inputs) if not isinstance(x, simple)}
        self.holder_numbers = {id(h): i for i, h in enumerate(holders(arguments))} if copies else {}

    def leaf(self, j: int, x: Any) -> Leaf:
        if isinstance(x, Phantom):  # an earlier value, handed through a holder
            return Leaf("value", x.vid)
        if isinstance(x, Tensor):
            return self._tensor(j, x)
        if isinstance(x, Same):
            return Leaf("holder", self.holder_numbers[id(self.copies[id(x.holder)])])
        if id(x) in self.object_inputs:
            return Leaf("input", self.object_inputs[id(x)])
        if id(x) in self.copies:
            original = self.copies[id(x)]
            return (
                Leaf("holder", self.holder_numbers[id(original)]) if is_opaque(original) else Leaf("constant", original)
            )
        if isinstance(x, Iterator):
            raise PipelineError(
                f"{self.event.name} returns a {type(x).__name__}, whose values are computed when glue code asks for "
                "them, outside of the module. Return a list or a tuple of them."
            )
        if hasattr(x, "__dict__") and any(has_tensor(v) for v in vars(x).values()):
            raise PipelineError(
                f"{self.event.name} returns a {type(x).__name__} that holds tensors. Return a tuple, a dict or a "
                "dataclass, so that a pipeline can see them."
            )
        if self.invented and isinstance(x, (int, float)) and not any(x is known for known in self.inputs):
            raise PipelineError(
                f"{self.event.name} computes the Python number {x!r} from values, and cannot run without data. Return "
                "a tensor instead (drop the .item() or float())."
            )
        return Leaf("constant", x)

    def _tensor(self, j: int, x: Tensor) -> Leaf:
        if id(x) in self.tensor_inputs:
            return Leaf("input", self.tensor_inputs[id(x)])
        if id(sharding.local(x)) in self.run.fakes.names:
            name = self.run.fakes.names[id(sharding.local(x))]
            raise PipelineError(
                f"{self.event.name} returns the parameter {name!r} itself, which a pipeline cannot send to another "
                "stage as an activation. Return an expression of it (for example weight * 1)."
            )
        vid = (self.n, j)
        self.run.trace.meta[vid] = TensorMeta.of(x)
        self.fresh[vid] = _faked(self.run, x)
        return Leaf("value", vid)
