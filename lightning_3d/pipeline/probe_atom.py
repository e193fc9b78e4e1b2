"""HOW is one atom run without data?  On FakeTensors; where that is not possible, once for real on zeros."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.glue import replaced_forward
from lightning_3d.pipeline.holders import copy_holder, holders, is_opaque, slots
from lightning_3d.pipeline.probe_net import of_the_user

if TYPE_CHECKING:
    from lightning_3d.pipeline.probe_run import TraceRun

NO_FAKE_RUN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    RuntimeError,
    NotImplementedError,
    AssertionError,
)

_MOST_OPERATIONS = 1_000_000


class OperationWatch(TorchDispatchMode):
    """Notices whether anything inside draws random numbers (`own`: from a given generator), and what is written.

    Args:
        most: Number of operations after which it is not to be believed that they end.
    """

    hit = False
    own = False
    moved = 0

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._left = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.hit = True
            self.own |= (kwargs or {}).get("generator") is not None
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise PipelineError(
                    "a module has done a million operations and goes on. It could not be run on shapes, so its weights "
                    "and activations were zeros while the step is planned, and with those a loop inside seems not to "
                    "end. Bound the loop by a number of iterations."
                )
        out = func(*args, **(kwargs or {}))
        if not _makes_view(func):
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, Tensor):
                    self.moved += x.nbytes
        return out


@functools.cache
def _makes_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


class AtomExecution:
    """One atom, run without data.

    Attributes:
        out, taps: Its result, and (module, argument leaves, spec, result) of submodules with forward hooks.
        inputs, versions: The argument leaves it ran on, and their version counters before.
        tree, holders: The arguments, and their mutable holders with the content before.
        on_zeros: It could not run on FakeTensors, and ran on zeros.
    """

    def __init__(
        self,
        owner: TraceRun,
        module: nn.Module,
        run: Callable[..., Any],
        leaves: list[Any],
        fakes: list[Any],
        spec: Any,
    ) -> None:
        self.owner, self.module, self._run, self._spec = owner, module, run, spec
        self._leaves, self._fakes = leaves, fakes
        self.on_zeros = False
        self.flops, self.random, self.moved, self.own_generator = 0, False, 0, False

    def execute(self, name: str) -> None:
        try:
            with self.owner.fakes.mode, _quiet():
                self._call(self._fakes)
        except PipelineError:
            raise
        except NO_FAKE_RUN as error:
            self.on_zeros = True
            self.owner.trace.warnings.append(f"{name}: probed with zeros, its run on shapes failed ({error!r:.200})")
            self._call_on_zeros()

    def _call(self, inputs: list[Any]) -> None:
        self.inputs, self.versions = inputs, versions_of(inputs)
        # opaque arguments (a KV cache, ...) are copied: the probe leaves no trace in them
        self.tree = tree_unflatten([copy_holder(x) if is_opaque(x) else x for x in inputs], self._spec)
        self.holders = [(h, slots(h) or []) for h in holders(self.tree)]
        args, kwargs = self.tree
        watch = OperationWatch(_MOST_OPERATIONS if self.on_zeros else None)
        with of_the_user(), FlopCounterMode(display=False) as counter, watch, self._hooks_recorded() as self.taps:
            self.out = self._run(*args, **kwargs)
        self.flops, self.random, self.moved = counter.get_total_flops(), watch.hit, watch.moved
        self.own_generator = watch.own

    def _call_on_zeros(self) -> None:
        zeros = self.owner.filled(0)
        inside = {id(d) for m in self.module.modules() for d in (m._parameters, m._buffers)}
        flat = [m for m in self.module.modules() if isinstance(m, nn.RNNBase)]  # keep a second list of parameters
        undo: list[tuple[dict[str, Any], str, Any]] = [(m.__dict__, "_flat_weights", m._flat_weights) for m in flat]
        for dictionary, key, original in self.owner.fakes.swapped:
            if id(dictionary) in inside and is_fake(dictionary[key]):
                fake = dictionary[key]
                real = torch.zeros(fake.shape, dtype=fake.dtype, device=self.owner.device)
                undo.append((dictionary, key, fake))
                if isinstance(original, nn.Parameter):
                    real = _like_parameter(real, fake)
                dictionary[key] = real
        for m in flat:
            m.__dict__["_flat_weights"] = [m._parameters.get(name) for name in m._flat_weights_names]
        self.owner.inventing = zeros
        try:
            self._call(self.owner.real(0, self._leaves, self._fakes))
        finally:
            self.owner.inventing = None
            for dictionary, key, fake in undo:
                dictionary[key] = fake

    @contextmanager
    def _hooks_recorded(self) -> Iterator[list[Any]]:
        """Hooks of inner submodules are fired once, with phantoms, by `emit`; here their results are only recorded."""
        hooked = [m for m in self.module.modules() if m is not self.module and m._forward_hooks]
        saved = [dict(m._forward_hooks) for m in hooked]
        taps: list[Any] = []

        def recorded(submodule: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                out = forward(*args, **kwargs)
                taps.append((submodule, *tree_flatten((args, kwargs)), out))
                return out

            return call

        with ExitStack() as stack:
            for submodule in hooked:
                submodule._forward_hooks.clear()
                stack.enter_context(replaced_forward(submodule, recorded(submodule, submodule.forward)))
            try:
                yield taps
            finally:
                for submodule, hooks in zip(hooked, saved, strict=True):
                    submodule._forward_hooks.update(hooks)


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs a traceback for every operation that has no shape rule, although the failure is handled here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _like_parameter(real: Tensor, fake: Any) -> nn.Parameter:
    parameter = nn.Parameter(real, requires_grad=fake.requires_grad)
    for attribute in ("placement", "global_shape"):
        if hasattr(fake, attribute):
            setattr(parameter, attribute, getattr(fake, attribute))
    return parameter


def is_fake(x: Any) -> bool:
    """Whether `x` is a tensor (or a shard) without data."""
    return isinstance(x, Tensor) and isinstance(sharding.local(x), FakeTensor)


def versions_of(leaves: list[Any]) -> list[int | None]:
    """Version counters of the tensors among `leaves`; one that moved was changed in place."""
    return [sharding.local(x)._version if isinstance(x, Tensor) else None for x in leaves]
