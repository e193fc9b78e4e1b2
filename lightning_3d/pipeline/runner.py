"""WHO drives a batch through the pipeline?  Set-up, and one call per batch.

Set-up traces the user's step, cuts it, lets all ranks agree, and frees the parameters of other stages. After that a
batch is split into microbatches, every microbatch gets its (cached) partition, and the schedule's list is walked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.comm import Communicator
from lightning_3d.errors import PipelineError
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.absent import drop
from lightning_3d.pipeline.atom_memory import AtomMemory
from lightning_3d.pipeline.batch_tree import signature
from lightning_3d.pipeline.changes import warn_of_changed_buffers
from lightning_3d.pipeline.channels import Channels
from lightning_3d.pipeline.costs import measure
from lightning_3d.pipeline.events import Trace
from lightning_3d.pipeline.execution import TRAINING, Program
from lightning_3d.pipeline.microbatch import split_with_sizes
from lightning_3d.pipeline.partition import Held, Partition
from lightning_3d.pipeline.path import follows
from lightning_3d.pipeline.planning import Split, along, cut, make_plan
from lightning_3d.pipeline.python_state import Looks, plain_state, watched
from lightning_3d.pipeline.results import StepResult, collect
from lightning_3d.pipeline.rng import Seeds, mix
from lightning_3d.pipeline.routes import Routes
from lightning_3d.pipeline.samples import Memory, batch_size
from lightning_3d.pipeline.schedule import Action
from lightning_3d.pipeline.trace import trace, without_inference_tensors
from lightning_3d.pipeline.training_schedule import TrainingSchedule, evaluation_lists
from lightning_3d.pipeline.walk import Recorder, Walk
from lightning_3d.probe import agree, call_step, probe_arguments

_SIGNATURES_KEPT = 256
_PATHS_KEPT = 8
_ROUTES_KEPT = 64


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
        self._held: Held | None = None
        self._partitions: dict[Any, list[Partition]] = {}
        self._atom_memory = AtomMemory()
        self._known_routes: dict[Any, Routes] = {}
        self._warned = False
        self._memory: Memory = {}  # which parts of training batches are cut

    # -- set-up
    @property
    def is_set_up(self) -> bool:
        return self._held is not None

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
        assert self._held is None, "set up already"
        first = self._split(step_name, batch)[0][0]
        owners = self._schedule.owners

        def tracer(atoms: Any) -> Trace:
            return self._trace(step_name, first, atoms)

        timer = partial(measure, mesh=self.mesh)
        plan = make_plan(self.module, self.stages, self.split, tracer, owners, timer)
        self._atom_memory.learn(plan.atoms)
        self._program = Program(self.module, plan.atoms, self.mesh.device, self._tensor_group, self._forward_context)
        # batches differ between replicas; the placement of parameters must not
        held = self.mesh.data.broadcast_object(plan.held, 0)
        self._held = Held(*held)
        partition = self._agreed(step_name, plan.trace)
        self._partitions[self._circumstances(step_name), signature(first)] = [partition]
        self._place(partition)
        return partition

    def _split(self, step_name: str, batch: Any) -> tuple[list[Any], list[int]]:
        count = self.num_microbatches if step_name == TRAINING else self._evaluation_microbatches
        if step_name != TRAINING and count == 1:
            return [batch], [1]
        return split_with_sizes(batch, count, self._memory if step_name == TRAINING else None)

    def _place(self, partition: Partition) -> None:
        assert self._held is not None
        self.holders = dict(self._held.holders)
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
        self._all_parameters = list(everything.values())
        self._all_modules = list(self.module.modules())

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

    # -- traces and partitions
    def _trace(
        self, step_name: str, microbatch: Any, atoms: Any, args: Sequence[Any] | None = None, seeds: Seeds | None = None
    ) -> Trace:
        step = getattr(self.module, step_name)
        microbatch = without_inference_tensors(microbatch)
        looks = Looks()
        found = probe_arguments(step, microbatch) if args is None else (microbatch, *args)
        arguments = (found[0], *(watched(x, looks) for x in found[1:]))
        return trace(
            self.module,
            atoms,
            lambda: call_step(self.module, step_name, *arguments),
            self._tensor_group,
            name=step_name,
            device=self.mesh.device,
            forward_context=self._forward_context,
            seeds=seeds or Seeds(self.seed, 0, 0, self.mesh.at.dp),
            memory=self._atom_memory,
            looks=looks,
            keep_arguments=self._held is None and self.split == "measured",
        )

    def _agreed(self, step_name: str, found: Trace) -> Partition:
        assert self._held is not None
        if step_name == TRAINING and self.num_microbatches > 1 and not self._warned:
            self._warned = warn_of_changed_buffers(self.module, found, self.num_microbatches)
        for event in found.events:
            event.arguments = None
        partition = cut(found, self._held, training=step_name == TRAINING)
        agree(f"the pipeline plan of {step_name}", partition.plain(), self.mesh.replica)
        return partition

    def _circumstances(self, step_name: str, args: Sequence[Any] = ()) -> Any:
        """What a step's path may depend on, besides the microbatch: modes, frozen parameters, dataloader_idx."""
        with torch._C.DisableTorchFunctionSubclass():
            trainable = tuple(p.requires_grad for p in self.module.parameters())
        modes = tuple(m.training for m in self.module.modules())
        others = tuple(signature(x) for x in args[1:])  # not batch_idx, which is another one every time
        return (step_name, torch.is_grad_enabled(), hash(trainable), hash(modes), others)

    def _partition(
        self,
        step_name: str,
        microbatch: Any,
        args: Sequence[Any],
        seeds: Seeds,
        circumstances: Any,
        before: dict[Any, Partition],
    ) -> Partition:
        """The partition for the path this microbatch takes; all ranks of a replica find the same one.

        Args:
            step_name: Name of the method.
            microbatch, args: What it gets.
            seeds: Of the microbatch.
            circumstances: Of the batch.
            before: Signature -> partition of the microbatch before this one in the same batch; this one is added.
        """
        shape = signature(microbatch)
        known = self._partitions.setdefault((circumstances, shape), [])
        state = None if shape in before else plain_state(self._program.open_modules)
        for partition in sorted(known, key=lambda p: p is not before.get(shape)):
            # Python state is that of the whole batch: the first of its microbatches is followed to the end
            whole = shape not in before and (
                partition.trace.looks_at_python or len(known) > 1 or partition.trace.python_state != state
            )
            if follows(
                self._program,
                partition.trace,
                lambda: call_step(self.module, step_name, microbatch, *args),
                seeds,
                whole=whole,
            ):
                if shape not in before:
                    before[shape], partition.trace.python_state = partition, state
                return partition
        found = self._trace(step_name, microbatch, self._program.atoms, args, seeds)
        known.append(self._agreed(step_name, found))
        partition = before[shape] = known[-1]
        del known[:-_PATHS_KEPT]
        while len(self._partitions) > _SIGNATURES_KEPT:
            self._partitions.pop(next(iter(self._partitions)))
        return partition

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
        weights: Sequence[float | Tensor] | None = None,
    ) -> StepResult:
        """Run the schedule on one batch. Gradients of `scale * sum(weight * loss)` are added into `.grad`.

        Nothing is reduced over dp or between the holders of shared parameters here (see `reduce_shared`).

        Args:
            batch: The same on all ranks of a replica.
            batch_idx: Passed on to the user's step.
            scale: Factor of the whole loss (1/dp, 1/accumulation, gradient scaler).
            before_last_backward: Called right before this stage's last backward.
            weights: Per microbatch, instead of its share of the samples.

        Raises:
            DivergedError: The step took another path than the planned one.
        """
        microbatches, sizes = self._split(TRAINING, batch)
        weights = [size / sum(sizes) for size in sizes] if weights is None else list(weights)
        assert len(weights) == len(microbatches), f"{len(weights)} weights for {len(microbatches)} microbatches"
        walk = self._walk(TRAINING, microbatches, (batch_idx,), self.step_number, weights, scale)
        walk.partitions, owners = along(walk.partitions, self._schedule.owners)
        lists = self._schedule.lists(owners, len(microbatches))
        walk.run(self._routes(walk.partitions, lists), before_last_backward)
        self.step_number += 1
        self.live_peak = walk.live_peak
        self._spread_buffers(walk.partitions)
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
        microbatches, sizes = self._split(step_name, batch)
        number = mix(zlib.crc32(step_name.encode()), self.evaluation_number)
        walk = self._walk(step_name, microbatches, (batch_idx, *args), number, None)
        walk.run(self._routes(walk.partitions, self._evaluation_lists(walk.partitions)))
        self.evaluation_number += 1
        self._spread_buffers(walk.partitions)
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
        assert self._held is not None, "setup() first"
        seeds = [Seeds(self.seed, number, i, self.mesh.at.dp) for i in range(len(microbatches))]
        circumstances = self._circumstances(step_name, args)
        before: dict[Any, Partition] = {}
        partitions = [
            self._partition(step_name, m, args, s, circumstances, before)
            for m, s in zip(microbatches, seeds, strict=True)
        ]

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
        )

    def _result(self, walk: Walk, sizes: list[int], weights: Any) -> StepResult:
        if self.stage != self.stages - 1:
            return StepResult(microbatches=len(sizes))
        return collect(walk.outputs, walk.losses, walk.logged, sizes, weights)

    def _spread_buffers(self, partitions: Sequence[Partition]) -> None:
        """Buffers that glue code wrote: from the stage that ran the write to all others."""
        written = {name: p.windows[w].stage for p in partitions for name, w in p.buffers.items()}
        for name, stage in sorted(written.items()):
            self.mesh.pipeline.broadcast(self.module.get_buffer(name), self.mesh.peer(stage))

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
        size = self.batch_size(batch)
        if size < self.num_microbatches:
            raise PipelineError(
                f"num_microbatches is {self.num_microbatches}, but the first batch has only {size} samples per "
                f"replica. Use num_microbatches of at most {size}, or a larger batch size."
            )
