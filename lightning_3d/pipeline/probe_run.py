"""HOW is the trace of a step made?  The user's step runs once with fake parameters, and every event is written down.

Local values (what depends on no parameter) are computed for real. A tracked value is a phantom that carries a
FakeTensor. An atom runs on FakeTensors as a whole; if that is not possible (shapes that depend on values, an operator
without a fake kernel) it runs once for real on zeros.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric

from lightning_3d.absence import function_name
from lightning_3d.errors import PipelineError
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.atom_memory import AtomMemory, Remembered, content, key_of, place_of
from lightning_3d.pipeline.carried import Left, check_is_of_this_step
from lightning_3d.pipeline.describe import describe
from lightning_3d.pipeline.events import Event, Leaf, NoCut, TensorMeta, Trace, Vid
from lightning_3d.pipeline.execution import TRAINING, trained_loss
from lightning_3d.pipeline.glue import Glue
from lightning_3d.pipeline.holders import (
    changed,
    content_of,
    copy_holder,
    has_tensor,
    holders,
    is_opaque,
    opened,
    slots,
)
from lightning_3d.pipeline.phantom import Phantom
from lightning_3d.pipeline.probe_atom import NO_FAKE_RUN, AtomExecution, OperationWatch, is_fake, versions_of
from lightning_3d.pipeline.probe_before import attributes_of, buffers_of, differ, kept_tensors, shares_memory
from lightning_3d.pipeline.probe_net import check_transforms, converted, of_the_user
from lightning_3d.pipeline.rng import Randomness, Seeds
from lightning_3d.pipeline.shared_memory import SharedMemory
from lightning_3d.probe import VALUE_READS, Answers, FakeParameters, own_parameters
from lightning_3d.where import current_line

_MOST_EVENTS = 300_000
_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


class TraceRun(Glue):
    """One run of the step that fills `trace`.

    Args:
        module, atoms: The root module and its closed pieces.
        trace: Empty; filled by the run.
        fakes: The open `FakeParameters` of `module`.
        answers: What value reads of tracked tensors return.
        randomness: The generators the step may draw from.
        seeds: Of the microbatch: local random events draw what they will draw in the run.
        memory: What equal atoms did in earlier traces.
        keep_arguments: Events keep what atoms are called with, so that they can be called again.
        around_atom: Entered around every atom that is tried.
        left: What the step before has left; told what is read of it.
    """

    def __init__(
        self,
        module: nn.Module,
        atoms: Mapping[str, nn.Module],
        trace: Trace,
        fakes: FakeParameters,
        answers: Answers,
        randomness: Randomness,
        seeds: Seeds,
        memory: AtomMemory | None = None,
        keep_arguments: bool = False,
        around_atom: Callable[[], AbstractContextManager[Any]] = nullcontext,
        left: Left | None = None,
    ) -> None:
        super().__init__(module, atoms)
        self._memory, self.keep_arguments, self._around_atom, self._left = memory, keep_arguments, around_atom, left
        self.trace, self.fakes, self.answers, self.seeds = trace, fakes, answers, seeds
        answers.refusal = PipelineError
        self.randomness, self.device = randomness, randomness.device
        self._in_region = False
        self.shared = SharedMemory(kept_tensors(module))
        self.fake_of: dict[Vid, Tensor] = {}
        self._aliases: dict[Any, list[weakref.ref[Phantom]]] = defaultdict(list)
        self._touched_inside: set[Vid] = set()
        self._made: list[Phantom] = []
        self._dynamic_line = ""
        self._executed: str | None = None  # the atom whose forward runs
        self._weights: dict[Any, str] | None = None
        self.inventing: Callable[[Tensor], Tensor] | None = None  # an atom runs on these in place of shapes

    def run(self, step: Callable[[], Any]) -> None:
        before = buffers_of(self.module)
        with converted(self.trace), self.active():
            out = step()
        if self.trace.step == TRAINING and torch.is_grad_enabled():
            trained_loss(out, TRAINING)
        written = self.trace.buffer_writes
        self.trace.changed_buffers = [
            n for n, x in buffers_of(self.module).items() if n in written or before.get(n) != x
        ]
        self.trace.final_reads |= {x.vid for x in tree_flatten(out)[0] if isinstance(x, Phantom)}
        dynamic = [n for n, event in enumerate(self.trace.events) if event.dynamic]
        if dynamic:
            name = self.trace.events[dynamic[0]].name
            why = f"{name} makes a shape that depends on values, which only the stage that runs it knows"
            why += f" ({self._dynamic_line})" if self._dynamic_line else ""
            self.trace.no_cut.append(NoCut(dynamic[0], len(self.trace.events) - 1, why))

    # -- values
    def value(self, phantom: Phantom) -> Tensor:
        """A phantom inside an opaque object was touched by the atom that runs."""
        if phantom.vid not in self.fake_of:
            raise PipelineError(
                f"a forward hook of a module inside {self.trace.events[-1].name} computes with the module's result. "
                "Such a hook may keep the result, but not compute with it or change it: do that in the step, or in the "
                "module's forward."
            )
        self._touched_inside.add(phantom.vid)
        fake = self.fake_of[phantom.vid]
        return fake if self.inventing is None else sharding.on_local(self.inventing, fake)

    def weight_behind(self, x: Tensor) -> str | None:
        """Name of the parameter whose memory this is (itself, `.data`, a view)."""
        if self._weights is None:
            self._weights = {
                sharding.local(p).untyped_storage()._cdata: self.fakes.names[id(p)]
                for p in own_parameters(self.module)
                if id(p) in self.fakes.names
            }
        return self._weights.get(sharding.local(x).untyped_storage()._cdata)

    def phantom(self, vid: Vid) -> Phantom:
        made = super().phantom(vid)
        self._made.append(made)
        return made

    def _fake(self, x: Any) -> Any:
        if isinstance(x, Phantom):
            return self.fake_of[x.vid]
        if not isinstance(x, Tensor) or isinstance(sharding.local(x), FakeTensor) or sharding.placement(x) is not None:
            return x
        # not as a part of a larger one, of which another part may have become a value that requires grad
        alone = x._is_view() and not x.requires_grad
        return self.fakes.mode.from_tensor(x.detach() if alone else x)

    # -- events
    def _begin(self, name: str, kind: Any, leaves: list[Any]) -> tuple[int, Event]:
        n = self.n
        self.n += 1
        event = Event(name, kind)
        self.trace.events.append(event)
        check_transforms(name, leaves, lambda x: isinstance(x, Phantom) or id(x) in self.fakes.names)
        if n >= _MOST_EVENTS and (self.answers.asked or self._dynamic_line):
            raise PipelineError(
                f"{self.trace.step} has made {n} calls while it is planned, and goes on. It asked for values that the "
                "model computes, or made shapes that depend on them; the plan is made without values, with invented "
                "answers, and with those a loop seems not to end. Use a fixed number of iterations, or put the loop "
                "into the forward of one module."
            )
        if self._left is not None:
            self._left.note(leaves)
        for x in leaves:
            if isinstance(x, Phantom):
                check_is_of_this_step(x, self, event, self.module, self.trace.step)
                event.reads.add(x.vid)
                stale = getattr(x, "stale", None)
                if stale is not None:
                    self.trace.no_cut.append(NoCut(stale[0], stale[1], f"a view is changed in place by {stale[2]}"))
            elif isinstance(x, Tensor) and id(sharding.local(x)) in self.fakes.names:
                event.params.add(self.fakes.names[id(sharding.local(x))])
            elif isinstance(sharding.local(x), FakeTensor):
                raise PipelineError(
                    f"{name} uses a value that left a module through a global variable or a closure. A pipeline cannot "
                    "see it: return it from the module, or keep it in an attribute of that module."
                )
            for buffer in self.shared.names(x):
                self.trace.buffer_reads[buffer].append(n)
        return n, event

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        n, event = self._begin(function_name(func), "local", leaves)
        if not event.reads and not event.params:
            out = self._local(func, args, kwargs, n, event)
            self.shared.check(event.name, leaves, out)
            return out
        if func is Tensor.__setitem__:
            self.shared.put(*args)
        self.shared.check(event.name, leaves)
        if event.name == "backward" or func is torch.autograd.grad:
            raise PipelineError(
                f"{self.trace.step} calls {event.name}() itself (manual optimization, or a gradient penalty). That is "
                "not possible when the graph spans pipeline stages: use pipeline_parallel_size=1."
            )
        event.kind = "op"
        if func in VALUE_READS:
            return self._read(func, event, leaves)
        fakes = [self._fake(x) for x in leaves]
        versions = versions_of(fakes)
        fake_args, fake_kwargs = tree_unflatten(fakes, spec)
        try:
            with of_the_user(), self.fakes.mode, FlopCounterMode(display=False) as counter, OperationWatch() as watch:
                out = func(*fake_args, **fake_kwargs)
        except NO_FAKE_RUN as error:
            # if it is wrong in itself, the run on ones says so in the words of the user's tensors
            return self._on_ones(func, event, n, leaves, fakes, spec, isinstance(error, _DEPENDS_ON_VALUES))
        event.flops, event.random, event.moved = counter.get_total_flops(), watch.hit, watch.moved
        return describe(self, event, n, leaves, fakes, versions, (out, [], [], []))

    def _local(self, func: Any, args: Any, kwargs: Any, n: int, event: Event) -> Any:
        if not self._in_region:
            self.randomness.seed_event(self.seeds, n)
        with of_the_user(), OperationWatch() as watch:
            out = func(*args, **kwargs)
        event.random, event.looks = watch.hit, func in VALUE_READS
        if event.looks and isinstance(out, (bool, int)):
            event.answer = out
        return out

    def _read(self, func: Any, event: Event, leaves: list[Any]) -> Any:
        event.kind, event.looks = "read", True
        self.trace.warnings.append(f"{event.name} reads a value of a pipeline tensor (event {self.n - 1})")
        event.answer = self.answers(func, next(x for x in leaves if isinstance(x, Tensor)))
        return event.answer

    def _on_ones(
        self, func: Any, event: Event, n: int, leaves: list[Any], fakes: list[Any], spec: Any, dynamic: bool
    ) -> Any:
        """No run on shapes: go on with what ones give; nothing after a shape that depends on values can be cut."""
        ones = self.real(1, leaves, fakes)
        versions = versions_of(ones)
        args, kwargs = tree_unflatten(ones, spec)
        with of_the_user():
            out = func(*args, **kwargs)
        if not any(isinstance(x, Tensor) for x in tree_flatten(out)[0]):
            return self._read(func, event, leaves)
        if dynamic:
            event.dynamic = True
            self._dynamic_line = self._dynamic_line or current_line()
        return describe(self, event, n, leaves, ones, versions, (out, [], [], []))

    def real(self, value: float, leaves: list[Any], fakes: list[Any]) -> list[Any]:
        """Arguments with data: what derives from parameters is filled, what every rank knows keeps its values.

        So the lengths of sequences are lengths, and indices are in their range.
        """
        fill, known = self.filled(value), self.filled(None)
        return [
            x
            if not is_fake(x)
            else sharding.on_local(fill, x)
            if isinstance(leaf, Phantom) or is_fake(leaf)
            else known(leaf)
            for leaf, x in zip(leaves, fakes, strict=True)
        ]

    def filled(self, value: float | None) -> Callable[[Tensor], Tensor]:
        """Makes tensors like a given one, full of a value, or copies."""

        def fill(x: Tensor) -> Tensor:
            if value is None:
                real = x.detach().clone().requires_grad_(x.requires_grad)
            else:
                real = torch.full(x.shape, value, dtype=x.dtype, device=self.device).requires_grad_(x.requires_grad)
            return real * 1 if real.requires_grad else real  # not a leaf: in-place operations are legal

        return fill

    @contextmanager
    def on_region(self) -> Iterator[None]:
        first, before = self.n, self._in_region
        if not before:
            self.randomness.seed_event(self.seeds, first)
        self._in_region = True
        try:
            yield
        finally:
            self._in_region = before
        if self.n - 1 > first:
            self.trace.no_cut.append(NoCut(first, self.n - 1, "it is one activation checkpoint"))

    def on_log(self, name: str, value: Any, kwargs: dict[str, Any]) -> None:
        if self._executed is not None:
            raise PipelineError(
                f"{self._executed} logs {name!r} inside of its forward, which only the stage that holds it runs, and "
                "what is logged is collected from the last stage. Return the value from the module, or leave it in an "
                f"attribute (self.{name.rpartition('/')[2]} = value), and call self.log in {self.trace.step}."
            )
        if isinstance(value, Phantom):
            self.trace.final_reads.add(value.vid)
        if isinstance(value, Metric) and kwargs.get("on_step") is not False:
            self.trace.step_metrics.append(value)

    # -- atoms
    def on_atom(self, name: str, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.paused():
            leaves, spec = tree_flatten((args, kwargs))
            n, event = self._begin("atom:" + name, "atom", leaves)
            self.shared.check(event.name, leaves)
            weights = own_parameters(module)
            event.params = {self.fakes.names[id(p)] for p in weights if id(p) in self.fakes.names}
            check_transforms(repr(name), weights, lambda _: True)
            self._touched_inside = set()
            before = attributes_of(module)
            fakes = [self._fake(x) for x in leaves]
            if self.keep_arguments:
                event.arguments = ([copy_holder(x) if is_opaque(x) else x for x in fakes], spec)
            # with weights of others in place of its own (functional_call) it is like no other atom
            as_always = len(event.params) == len(weights)
            key = key_of(module, fakes, spec) if self._memory is not None and as_always else None
            known = self._memory.recall(name, key, (args, kwargs)) if self._memory is not None else None
            if known is not None:
                return self._again(event, n, module, leaves, known, (args, kwargs), place_of(name))
            held_before = {number: content(holder) for number, holder in enumerate(holders((args, kwargs)))}
            execution = AtomExecution(self, module, run, leaves, fakes, spec)
            self._executed = event.name
            try:
                with self.randomness.atom(execution), self._around_atom():
                    execution.execute(name)
            finally:
                self._executed = None
            event.reads |= self._touched_inside
            event.flops, event.random, event.moved = execution.flops, execution.random, execution.moved
            left = [
                (key, x)
                for key, (x, inside) in attributes_of(module).items()
                if has_tensor(x) and (key not in before or before[key][0] is not x or differ(before[key][1], inside))
            ]
            event.attributes = [(self._module_by_id[i], attribute) for (i, attribute), _ in left]
            event.kept = [key in before and before[key][0] is x for key, x in left]
            event.hooked = [
                (submodule, [TensorMeta.of(x) if isinstance(x, Tensor) else x for x in flat], arg_spec)
                for submodule, flat, arg_spec, _ in execution.taps
            ]
            copies = {id(c): o for (c, _), o in zip(execution.holders, holders((args, kwargs)), strict=True)}
            contents = []
            for number, (holder, old) in enumerate(execution.holders):
                new = slots(holder) or []
                if changed(old, new):
                    event.holders.append((number, [key for key, _ in new]))
                    contents.append(content_of(holder, copies))
            combined = (
                opened(execution.out, copies),
                [tap[3] for tap in execution.taps],
                [x for _, x in left],
                contents,
            )
            result = describe(
                self, event, n, leaves, execution.inputs, execution.versions, combined,
                arguments=(args, kwargs), copies=copies, invented=execution.on_zeros,
            )  # fmt: skip
            own = not self._touched_inside and not execution.on_zeros and not shares_memory(self, event, fakes)
            if self._memory is not None and own:
                self._memory.remember(name, module, key, event, self.trace, held_before)
            return result

    def _again(
        self,
        event: Event,
        n: int,
        module: nn.Module,
        leaves: list[Any],
        known: Remembered,
        arguments: Any,
        place: int,
    ) -> Any:
        """The result of an atom that is not probed, because an equal one was."""
        event.hooked = [(module.get_submodule(path), metas, spec) for path, metas, spec in known.hooked]
        event.holders = [(offset + place, keys) for offset, keys, _ in known.holders]
        event.flops, event.moved, event.random, event.spec = known.flops, known.moved, known.random, known.spec
        for j, (kind, payload) in enumerate(known.leaves):
            if kind != "value":
                event.leaves.append(Leaf(kind, payload))
                continue
            vid = (n, j)
            self.trace.meta[vid] = payload
            self.fake_of[vid] = self._empty(payload)
            event.leaves.append(Leaf("value", vid))
        event.single = event.leaves[0].payload if known.single else None
        self._made.clear()
        out = self.emit(event, leaves, arguments)
        for x in self._made:
            self._aliases[sharding.local(self.fake_of[x.vid]).untyped_storage()._cdata].append(weakref.ref(x))
        return out

    def _empty(self, meta: TensorMeta) -> Tensor:
        with self.fakes.mode, torch.enable_grad():
            made = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=meta.device)
            return made.requires_grad_() * 1 if meta.requires_grad else made  # not a leaf: may change in place

    @property
    def _module_by_id(self) -> dict[int, nn.Module]:
        return {id(m): m for m in self.module.modules()}
