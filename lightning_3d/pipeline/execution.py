"""HOW is one window of one microbatch executed, forwards and backwards?  Shared by the runner and the simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten
from torchmetrics import Metric

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.events import Trace, Vid
from lightning_3d.pipeline.glue import surroundings
from lightning_3d.pipeline.glue_state import GlueState
from lightning_3d.pipeline.looks import open_modules
from lightning_3d.pipeline.partition import Partition
from lightning_3d.pipeline.rng import Randomness, Seeds
from lightning_3d.pipeline.split_backward import Halves, WeightHalf, backward_from, edge_of, leads_back
from lightning_3d.pipeline.stage import StageRun
from lightning_3d.pipeline.step_values import StepValues
from lightning_3d.probe import ModuleState

TRAINING = "training_step"


@dataclass
class Program:
    """What is executed, and in which surroundings.

    Attributes:
        module, atoms: The root module and its closed pieces.
        open_modules: The modules whose code is glue.
        generators: What a step may draw from.
        tensor_group: Tensor-parallel group, or None.
        forward_context: Entered around every forward (autocast), never around a backward.
        around: Entered around all windows and backwards of a batch (activation checkpointing).
        state: What glue code remembers.
        running: `run` is open: what all windows of a batch need is in place.
    """

    module: nn.Module
    atoms: Mapping[str, nn.Module]
    generators: Randomness
    tensor_group: Any
    forward_context: Callable[[], AbstractContextManager[Any]]
    state: GlueState
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    running: bool = False
    metrics: list[Metric] = field(init=False)
    step_values: StepValues = field(init=False, default_factory=StepValues)
    open_modules: list[nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        self.open_modules = open_modules(self.module, self.atoms.values())
        self.metrics = [m for m in self.module.modules() if isinstance(m, Metric)]

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around all windows and backwards of a batch on this stage: installs once what each of them needs.

        The random generators are as before when it ends.
        """
        guard = sharding.guarded(self.tensor_group)
        with self.around(), surroundings(self.module, self.atoms), self.generators.forked(), guard:
            self.running = True
            self.state.begin()
            try:
                yield
            finally:
                self.running = False

    def window(self, run: StageRun) -> AbstractContextManager[Any]:
        """Around the forward of one window; for most there is nothing to look after."""
        trace, others = run.trace, self.metrics and not run.last
        if not self.running or trace.random or trace.remembered or others or (run.last and self.step_values.collects):
            return self._window(run)
        return self.forward_context()

    @contextmanager
    def _window(self, run: StageRun) -> Iterator[None]:
        number = run.window.number
        with (
            self._randomness(run.trace, run.seeds, number, run.last),
            self.state.window(run.partition, number, run.seeds.microbatch),
            nullcontext() if run.last else untouched_metrics(self),
            nullcontext() if self.running else sharding.guarded(self.tensor_group),
            self.forward_context(),
            self.step_values.collecting(run.known, run.paused) if run.last else nullcontext(),
        ):
            yield

    @contextmanager
    def _randomness(self, trace: Trace, seeds: Seeds, window: int, last: bool) -> Iterator[None]:
        """The generators of one window; `last`: the step comes to its end in it."""
        with nullcontext() if self.running else self.generators.window(seeds, window):
            if self.running and trace.random:
                self.generators.seed_window(seeds, window)
            yield
            if last and trace.random and seeds.microbatch == 0:
                self.generators.keep()


@dataclass
class Live:
    """A forward whose backward has not run yet.

    It keeps the graph of what the window made, not the values: those are freed once they are sent, unless the backward
    of the window itself needs them. The backward is that of the loss times all `factors`.
    """

    partition: Partition
    window: int
    run: StageRun
    loss: Tensor | None = None
    factors: tuple[float | Tensor, ...] = ()
    edges: dict[Vid, GradientEdge] = field(init=False)
    halves: Halves | None = None
    later: WeightHalf | None = None

    def __post_init__(self) -> None:
        self.edges = {vid: edge_of(x) for vid, x in self.run.captured.items() if leads_back(x)}


def forward(
    program: Program,
    partition: Partition,
    window: int,
    received: Mapping[Vid, Tensor],
    step: Callable[[], Any],
    seeds: Seeds,
    fetch: Callable[[], Mapping[Vid, Tensor]] | None = None,
    deliver: Callable[[Mapping[Vid, Tensor]], None] | None = None,
) -> tuple[StageRun, Any]:
    """Run one window; returns the run (captured values, logs) and the step's result (None before the last window).

    `received` and what `fetch` gives when it is needed are the values of earlier windows. `deliver` gets the captured
    values as soon as the last of them is there.
    """
    run = StageRun(
        partition,
        window,
        received,
        module=program.module,
        atoms=program.atoms,
        seeds=seeds,
        tensor_group=program.tensor_group,
        randomness=program.generators,
        fetch=fetch,
        deliver=deliver,
    )
    with program.window(run):
        out = run.run(step, surrounded=program.running)
    return run, out


@contextmanager
def untouched_metrics(program: Program) -> Iterator[None]:
    """torchmetrics metrics are as before at the end: only the last window, which sees all, may update them."""
    if not program.metrics:
        yield
        return
    metrics = ModuleState(program.module, program.metrics)
    states = [x for m in program.metrics for x in tree_flatten([m.__dict__.get(k) for k in m._defaults])[0]]
    inference = torch.is_inference_mode_enabled()
    # a state made in inference mode cannot change in place outside of it
    values = [(x, x.clone()) for x in states if isinstance(x, Tensor) and (inference or not x.is_inference())]
    try:
        yield
    finally:
        metrics.restore()
        with torch.no_grad():
            for x, before in values:
                x.copy_(before)


def loss_of(out: Any, step_name: str) -> Tensor | None:
    """The loss in the result of a training step; None when it returned None (skip this microbatch)."""
    if isinstance(out, Tensor):
        return out
    if isinstance(out, Mapping):
        if "loss" not in out:
            raise PipelineError(
                f"{step_name} returned a dict with {list(out)} but no 'loss'. Return the loss, or a dict with 'loss'."
            )
        out = out["loss"]
    if out is not None and not isinstance(out, Tensor):
        raise PipelineError(f"{step_name} returned a {type(out).__name__}; it must return a tensor, a dict or None.")
    return out


def trained_loss(out: Any, step_name: str) -> Tensor | None:
    """The loss a backward will start from.

    Raises:
        PipelineError: It is no loss, or nothing can be trained with it.
    """
    loss = loss_of(out, step_name)
    if loss is not None and not loss.requires_grad:
        raise PipelineError(
            f"{step_name} returned a loss that does not require grad (no grad_fn), so no parameter would be trained. "
            "It was detached (.detach(), .item(), torch.no_grad(), torch.tensor(loss)), or every parameter it depends "
            "on is frozen (requires_grad=False). Return the loss with its graph, or None to skip a batch."
        )
    return loss


def _seed(loss: Tensor, factors: tuple[float | Tensor, ...]) -> Tensor:
    """The gradient by the loss of its product with the factors, in the loss's precision and without nodes."""
    number = math.prod(x for x in factors if not isinstance(x, Tensor))
    seed = torch.full_like(loss, number)
    for factor in factors:
        if isinstance(factor, Tensor):
            seed.mul_(factor)
    return seed


def divide(live: Live, vids: Iterable[Vid]) -> None:
    """Prepare `backward(live, ..., weights_later=True)` before the gradients, of these values, are there."""
    roots = _roots(live, vids)
    if roots and not live.run.checkpointed:
        live.halves = Halves(roots, live.run.received.values())


def _roots(live: Live, vids: Iterable[Vid]) -> list[GradientEdge]:
    """Where the backward begins if there are gradients for these values, and for the loss if there is one."""
    loss = [edge_of(live.loss)] if live.loss is not None and live.loss.requires_grad else []
    return [*(live.edges[vid] for vid in vids if vid in live.edges), *loss]


def backward(
    live: Live,
    gradients: Mapping[Vid, Tensor],
    deliver: Callable[[dict[Vid, Tensor]], None],
    *,
    weights_later: bool = False,
) -> None:
    """Backward of one window of one microbatch; gradients of its parameters accumulate in `.grad`.

    Args:
        live: The forward.
        gradients: Value -> gradient from the windows that used it.
        deliver: Given the gradients of the received values that want one as soon as they are there, which may be
            before those of the weights are.
        weights_later: Leave what `backward_of_weights` can do later.
    """
    run = live.run
    run.arrivals.expect(run.received, deliver)
    roots = _roots(live, gradients)
    given = [g for vid, g in gradients.items() if vid in live.edges]
    if live.loss is not None and len(roots) > len(given):
        given.append(_seed(live.loss, live.factors))
    starts = list(zip(roots, given, strict=True))
    live.loss = None
    if starts:
        with sharding.guarded(run.tensor_group):  # a checkpoint recomputes
            if weights_later and not run.checkpointed:  # it would recompute for each half
                halves = live.halves
                if halves is None or halves.roots != [edge.node for edge in roots]:
                    halves = Halves(roots, run.received.values())
                live.later = halves.run(starts)
            else:
                backward_from(roots, given)
    run.arrivals.finish()
    live.halves = None
    live.edges.clear()
    run.release()


def backward_of_weights(live: Live) -> None:
    """What `backward(live, ..., weights_later=True)` left."""
    if live.later is not None:
        with sharding.guarded(live.run.tensor_group):
            live.later.run()
        live.later = None
