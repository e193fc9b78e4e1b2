"""WHAT does one stage run?  One window of one microbatch: the user's step, of which only this window is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_3d.absence import function_name
from lightning_3d.errors import DivergedError, PipelineError
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.absent import is_absent
from lightning_3d.pipeline.carried import replace_phantoms
from lightning_3d.pipeline.entry import Arrivals, entry
from lightning_3d.pipeline.events import MUTATED, Event, TensorMeta, Vid
from lightning_3d.pipeline.glue import Glue, Unwind, replaced_forward
from lightning_3d.pipeline.holders import content_of, holders, opened, replace_in_place
from lightning_3d.pipeline.partition import Partition
from lightning_3d.pipeline.phantom import Phantom
from lightning_3d.pipeline.rng import Randomness, Seeds
from lightning_3d.where import naming_the_line


class Logged(NamedTuple):
    """One call of `self.log`."""

    name: str
    value: Any
    kwargs: dict[str, Any]


class StageRun(Glue):
    """One forward of one window on one microbatch.

    Before the window, tracked events become phantoms and local ones run. In the window everything runs, phantoms
    replaced by what was received. At the entry of the next window's first event the run unwinds.

    Args:
        partition: How the step is cut.
        window: Index of the window to run.
        received: Value -> received leaf tensor.
        fetch: Gives the rest of them, when the first is needed: glue code before the window does not wait for it.
        deliver: Given `captured` as soon as it is complete: what follows in the step delays nobody.
        module, atoms: The root module and its closed pieces.
        seeds: What the random numbers depend on.
        tensor_group: Tensor-parallel group of received sharded values.
        randomness: The generators to seed.

    Attributes:
        captured: Values other windows need (local pieces).
        arrivals: Where the gradients of the received values arrive.
        logged: Calls of `self.log`, filled in the last window only.
        delivered: `deliver` was called.
    """

    def __init__(
        self,
        partition: Partition,
        window: int,
        received: Mapping[Vid, Tensor],
        *,
        module: nn.Module,
        atoms: Mapping[str, nn.Module],
        seeds: Seeds,
        tensor_group: Any = None,
        randomness: Randomness | None = None,
        fetch: Callable[[], Mapping[Vid, Tensor]] | None = None,
        deliver: Callable[[Mapping[Vid, Tensor]], None] | None = None,
    ) -> None:
        super().__init__(module, atoms)
        self.partition, self.trace, self.window = partition, partition.trace, partition.windows[window]
        self._fetch, self._deliver = fetch, deliver
        self.received, self.seeds, self.tensor_group = dict(received), seeds, tensor_group
        self.randomness = randomness or Randomness(torch.device("cpu"))
        self.last = window == len(partition.windows) - 1
        self.captured: dict[Vid, Tensor] = {}
        self.arrivals = Arrivals()
        self.logged: list[Logged] = []
        self._entries: dict[Vid, Any] = {}
        self._wanted = partition.wanted_by_event(window)
        self._missing = sum(map(len, self._wanted.values()))
        self._in_region = self._unwound = self._free = self.delivered = False

    def run(self, step: Callable[[], Any], surrounded: bool = False) -> Any:
        """Call the user's step; returns its result in the last window, None in the others."""
        try:
            with naming_the_line(DivergedError, PipelineError), self.active(surrounded):
                out = step()
        except Unwind:
            out = None
        self._complete()
        if self._unwound:
            return None
        if not self.last and self.window.stop < len(self.trace.events):
            raise DivergedError(
                f"{self.trace.step} ended before pipeline window {self.window.number + 1} (stage "
                f"{self.partition.windows[self.window.number + 1].stage}) began: it took another path than the one the "
                "stages were planned for."
            )
        if not self.last:
            return None
        for piece, _ in self.trace.carried:
            replace_phantoms(piece, piece.take(), lambda x: sharding.whole(self.value(x)).detach())
        if isinstance(out, Tensor):
            return sharding.whole(self._resolved(out))
        leaves, spec = tree_flatten(out)
        return tree_unflatten([sharding.whole(self._resolved(x)) for x in leaves], spec)

    def release(self) -> None:
        """Forget all values (phantoms that user code kept would hold them)."""
        self.received.clear()
        self.captured.clear()
        self._entries.clear()

    # -- values
    def _complete(self) -> None:
        """Wait for what was sent to this window."""
        if self._fetch is not None:
            fetch, self._fetch = self._fetch, None
            self.received.update(fetch())

    def value(self, phantom: Phantom) -> Any:
        """The received value; to be asked for while the interpreter is paused."""
        vid = phantom.vid
        if self._in_region and self._turned.is_fleeting(phantom):
            raise PipelineError(
                f"an activation checkpoint in {self.trace.step} uses a tensor that the step changed in place before "
                f"({self._described(vid)}), and that is not among its arguments. The checkpoint computes once more in "
                "the backward, when that tensor is what it was before the change. Give it as an argument: "
                "checkpoint(function, tensor, use_reentrant=False); or make a new tensor (x = x + y, not x.add_(y))."
            )
        if vid in self._entries:
            return self._entries[vid]
        if self._fetch is not None:
            self._complete()
        if vid not in self.received:
            raise DivergedError(
                f"stage {self.window.stage} needs {self._described(vid)}, which the planned path of {self.trace.step} "
                "does not send there: it is used on a branch that was not taken when the step was planned, and that "
                "cannot be foreseen (on values of other stages, on global variables, on what an earlier microbatch of "
                "the same batch did), or an earlier step kept it in an attribute or a list. Use it in every step: "
                "compute it outside of the `if`, and multiply it by 0.0 until it shall count; keep it in a registered "
                "buffer that is changed in place (self.mean.lerp_(x.mean(0), 0.1)), which all stages are given."
            )
        leaf, meta = self.received[vid], self.trace.meta[vid]
        entered = entry(leaf, self.arrivals, vid) if leaf.requires_grad else leaf
        self._entries[vid] = entered if meta.placement is None else sharding.wrap(entered, meta, self.tensor_group)
        return self._entries[vid]

    def _described(self, vid: Vid) -> str:
        event = self.trace.events[vid[0]] if 0 <= vid[0] < len(self.trace.events) else None
        return f"the result of {event.name if event else 'an unknown event'} (event {vid[0]})"

    def _resolved(self, x: Any) -> Any:
        return self.value(x) if isinstance(x, Phantom) else x

    def _resolve(self, args: Any, kwargs: Any, flat: bool | None = None) -> tuple[list[Any], Any, Any]:
        if _is_flat(args, kwargs) if flat is None else flat:
            leaves = [self.value(x) if isinstance(x, Phantom) else x for x in args]
            args = tuple(leaves)
            if kwargs:
                kwargs = {key: self.value(x) if isinstance(x, Phantom) else x for key, x in kwargs.items()}
                leaves += kwargs.values()
            return leaves, args, kwargs
        leaves, spec = tree_flatten((args, kwargs))
        if any(isinstance(x, Phantom) for x in leaves):
            leaves = [self._resolved(x) for x in leaves]
            args, kwargs = tree_unflatten(leaves, spec)
        return leaves, args, kwargs

    def known(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments with those values in place of phantoms that this window has; the others are not read here."""
        self._complete()
        leaves, spec = tree_flatten((args, kwargs))
        known = [self.value(x) if isinstance(x, Phantom) and x.vid in self.received else x for x in leaves]
        args, kwargs = tree_unflatten(known, spec)
        return args, kwargs

    # -- events
    def _next(self, name: str) -> tuple[int, Event | None]:
        """Number the event, and compare it with the plan. None: this event is not planned, and need not be."""
        n = self.n
        self.n += 1
        if self._free:
            return n, None
        events = self.trace.events
        if n < len(events) and events[n].name == name:
            if n == self.window.stop and not self.last:
                self._unwound = True
                raise Unwind
            return n, events[n]
        if self.last and n > self.window.start:
            # no other stage has to follow any more: whatever the step does from here on is right
            self._free = True
            return n, None
        expected = repr(events[n].name) if n < len(events) else "the end of the step"
        raise DivergedError(
            f"{self.trace.step} took another path than the one the stages were planned for: event {n} is {name!r}, "
            f"expected {expected}. Branches on the batch, its index, the epoch, attributes and random numbers are "
            "followed; look for one on values of other stages, on global variables, or on what an earlier microbatch "
            "of the same batch did."
        )

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._unwound:
            return self._after_unwind(func, args, kwargs)
        n, event = self._next(function_name(func))
        if event is not None:
            if n < self.window.start and event.kind == "op":
                if event.single is not None:
                    return self.phantom(event.single)
                needs_leaves = event.mutations or any(leaf.kind == "input" for leaf in event.leaves)
                return self.emit(event, tree_flatten((args, kwargs))[0] if needs_leaves else ())
            if event.random and not self._in_region:
                self.randomness.seed_event(self.seeds, n)
            if event.kind == "local":
                return func(*args, **kwargs)
        leaves, args, kwargs = self._resolve(args, kwargs)
        out = func(*args, **kwargs)
        if event is not None and n in self._wanted:
            self._capture(n, event, leaves, (out, [], [], []))
        return out

    def _after_unwind(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Code that runs while the step is left (`finally:`); it may do what needs no value of this step."""
        if any(isinstance(x, Phantom) for x in tree_flatten((args, kwargs))[0]):
            raise Unwind
        return func(*args, **kwargs)

    def on_atom(self, name: str, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._unwound:
            raise Unwind
        n, event = self._next("atom:" + name)
        if event is not None and n < self.window.start:
            if event.single is not None:
                return self.phantom(event.single)
            with self.paused():
                return self.emit(event, tree_flatten((args, kwargs))[0], (args, kwargs))
        with self.paused():
            return self._run_atom(n, event, name, module, run, args, kwargs)

    def _run_atom(
        self, n: int, event: Event | None, name: str, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        flat = _is_flat(args, kwargs)
        if not flat:
            args = tuple(self._resolved_argument(x) for x in args)
            replace_in_place((args, kwargs), Phantom, self.value)
        leaves, args, kwargs = self._resolve(args, kwargs, flat or None)
        if event is not None and event.random and not self._in_region:
            self.randomness.seed_event(self.seeds, n)
        if event is None:
            self._check_whole(name, module)
        if event is None or n not in self._wanted:
            return run(*args, **kwargs)
        if event.single is not None:  # there is nothing but its result
            out = run(*args, **kwargs)
            self._capture(n, event, leaves, (out, [], [], []))
            return out
        found = holders((args, kwargs))
        with _tapped(event) as taps:
            out = run(*args, **kwargs)
        attributes = [getattr(submodule, key) for submodule, key in event.attributes]
        known = {id(holder) for holder in found}
        contents = [content_of(found[number], known) for number, _ in event.holders]
        self._capture(n, event, leaves, (opened(out, known), taps, attributes, contents))
        return out

    def _check_whole(self, name: str, module: nn.Module) -> None:
        """A call that was not planned can only be made if this stage holds the module."""
        missing = next((n for n, p in module.named_parameters() if is_absent(p)), None)
        if missing is not None:
            raise DivergedError(
                f"{self.trace.step} calls {name!r} where the planned path does not, and its parameter {missing!r} is "
                "on another stage, which has not planned this call and is not there to run it. How often the model is "
                "called depends on what it computed: a loop until a value says stop (generate() of HuggingFace until "
                "an end-of-sequence token). Use a fixed number of calls (for generate(): eos_token_id=None and "
                "max_new_tokens), or do this with pipeline_parallel_size=1."
            )

    def _resolved_argument(self, x: Any) -> Any:
        if type(x) is tuple:
            return tuple(self._resolved(y) for y in x)
        return self._resolved(x)

    def _capture(self, n: int, event: Event, leaves: list[Any], combined: Any) -> None:
        results: list[Any] | None = None
        for vid in self._wanted[n]:
            if vid == event.single:
                tensor = combined[0]
            elif vid[1] >= MUTATED:
                tensor = leaves[vid[1] - MUTATED]
            else:
                results = tree_flatten(combined)[0] if results is None else results
                tensor = results[vid[1]] if vid[1] < len(results) else None
            meta = self.trace.meta[vid]
            piece = sharding.local(tensor)
            if not (isinstance(tensor, Tensor) and _looks_like(tensor, piece, meta)):
                made = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
                gradient = f", requires_grad={piece.requires_grad}" if isinstance(tensor, Tensor) else ""
                raise DivergedError(
                    f"{event.name} (event {n}) made {made}{gradient}; the stages were planned for "
                    f"{(meta.size, meta.dtype)}, requires_grad={meta.requires_grad}. Its result depends on values of "
                    "the batch in a way that a pipeline cannot follow."
                )
            self.captured[vid] = piece.clone() if vid in self.trace.overwritten else piece
        self._missing -= len(self._wanted[n])
        if not self._missing and self._deliver is not None:
            self.delivered = True
            self._deliver(self.captured)

    def on_log(self, name: str, value: Any, kwargs: dict[str, Any]) -> None:
        if not self.last:
            return
        with self.paused():
            value = sharding.whole(self._resolved(value))
            self.logged.append(Logged(name, value.detach().clone() if isinstance(value, Tensor) else value, kwargs))

    @contextmanager
    def on_region(self) -> Iterator[None]:
        # the checkpoint stores the generator's state here and replays from it: nothing inside may reseed
        if not self._in_region:
            self.randomness.seed_event(self.seeds, self.n)
        before, self._in_region = self._in_region, True
        try:
            yield
        finally:
            self._in_region = before


def _looks_like(tensor: Tensor, piece: Tensor, meta: TensorMeta) -> bool:
    """Whether a tensor, and this rank's piece of it, are what the plan says."""
    return (
        tuple(tensor.shape) == meta.size
        and tensor.dtype == meta.dtype
        and piece.requires_grad == meta.requires_grad
        and (None if piece is tensor else sharding.placement(tensor)) == meta.placement
    )


_LEAVES = (Tensor, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)


def _is_flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """No argument can have something inside: the usual case, for which pytrees would be slow."""
    for x in args:
        if not isinstance(x, _LEAVES):
            return False
    return not kwargs or all(isinstance(x, _LEAVES) for x in kwargs.values())


@contextmanager
def _tapped(event: Event) -> Iterator[list[Any]]:
    """Record the results of an atom's hooked submodules, in the order of their calls."""
    taps: list[Any] = []
    if not event.hooked:
        yield taps
        return
    with ExitStack() as stack:
        for submodule in {id(m): m for m, *_ in event.hooked}.values():
            stack.enter_context(replaced_forward(submodule, _tap(submodule.forward, taps)))
        yield taps


def _tap(forward: Callable[..., Any], taps: list[Any]) -> Callable[..., Any]:
    def tapped(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        taps.append(out)
        return out

    return tapped
