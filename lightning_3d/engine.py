"""WHAT was built for this module?  The rooms put together: tensor plan, pipeline, ZeRO, in that order.

The order is fixed by what each room must see (docs/decisions/0001): the optimizers are configured on the whole
module, then the tensor plan is made, proved and applied, then the pipeline is traced on the rewritten module and what
other stages hold is dropped, and last ZeRO re-points the optimizers' groups. Parameters keep their identity all along.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_3d.batch_loss import warn_of_cut_loss
from lightning_3d.checkpoint import ParameterRecord, RunState
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.microbatches import count_microbatches
from lightning_3d.observe import TraceRecorder, windows_of
from lightning_3d.observe.device import DeviceClock
from lightning_3d.pipeline import Partition, PipelineRunner, StepResult
from lightning_3d.pipeline.rng import forked, mix, seed_torch
from lightning_3d.pipeline.schedule import Action
from lightning_3d.pipeline.training_schedule import TrainingSchedule
from lightning_3d.probe import agree, call_step, intercept_functions, metrics_alone
from lightning_3d.proof import prove
from lightning_3d.recompute import Recompute, find_blocks
from lightning_3d.settings import Settings
from lightning_3d.tensor import (
    Placement,
    ShardedTensor,
    TensorGroup,
    TensorPlan,
    cut_optimizer_state,
    function_guard,
    mark_state_dicts,
    plan_tensor_parallel,
    rewrite,
    whole,
)
from lightning_3d.tensor.recorded.compiled import warn_uncompiled
from lightning_3d.tensor.recorded.eager import compiled_modules
from lightning_3d.tensor.recorded.recording import Recording
from lightning_3d.zero import Share, Units, Zero, find_units, is_low

_log = logging.getLogger(__name__)


class Engine:
    """Everything made for one LightningModule on this rank.

    Args:
        module: The LightningModule, whole, with equal weights on all ranks.
        mesh: This rank's place.
        settings: The user's choices.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, settings: Settings) -> None:
        self.module, self.mesh, self.settings = module, mesh, settings
        self.layout: Layout = mesh.layout
        self.names = {id(p): n for n, p in module.named_parameters()}
        self.parameters = dict(module.named_parameters())
        self.global_shapes = {n: tuple(p.shape) for n, p in self.parameters.items()}
        self.tensor_plan: TensorPlan | None = None
        self.proved: str | None = None  # what was proved, on rank zero
        self._cut_by = ""  # the step that was followed
        self._began = time.monotonic()
        self.tensor_group = TensorGroup(mesh.tensor, exact_dropout=settings.exact_dropout)
        self.recording: Recording | None = None
        self.recompute = Recompute(module, None)
        self.runner: PipelineRunner | None = None
        self.partition: Partition | None = None
        self.zero: Zero | None = None
        self.recorder: TraceRecorder | None = None
        # rank zero's random state is everywhere by now, so this is equal on all ranks
        self.seed = torch.initial_seed() & 0x7FFF_FFFF
        if settings.record_timeline:
            clock = DeviceClock() if mesh.device.type == "cuda" else None
            self.recorder = TraceRecorder(
                mesh.rank, mesh.at.pp, dp=mesh.at.dp, tp=mesh.at.tp, layout=str(self.layout), clock=clock
            )

    # -- building
    def cut(self, step_name: str, batch: Any) -> None:
        """Plan and cut the model over tp and pp by following `batch` through the user's step.

        Raises:
            ConfigurationError: The model or the step cannot be cut as asked; equal on all ranks.
        """
        self._cut_by = step_name
        training = step_name == "training_step"  # other steps are not cut into microbatches
        microbatches = self._microbatches(batch) if training and self.layout.pp > 1 else 1
        with metrics_alone(self.module):
            warn_of_cut_loss(self.module, batch, microbatches, self.settings.verify)
            if self.layout.tp > 1:
                self._cut_tensors(step_name, batch)
            if self.layout.pp > 1:
                self._cut_stages(step_name, batch, microbatches)
        atoms = self.runner.atoms if self.runner is not None else {}
        opened = {name for atom in atoms for name in _ancestors(atom)}
        choice = self.settings.activation_checkpointing
        self.recompute = Recompute(self.module, choice, self.mesh.at.pp, self.layout.pp, opened)

    def _cut_stages(self, step_name: str, batch: Any, microbatches: int) -> None:
        self.runner = PipelineRunner(
            self.module,
            self.mesh,
            schedule=self._schedule(),
            num_microbatches=microbatches,
            tensor_group=self.tensor_group if self.layout.tp > 1 else None,
            split=self.settings.pipeline_split,
            seed=self.seed,
            forward_context=self._forward_context,
            recorder=self.recorder,
        )
        self.partition = self.runner.setup(step_name, batch)
        if self.recorder is not None:
            self.recorder.windows = windows_of(self.partition)
        self.runner.surround(lambda: self.recompute.active())

    def _schedule(self) -> TrainingSchedule:
        layout = self.layout
        schedule = TrainingSchedule(layout.schedule, layout.pp, layout.virtual, layout.order)
        agree("the pipeline schedule", (schedule.owners, schedule.microbatches), self.mesh.replica)
        return schedule

    def _cut_tensors(self, step_name: str, batch: Any) -> None:
        def step_on(module: nn.Module, batch: Any) -> Any:
            with self.settings.forward_context():
                return call_step(module, step_name, batch, 0)

        overrides = self.settings.tensor_parallel_plan
        self.tensor_plan = plan_tensor_parallel(
            self.module,
            lambda module: step_on(module, batch),
            self.layout.tp,
            overrides=None if isinstance(overrides, str) else overrides,
            sequence=self.settings.sequence_parallel,
            strict=self.settings.strict_tensor_parallel,
        )
        for text in self.tensor_plan.whole_heads() if self.mesh.rank == 0 else ():
            _log.warning(text)
        seen = (self.tensor_plan.to_dict(), self.tensor_plan.conversions)
        agree("the tensor-parallel plan", seen, self.mesh.replica)
        if (warning := self.tensor_plan.hardly_divides()) is not None and self.mesh.rank == 0:
            _log.warning(warning)
        if step_name == "training_step":
            self.proved = prove(self.module, self.tensor_plan, step_on, batch, self.mesh, self.settings.verify)
        shared = {d.placement.copies for d in self.tensor_plan.decisions.values() if d.placement is not None}
        self.tensor_group.parts = {c: self.mesh.tensor_part(c) for c in sorted(shared) if c > 1}
        rewrite(self.module, self.tensor_plan, self.tensor_group)
        mark_state_dicts(self.module, self.global_shapes, self.mesh.at.tp, self.layout.tp)
        if self.settings.record:
            self.recording = Recording(self.module, self.tensor_group)
        elif self.mesh.rank == 0:
            for name in compiled_modules(self.module):
                warn_uncompiled(name, "record=False, and only recorded programs can be compiled")

    def summary(self) -> str:
        """One line about what was built, for the log."""
        parts = [f"lightning_3d: {self.layout}"]
        if self.tensor_plan is not None:
            parts.append(f"{self.tensor_plan.sharded_fraction:.0%} of the parameters divided over tp")
            if self.proved is not None:
                parts.append(self.proved)
        if self.runner is not None:
            counts = [sum(math.prod(self.global_shapes[n]) for n in held) for held in self.stage_names()]
            parts.append("stages of " + " + ".join(f"{count:,}" for count in counts) + " parameters")
        if self.recompute.blocks:
            parts.append(f"{len(self.recompute.blocks)} blocks recompute activations")
        seconds = time.monotonic() - self._began
        return f"{', '.join(parts)} ({seconds:.1f} s). print(strategy.explain()) shows the plan."

    def stage_names(self) -> list[list[str]]:
        """Names of the parameters every pipeline stage holds."""
        assert self.runner is not None
        return [[n for n, s in self.runner.holders.items() if stage in s] for stage in range(self.layout.pp)]

    @contextmanager
    def _recorded(self, number: int) -> Iterator[None]:
        if self.recorder is not None:
            self.recorder.begin_step(number)
        yield
        if self.recorder is not None:
            self.recorder.end_step()

    def _microbatches(self, batch: Any) -> int:
        return count_microbatches(self.layout, self.settings.num_microbatches, batch)

    def shard(self, optimizers: Sequence[Optimizer], watched: bool = False, keeps: bool = False) -> None:
        """Hand the optimizers' groups and the gradients to ZeRO.

        Args:
            optimizers: All of the module's.
            watched: Hooks of the user may look at `.grad`.
            keeps: Also while batches are accumulated.
        """
        if self.layout.tp > 1 and self._cut_by != "training_step" and self.settings.verify and self.mesh.rank == 0:
            _log.warning(
                f"the tensor-parallel plan was made for {self._cut_by}, so it is not proved before training: the "
                "original is no longer there. Call fit first, or lightning_3d.verify(module, batch, layout) beforehand."
            )
        for optimizer in optimizers if self.layout.tp > 1 else ():
            cut_optimizer_state(optimizer, self.tensor_group)
        runner = self.runner
        share = Share(
            self.held,
            self.names,
            self.counted,
            self.mesh.data,
            self.mesh.control,
            shared=runner.shared_groups if runner is not None else (),
            cut={n for n, p in self.parameters.items() if _local_shape(p) != self.global_shapes[n]},
            parted=self.layout.tp * self.layout.pp > 1,
            windows=runner.windows_of_parameters() if runner is not None else {},
            units=self._units() if self.layout.zero == 3 and self.layout.dp > 1 else None,
        )
        self.zero = Zero(
            optimizers,
            share,
            self.layout.zero,
            publish_later=runner is not None,
            watched=watched,
            keeps=keeps,
            master_weights=self.settings.master_weights,
            float32_gradients=self.settings.float32_gradients,
            bucket_bytes=self._bucket_bytes,
        )

    @property
    def _bucket_bytes(self) -> int:
        return self.settings.bucket_bytes or (4 << 20 if self.mesh.device.type == "cpu" else 25 << 20)

    def _units(self) -> Units:
        """In a pipeline all parameters of the stage are gathered once for all microbatches of a batch."""
        blocks = [] if self.runner is not None else find_blocks(self.module)
        large = self._bucket_bytes if self.runner is None else sys.maxsize
        names = find_units(self.module, blocks, large)
        modules = {name: self.module.get_submodule(name) for name in names}
        return Units(modules, names.values(), self.mesh.gathers, self.mesh.control)

    @property
    def units(self) -> Units | None:
        """What is gathered together with ZeRO-3, once the optimizers are divided."""
        return self.zero.units if self.zero is not None else None

    @contextmanager
    def gathering(self, training: bool, close: bool = True) -> Iterator[None]:
        """Around a step: with ZeRO-3 parameters are gathered while this is open.

        Args:
            training: A backward follows.
            close: It is in here, or there is none.
        """
        units = self.units
        if units is None:
            yield
            return
        units.begin(training)
        with units.active():
            yield
        if close:
            units.end(close=True)

    @property
    def held(self) -> dict[str, nn.Parameter]:
        """The parameters this rank has, in the module's order."""
        if self.runner is None:
            return self.parameters
        return {n: p for n, p in self.parameters.items() if n in self.runner.parameters}

    @property
    def counted(self) -> set[str]:
        """Names of the parameters whose elements here no other (tp, pp) rank counts: in norms and checkpoints."""
        names = set(self.held) if self.runner is None else set(self.runner.counted)
        if self.mesh.at.tp == 0:
            return names
        cuts = {n: self.placement(n) for n in names}
        return {n for n, cut in cuts.items() if cut is not None and self.mesh.at.tp % cut.copies == 0}

    def placement(self, name: str) -> Placement | None:
        """How a parameter is cut over tp, or None."""
        return getattr(self.parameters[name], "placement", None)

    # -- running
    @contextmanager
    def sharding_rules(self, training: bool = False, begins: bool = False) -> Iterator[None]:
        """Custom autograd Functions keep the gradients of sharded arguments while this is open.

        Args:
            training: Repeated blocks may run by their recorded programs.
            begins: A training step begins.
        """
        if self.layout.tp == 1:
            yield
            return
        recorded = self.recording.running(begins) if self.recording is not None and training else nullcontext()
        with intercept_functions(function_guard, 1), recorded:
            yield

    def direct_step(self, step_name: str, args: Sequence[Any], number: int = 0) -> Any:
        """One step of the user's own code on this rank (no pipeline); sharded results are made whole.

        Args:
            step_name: The method.
            args: What Lightning passes to it.
            number: Index of the batch; with several replicas it seeds what the step draws (masks of dropout), so
                that replicas draw differently, tensor-parallel peers alike, and the default generator stays in step.
        """
        training = step_name == "training_step"
        with ExitStack() as stack:
            if self.layout.dp > 1 and self.module.training:
                stack.enter_context(forked(self.mesh.device))
                seed_torch(mix(self.seed, number, self.mesh.at.dp), self.mesh.device)
            stack.enter_context(self.sharding_rules(training, begins=training))
            by_hand = not getattr(self.module, "automatic_optimization", True)
            stack.enter_context(self.gathering(training, close=not training or by_hand))
            stack.enter_context(self.recompute.active() if training else nullcontext())
            stack.enter_context(self._forward_context())
            stack.enter_context(self.mesh.ledger.during("forward"))
            out = call_step(self.module, step_name, *args)
            return out if self.layout.tp == 1 else tree_map(_whole, out)

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        """Around every forward (of a microbatch and stage), never around a backward."""
        with self.settings.forward_context(), self.tensor_group.shared_entries.one_forward():
            yield

    def pipeline_train(
        self, batch: Any, batch_idx: int, scale: float | Tensor, last: bool, keep_gradients: bool, number: int
    ) -> StepResult:
        """One schedule over the microbatches of a batch; gradients wait in ZeRO's buckets.

        Args:
            batch: This replica's batch.
            batch_idx: Its index.
            scale: Factor on the loss (one over the accumulation count, a gradient scaler's scale).
            last: The optimizer steps after this batch: reduce over the replicas, during the last backward.
            keep_gradients: Somebody looks at the old gradients before they are zeroed.
            number: Index of the batch in the whole run; seeds what the step draws.
        """
        assert self.runner is not None
        assert self.zero is not None
        if self._cut_by != "training_step":  # cut for an evaluation; the size of training batches is known only now
            self.runner.num_microbatches, self._cut_by = self._microbatches(batch), "training_step"
        self.runner.step_number = number
        self.zero.begin()
        self.zero.set_aside(keep=keep_gradients)
        with (
            self.gathering(training=True),
            self.sharding_rules(True, begins=True),
            self._recorded(number),
            self.mesh.ledger.during("pipeline"),
        ):
            result = self.runner.train_step(
                batch,
                batch_idx,
                scale=scale,
                before_last_backward=self.zero.start_reducing if last else None,
                each_backward=self._reduce_each if self.zero.reduces_always else None,
            )
            if last or self.zero.reduces_always:
                self.zero.finish(final=last)
        self.zero.put_back()
        return result

    def _reduce_each(self, actions: Sequence[Action]) -> Callable[[int], AbstractContextManager[None]] | None:
        """ZeRO-2 reduces after each backward, if the replicas run the same ones; else after the last.

        A smaller last batch may give one replica fewer microbatches.
        """
        assert self.zero is not None
        mine = [(action.kind, action[2]) for action in actions if action.kind in ("B", "W")]
        everybody = self.mesh.control.all_gather_object(zlib.crc32(repr(mine).encode()))
        return self.zero.backward_of if len(set(everybody)) == 1 else None

    def pipeline_evaluate(self, step_name: str, args: Sequence[Any]) -> StepResult:
        """A forward-only pass of a validation, test or predict step through the stages."""
        assert self.runner is not None
        with self.gathering(training=False), self.sharding_rules(), self.mesh.ledger.during("pipeline"):
            return self.runner.evaluate(step_name, *args)

    # -- state
    def state(self) -> RunState:
        """What a checkpoint holds of this rank."""
        if self.zero is not None:
            self.zero.reclaim()
        held, counted = self.held, self.counted
        slot_of = self.zero.slot_of if self.zero is not None else lambda _: None
        stepped = self.zero.stepped_in_float32 if self.zero is not None else set()
        records = [
            ParameterRecord(
                name,
                parameter,
                self.global_shapes[name],
                self.placement(name),
                name in held,
                name in counted,
                slot_of(parameter),
                torch.float32 if name in stepped and is_low(parameter) else parameter.dtype,
            )
            for name, parameter in self.parameters.items()
        ]
        return RunState(
            self.module,
            records,
            self._keeps_buffer,
            (self.mesh.at.tp, self.layout.tp),
            self.mesh.at.dp,
            self.mesh.world.all_reduce,
            self.zero,
            self.mesh.device,
        )

    def _keeps_buffer(self, key: str) -> bool:
        """A buffer is written by the stage that updates it (the last one if all do), replica 0, tp 0."""
        at = self.mesh.at
        last = self.layout.pp - 1
        stage = last if self.runner is None else self.runner.buffers.get(key, last)
        return at.dp == 0 and at.tp == 0 and at.pp == stage


def _ancestors(name: str) -> list[str]:
    """The modules a module lies in, by name."""
    keys = name.split(".")
    return [".".join(keys[:n]) for n in range(1, len(keys))]


def _whole(value: Any) -> Any:
    return whole(value) if isinstance(value, ShardedTensor) else value


def _local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Also of what only other stages hold, so that all ranks refuse alike."""
    return tuple(getattr(parameter, "local_shape", parameter.shape))
