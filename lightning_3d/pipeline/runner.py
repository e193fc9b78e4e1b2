"""WHO drives a batch through the pipeline?  Set-up, and one call per batch.

Set-up traces the user's step, cuts it, lets all ranks agree, and frees the parameters of other stages. After that a
batch is split into microbatches, every microbatch gets its (cached) partition, and the schedule's list is walked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.absence import check_have_values
from lightning_3d.comm import Communicator
from lightning_3d.errors import PipelineError
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.absent import drop
from lightning_3d.pipeline.channels import Channels
from lightning_3d.pipeline.compiled import compile_pieces, keep_graphs
from lightning_3d.pipeline.execution import TRAINING
from lightning_3d.pipeline.glue_state import Spread, distinct
from lightning_3d.pipeline.microbatch import split_with_sizes
from lightning_3d.pipeline.partition import Partition
from lightning_3d.pipeline.planning import Split, along
from lightning_3d.pipeline.plans import Plans
from lightning_3d.pipeline.probe_before import kept_tensor
from lightning_3d.pipeline.results import StepResult, collect
from lightning_3d.pipeline.rng import Seeds, mix
from lightning_3d.pipeline.routes import Routes
from lightning_3d.pipeline.samples import Memory, batch_size
from lightning_3d.pipeline.schedule import Action
from lightning_3d.pipeline.training_schedule import TrainingSchedule, evaluation_lists
from lightning_3d.pipeline.walk import Recorder, Walk
from lightning_3d.probe import call_step

_ROUTES_KEPT = 64
EachBackward = Callable[[Sequence[Action]], Callable[[int], AbstractContextManager[None]] | None]


class PipelineRunner:
    """Runs the step methods of a LightningModule over the pipeline stages of a mesh.

    Args:
        module: The user's module, on `mesh.device`, tensor-parallel rewrite done.
        mesh: This rank's place.
        schedule: The schedule for training, or its name.
        num_microbatches: Microbatches per training batch; a smaller batch gives one per sample.
        evaluation_microbatches: The same for validation, test and predict. One keeps the numbers of those steps what
            they are on one process (a perplexity is not the mean of its microbatches').
        tensor_group: Tensor-parallel group of the rewritten module, or None.
        split: "auto" (by estimated cost), "measured" (on this device), or the name of the first module of every window
            but the first.
        seed: Base of all random numbers drawn inside steps.
        forward_context: Entered around every forward window (autocast), never around a backward.
        recorder: Called with (action, start, end) for every action, and with kind "wait" for every wait.
        on_action: Called with every action before it begins, and with None after a batch.

    Attributes:
        parameters: Name -> parameter, of those this rank holds.
        names: Names of all parameters.
        holders: Name -> stages that hold it.
        shared: Stages -> names of the parameters they share.
        shared_groups: This rank's (communicator, names) of shared parameters.
        counted: Names this rank counts in norms: those whose first holder is its stage.
        buffers: Name of a buffer -> stage that keeps it current.
        live_peak: Largest number of live forwards (one per window and microbatch) in the last training batch.
        step_number: Number of training batches so far (random numbers depend on it).
        channels: The messages; `channels.on_wait` is called before and after a receive that may block.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        schedule: TrainingSchedule | str = "1f1b",
        num_microbatches: int,
        evaluation_microbatches: int = 1,
        tensor_group: Any = None,
        split: Split = "auto",
        seed: int = 0,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        recorder: Recorder | None = None,
        on_action: Callable[[Action | None], None] | None = None,
    ) -> None:
        self.module, self.mesh, self.num_microbatches = module, mesh, num_microbatches
        self._evaluation_microbatches = evaluation_microbatches
        self.stages, self.stage = mesh.layout.pp, mesh.at.pp
        self.split, self.seed, self.recorder, self.on_action = split, seed, recorder, on_action
        self._schedule = TrainingSchedule(schedule, self.stages) if isinstance(schedule, str) else schedule
        if self._schedule.splits:
            keep_graphs()
        self._forward_context, self._tensor_group = forward_context, tensor_group
        self.channels = Channels(mesh)
        self.step_number = self.evaluation_number = self.live_peak = 0
        self.parameters: dict[str, nn.Parameter] = {}
        self.names: list[str] = []
        self.holders: dict[str, tuple[int, ...]] = {}
        self.shared: dict[tuple[int, ...], list[str]] = {}
        self.shared_groups: list[tuple[Communicator, list[str]]] = []
        self.counted: set[str] = set()
        self.buffers: dict[str, int] = {}
        self._known_routes: dict[Any, Routes] = {}
        self._memory: Memory = {}  # which parts of training batches are cut

    # -- set-up
    @property
    def is_set_up(self) -> bool:
        return hasattr(self, "plans")

    def setup(self, step_name: str, batch: Any) -> Partition:
        """Trace the step on the first microbatch of `batch`, cut it, and drop what this rank does not hold.

        Collectives: the plan of the first replica is broadcast over dp (a few KB); a digest is compared over the
        replica (8 bytes); one group is made per set of stages that share parameters.

        Args:
            step_name: The step whose calls decide the cut ("training_step" when there is training).
            batch: A batch, equal on all ranks of a replica.

        Raises:
            PipelineError: The step cannot be cut as asked.
        """
        assert not self.is_set_up, "set up already"
        first = self._split(step_name, batch)[0][0]
        owners = self._schedule.owners

        self.plans = Plans(
            self.module,
            self.mesh,
            tensor_group=self._tensor_group,
            forward_context=self._forward_context,
            seed=self.seed,
            microbatches=self.num_microbatches,
        )
        partition = self._first = self.plans.begin(step_name, first, self.split, owners)
        self._program = self.plans.program
        compile_pieces(self.module, self._program.atoms)
        self._place(partition)
        return partition

    def _split(self, step_name: str, batch: Any) -> tuple[list[Any], list[int]]:
        count = self.num_microbatches if step_name == TRAINING else self._evaluation_microbatches
        if count == 1:
            return [batch], [1]
        return split_with_sizes(batch, count, self._memory if step_name == TRAINING else None)

    def _place(self, partition: Partition) -> None:
        self.holders = dict(self.plans.held.holders)
        everything = dict(self.module.named_parameters())
        self.names = list(everything)
        mine = {n for n in self.names if self.stage in self.holders[n]}
        self.buffers = self._buffer_stages(partition)
        drop(self.module, mine, self.holders)
        self.parameters = {n: p for n, p in everything.items() if n in mine}
        self.counted = {n for n in mine if self.holders[n][0] == self.stage}
        for name in self.names:
            if len(self.holders[name]) > 1:
                self.shared.setdefault(self.holders[name], []).append(name)
        for stages in sorted(self.shared):
            communicator = self.mesh.holders(stages)
            if self.stage in stages:
                self.shared_groups.append((communicator, self.shared[stages]))

    def _buffer_stages(self, partition: Partition) -> dict[str, int]:
        """Buffers of an atom live where it first runs; those of glue code where they are written, else last."""
        out = {}
        calls = {event.atom: n for n, event in reversed(partition.trace.calls())}
        for name, _ in self.module.named_buffers():
            stage = self.stages - 1
            for atom, n in calls.items():
                if name.startswith(atom + "."):
                    stage = next(w.stage for w in partition.windows if w.start <= n < w.stop)
            if name in partition.buffers:
                stage = partition.windows[partition.buffers[name]].stage
            out[name] = stage
        return out

    def surround(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter `context()` around all windows and backwards of every batch, before forwards are routed."""
        self._program.around = context

    @property
    def atoms(self) -> Mapping[str, nn.Module]:
        """Name -> module of the closed pieces."""
        return self._program.atoms

    # -- batches
    def batch_size(self, batch: Any) -> int:
        """Number of samples of a batch, as it will be cut."""
        return batch_size(batch)

    def train_step(
        self,
        batch: Any,
        batch_idx: int,
        *,
        scale: float | Tensor = 1.0,
        before_last_backward: Callable[[], None] | None = None,
        each_backward: EachBackward | None = None,
        weights: Sequence[float | Tensor] | None = None,
    ) -> StepResult:
        """Run the schedule on one batch. Gradients of `scale * sum(weight * loss)` are added into `.grad`.

        Nothing is reduced over dp or between the holders of shared parameters here (see `reduce_shared`).

        Args:
            batch: The same on all ranks of a replica.
            batch_idx: Passed on to the user's step.
            scale: Factor of the whole loss (1/dp, 1/accumulation, gradient scaler).
            before_last_backward: Called right before this stage's last backward.
            each_backward: Given this stage's actions, what is entered (with the window's number) around every backward
                that completes gradients of a window, instead of the call before the last one; or None.
            weights: Per microbatch, instead of its share of the samples.

        Raises:
            DivergedError: The step took another path than the planned one.
        """
        check_have_values(self.parameters)
        microbatches, sizes = self._split(TRAINING, batch)
        weights = [size / sum(sizes) for size in sizes] if weights is None else list(weights)
        assert len(weights) == len(microbatches), f"{len(weights)} weights for {len(microbatches)} microbatches"
        walk = self._walk(TRAINING, microbatches, (batch_idx,), self.step_number, weights, scale)
        walk.partitions, owners = along(walk.partitions, self._schedule.owners)
        lists = self._schedule.lists(owners, len(microbatches))
        spread = self._spread_of(walk.partitions)
        around = each_backward(lists[self.stage]) if each_backward is not None else None
        walk.run(self._routes(walk.partitions, lists), before_last_backward if around is None else None, around)
        self._spread_buffers(walk.partitions)  # first: the last stage may have made a part of the changes
        spread.finish()
        self.step_number += 1
        self.live_peak = walk.live_peak
        return self._result(walk, sizes, weights)

    def evaluate(self, step_name: str, batch: Any, batch_idx: int = 0, *args: Any) -> StepResult:
        """Run a step forward only (validation, test, predict); call it under `no_grad` or `inference_mode`.

        Args:
            step_name: Name of the method.
            batch: The same on all ranks of a replica.
            batch_idx: Passed on, as far as the method takes it.
            *args: More arguments for the method (dataloader_idx).
        """
        assert not torch.is_grad_enabled(), "evaluation needs torch.no_grad() or torch.inference_mode()"
        check_have_values(self.parameters)
        microbatches, sizes = self._split(step_name, batch)
        number = mix(zlib.crc32(step_name.encode()), self.evaluation_number)
        walk = self._walk(step_name, microbatches, (batch_idx, *args), number, None)
        spread = self._spread_of(walk.partitions)
        walk.run(self._routes(walk.partitions, self._evaluation_lists(walk.partitions)))
        self._spread_buffers(walk.partitions)
        spread.finish()
        self.evaluation_number += 1
        return self._result(walk, sizes, [size / sum(sizes) for size in sizes])

    def _routes(self, partitions: Sequence[Partition], lists: Sequence[Sequence[Action]]) -> Routes:
        """The messages of a batch; kept for the next batches that are cut alike."""
        key = (tuple(map(id, partitions)), id(lists))
        routes = self._known_routes.pop(key, None) or Routes(partitions, lists, self.stage)
        self._known_routes[key] = routes  # which keeps the objects of the key alive
        while len(self._known_routes) > _ROUTES_KEPT:
            self._known_routes.pop(next(iter(self._known_routes)))
        return routes

    def _evaluation_lists(self, partitions: Sequence[Partition]) -> Sequence[Sequence[Action]]:
        return evaluation_lists(tuple(tuple(w.stage for w in p.windows) for p in partitions), self.stages)

    def _walk(
        self,
        step_name: str,
        microbatches: list[Any],
        args: tuple[Any, ...],
        number: int,
        weights: Sequence[float | Tensor] | None,
        scale: float | Tensor = 1.0,
    ) -> Walk:
        assert self.is_set_up, "setup() first"
        seeds = [Seeds(self.seed, number, i, self.mesh.at.dp) for i in range(len(microbatches))]
        partitions, agreed = self.plans.find(step_name, microbatches, args, seeds)

        def step(microbatch: Any) -> Callable[[], Any]:
            return lambda: call_step(self.module, step_name, microbatch, *args)

        return Walk(
            self._program,
            self.channels,
            self.stage,
            partitions,
            [step(microbatch) for microbatch in microbatches],
            seeds,
            weights,
            scale,
            step_name,
            self.mesh.ledger,
            self.recorder,
            self.on_action,
            agreed,
        )

    def _result(self, walk: Walk, sizes: list[int], weights: Any) -> StepResult:
        if self.stage != self.stages - 1:
            return StepResult(microbatches=len(sizes))
        return collect(walk.outputs, walk.losses, walk.logged, sizes, weights)

    def windows_of_parameters(self) -> dict[str, set[int]]:
        """Name -> windows of this stage that used the parameter when the step was planned."""
        found: dict[str, set[int]] = {}
        for window in self._first.windows:
            for event in self._first.trace.events[window.start : window.stop] if window.stage == self.stage else ():
                for name in event.params:
                    found.setdefault(name, set()).add(window.number)
        return found

    def _spread_of(self, partitions: Sequence[Partition]) -> Spread:
        pieces = distinct(piece for partition in partitions for piece in partition.trace.pieces)
        if any(partition.trace.random for partition in partitions):
            pieces += self._program.generators.own
        return Spread(pieces, self.mesh.replica_control, self.mesh.device)

    def _spread_buffers(self, partitions: Sequence[Partition]) -> None:
        """Buffers, and tensors in attributes, that glue code wrote into: from the stage that did to all others."""
        written = {name: p.windows[w].stage for p in partitions for name, w in p.buffers.items()}
        for name, stage in sorted(written.items()):
            self.mesh.pipeline.broadcast(kept_tensor(self.module, name), self.mesh.peer(stage))

    def reduce_shared(self) -> None:
        """Sum the gradients of parameters that several stages hold; once per optimizer step, before the dp reduction.

        Collectives: one all-reduce of each shared parameter's gradient over its holders.
        """
        for communicator, names in self.shared_groups:
            for name in names:
                parameter = self.parameters[name]
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    communicator.all_reduce(parameter.grad)

    def check_microbatches(self, batch: Any) -> None:
        """Raise unless the batch has at least one sample per microbatch.

        Raises:
            PipelineError: Names both numbers.
        """
        size = self.batch_size(batch) if self.num_microbatches > 1 else 1
        if size < self.num_microbatches:
            raise PipelineError(
                f"num_microbatches is {self.num_microbatches}, but the first batch has only {size} samples per "
                f"replica. Use num_microbatches of at most {size}, or a larger batch size."
            )
