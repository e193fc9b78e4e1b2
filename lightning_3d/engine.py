"""WHAT was built for this module?  The rooms put together: tensor plan, pipeline, ZeRO, in that order.

The order is fixed by what each room must see (docs/decisions/0001): the optimizers are configured on the whole
module, then the tensor plan is made, proved and applied, then the pipeline is traced on the rewritten module and what
other stages hold is dropped, and last ZeRO re-points the optimizers' groups. Parameters keep their identity all along.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_3d.checkpoint import ParameterRecord, RunState
from lightning_3d.errors import ConfigurationError, ParityError
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.observe import TraceRecorder
from lightning_3d.pipeline import Partition, PipelineRunner, StepResult
from lightning_3d.pipeline.rng import forked, mix, seed_torch
from lightning_3d.pipeline.samples import batch_size, describe_size
from lightning_3d.probe import agree, call_step, intercept_functions, metrics_alone
from lightning_3d.tensor import (
    NothingToProve,
    Placement,
    ShardedTensor,
    TensorGroup,
    TensorPlan,
    function_guard,
    plan_tensor_parallel,
    rewrite,
    verify_tensor_plan,
    whole,
)
from lightning_3d.zero import Zero, scale_gradients, total_norm

_log = logging.getLogger(__name__)
LARGEST_PROVED = 50_000_000
"""Parameters of the largest model that `verify="auto"` proves."""


@dataclass(frozen=True)
class Settings:
    """What the user chose, beside the layout."""

    num_microbatches: int | str = "auto"
    sequence_parallel: bool = False
    tensor_parallel_plan: str | dict[str, str] = "auto"
    pipeline_split: str | Sequence[str] = "auto"
    verify: bool | str = "auto"
    bucket_bytes: int | None = None
    timeout: timedelta | None = None
    record_timeline: bool = False
    forward_context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


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
        self.proved: float | None = None  # largest error of the proof, on rank zero
        self._began = time.monotonic()
        self.tensor_group = TensorGroup(mesh.tensor)
        self.runner: PipelineRunner | None = None
        self.partition: Partition | None = None
        self.zero: Zero | None = None
        self.recorder: TraceRecorder | None = None
        # rank zero's random state is everywhere by now, so this is equal on all ranks
        self.seed = torch.initial_seed() & 0x7FFF_FFFF
        if settings.record_timeline:
            self.recorder = TraceRecorder(mesh.rank, mesh.at.pp, dp=mesh.at.dp, tp=mesh.at.tp, layout=str(self.layout))

    # -- building
    def cut(self, step_name: str, batch: Any) -> None:
        """Plan and cut the model over tp and pp by following `batch` through the user's step.

        Raises:
            ConfigurationError: The model or the step cannot be cut as asked; equal on all ranks.
        """
        microbatches = self._microbatches(step_name, batch) if self.layout.pp > 1 else 1
        with metrics_alone(self.module):
            if self.layout.tp > 1:
                self._cut_tensors(step_name, batch)
            if self.layout.pp > 1:
                self._cut_stages(step_name, batch, microbatches)

    def _cut_stages(self, step_name: str, batch: Any, microbatches: int) -> None:
        self.runner = PipelineRunner(
            self.module,
            self.mesh,
            schedule=self.layout.schedule,
            num_microbatches=microbatches,
            tensor_group=self.tensor_group if self.layout.tp > 1 else None,
            split=self.settings.pipeline_split,
            seed=self.seed,
            forward_context=self.settings.forward_context,
            recorder=self.recorder,
        )
        self.partition = self.runner.setup(step_name, batch)

    def _cut_tensors(self, step_name: str, batch: Any) -> None:
        def step(module: nn.Module) -> Any:
            with self.settings.forward_context():
                return call_step(module, step_name, batch, 0)

        overrides = self.settings.tensor_parallel_plan
        self.tensor_plan = plan_tensor_parallel(
            self.module,
            step,
            self.layout.tp,
            overrides=None if isinstance(overrides, str) else overrides,
            sequence=self.settings.sequence_parallel,
        )
        self.tensor_plan.check_heads()
        seen = (self.tensor_plan.to_dict(), self.tensor_plan.conversions)
        agree("the tensor-parallel plan", seen, self.mesh.replica)
        if step_name == "training_step" and self._wants_proof():
            self._prove(self.tensor_plan, step)
        rewrite(self.module, self.tensor_plan, self.tensor_group)

    def summary(self) -> str:
        """One line about what was built, for the log."""
        parts = [f"lightning_3d: {self.layout}"]
        if self.tensor_plan is not None:
            parts.append(f"{self.tensor_plan.sharded_fraction:.0%} of the parameters divided over tp")
            if self.proved is not None:
                parts.append(f"proved equal to the original to {self.proved:.0e}")
        if self.runner is not None:
            counts = [sum(math.prod(self.global_shapes[n]) for n in held) for held in self.stage_names()]
            parts.append("stages of " + " + ".join(f"{count:,}" for count in counts) + " parameters")
        return ", ".join(parts) + f" ({time.monotonic() - self._began:.1f} s). strategy.explain() shows the plan."

    def stage_names(self) -> list[list[str]]:
        """Names of the parameters every pipeline stage holds."""
        assert self.runner is not None
        return [[n for n, s in self.runner.holders.items() if stage in s] for stage in range(self.layout.pp)]

    def _wants_proof(self) -> bool:
        if self.settings.verify != "auto":
            return bool(self.settings.verify)
        count = sum(math.prod(shape) for shape in self.global_shapes.values())
        if count > LARGEST_PROVED and self.mesh.rank == 0:
            _log.info(
                f"the tensor-parallel plan of this model ({count / 1e6:.0f} million parameters) is not proved before "
                "training: that needs float64 copies of it. Prove a smaller configuration with lightning_3d.verify, or "
                "set verify=True."
            )
        return count <= LARGEST_PROVED

    def _prove(self, plan: TensorPlan, step: Callable[[nn.Module], Any]) -> None:
        """Original against rewritten on simulated ranks; done once per run, by rank 0."""
        message = ""
        cause: Exception | None = None
        if self.mesh.rank == 0:
            try:
                report = verify_tensor_plan(self.module, plan, step)
                self.proved = report.worst
                if not report.ok:
                    message = f"the tensor-parallel model does not compute what the original does: {report}. "
                    message += report.advice
            except NothingToProve as error:
                _log.warning(f"the tensor-parallel plan is not proved before training, with this batch: {error}")
            except ConfigurationError as error:  # all ranks must hear of it
                message, cause = f"the tensor-parallel plan could not be proved before training: {error}", error
            except Exception as error:
                cause = error
                message = (
                    "the step does not run on a float64 copy of the module, which is made to prove the tensor-parallel "
                    f"plan before training: {type(error).__name__}: {error}. If the step is right, train without the "
                    "proof: ThreeDStrategy(verify=False)."
                )
        message = self.mesh.world.broadcast_object(message, 0)
        if message:
            raise ParityError(message) from cause

    @contextmanager
    def _recorded(self, number: int) -> Iterator[None]:
        if self.recorder is not None:
            self.recorder.begin_step(number)
        yield
        if self.recorder is not None:
            self.recorder.end_step()

    def _microbatches(self, step_name: str, batch: Any) -> int:
        """The documented rule: 4 x pp microbatches, fewer where the batch has fewer samples."""
        asked = self.settings.num_microbatches
        if step_name != "training_step":  # evaluation is not cut
            return 1
        size = batch_size(batch)
        if asked == "auto":
            return min(4 * self.layout.pp, size)
        assert isinstance(asked, int)
        if asked > size:
            raise ConfigurationError(
                f"num_microbatches={asked}, but a batch of one data-parallel replica has {describe_size(batch)}, so "
                f"at most {size} microbatches can be cut. Raise the loader's batch_size to at least {asked}, lower "
                "num_microbatches, or leave it 'auto'."
            )
        return asked

    def shard(self, optimizers: Sequence[Optimizer], watched: bool = False) -> None:
        """Hand the optimizers' groups and the gradients to ZeRO.

        Args:
            optimizers: All of the module's.
            watched: Hooks of the user may look at `.grad`.
        """
        self.zero = Zero(
            optimizers,
            self.held,
            self.names,
            counted=self.counted,
            stage=self.layout.zero,
            data=self.mesh.data,
            control=self.mesh.control,
            shared=self.runner.shared_groups if self.runner is not None else (),
            cut={n for n in self.held if self.placement(n) is not None},
            parted=self.layout.tp * self.layout.pp > 1,
            publish_later=self.runner is not None,
            watched=watched,
            bucket_bytes=self.settings.bucket_bytes or (4 << 20 if self.mesh.device.type == "cpu" else 25 << 20),
        )

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
        return {n for n in names if self.placement(n) is not None}

    def placement(self, name: str) -> Placement | None:
        """How a parameter is cut over tp, or None."""
        return getattr(self.parameters[name], "placement", None)

    # -- running
    @contextmanager
    def sharding_rules(self) -> Iterator[None]:
        """Custom autograd Functions keep the gradients of sharded arguments while this is open."""
        if self.layout.tp == 1:
            yield
            return
        with intercept_functions(function_guard, 1):
            yield

    def direct_step(self, step_name: str, args: Sequence[Any], number: int = 0) -> Any:
        """One step of the user's own code on this rank (no pipeline); sharded results are made whole.

        Args:
            step_name: The method.
            args: What Lightning passes to it.
            number: Index of the batch; with several replicas it seeds what the step draws (masks of dropout), so
                that replicas draw differently, tensor-parallel peers alike, and the default generator stays in step.
        """
        with ExitStack() as stack:
            if self.layout.dp > 1 and self.module.training:
                stack.enter_context(forked(self.mesh.device))
                seed_torch(mix(self.seed, number, self.mesh.at.dp), self.mesh.device)
            stack.enter_context(self.sharding_rules())
            stack.enter_context(self.settings.forward_context())
            stack.enter_context(self.mesh.ledger.during("forward"))
            out = call_step(self.module, step_name, *args)
            return out if self.layout.tp == 1 else tree_map(_whole, out)

    def pipeline_train(
        self, batch: Any, batch_idx: int, scale: float, last: bool, keep_gradients: bool, number: int
    ) -> StepResult:
        """One schedule over the microbatches of a batch; gradients wait in ZeRO's buckets.

        Args:
            batch: This replica's batch.
            batch_idx: Its index.
            scale: Factor on the loss (one over the accumulation count).
            last: The optimizer steps after this batch: reduce over the replicas, during the last backward.
            keep_gradients: Somebody looks at the old gradients before they are zeroed.
            number: Index of the batch in the whole run; seeds what the step draws.
        """
        assert self.runner is not None
        assert self.zero is not None
        self.runner.step_number = number
        self.zero.begin()
        self.zero.set_aside(keep=keep_gradients)
        with self.sharding_rules(), self._recorded(number), self.mesh.ledger.during("pipeline"):
            result = self.runner.train_step(
                batch,
                batch_idx,
                scale=scale,
                before_last_backward=self.zero.start_reducing if last else _nothing,
            )
            if last:
                self.zero.finish()
        self.zero.put_back()
        return result

    def pipeline_evaluate(self, step_name: str, args: Sequence[Any]) -> StepResult:
        """A forward-only pass of a validation, test or predict step through the stages."""
        assert self.runner is not None
        with self.sharding_rules(), self.mesh.ledger.during("pipeline"):
            return self.runner.evaluate(step_name, *args)

    # -- gradients
    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """Norm of the whole mesh's gradient of one optimizer, every element counted once. Collective."""
        zero = self.zero
        assert zero is not None
        zero.shown.collect()
        by_id = {id(slot.held): slot for slot in zero.slots.values()}
        counted = self.counted
        gradients = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slot = by_id.get(id(parameter))
                name = slot.name if slot is not None else self.names[id(parameter)]
                if name in counted and parameter.grad is not None:
                    gradients.append(parameter.grad)
        # a sharded optimizer's pieces are disjoint over dp; without shards every replica holds the same gradient
        group_of_ranks = self.mesh.world if zero.stage else self.mesh.replica
        with self.mesh.ledger.during("clip"):
            return total_norm(gradients, group_of_ranks, self.mesh.device, norm_type)

    def clip(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Scale an optimizer's gradients to `max_norm` at most; returns the norm before."""
        assert self.zero is not None
        norm = self.gradient_norm(optimizer)
        shown = self.zero.shown
        scale_gradients((shown.whole(p) for g in optimizer.param_groups for p in g["params"]), norm, max_norm)
        return norm

    def norm_of(self, gradients: Sequence[Tensor], norm_type: float) -> Tensor | None:
        """The mesh's norm of what one rank sees of the module's gradients (in `.grad` of its or the optimizer's).

        Returns:
            None where these are other tensors, or where this rank holds all there is.

        Collectives: one all-reduce of one number over all ranks.
        """
        zero, counted = self.zero, self.counted
        assert zero is not None
        # every replica has the whole of these, so one of them counts
        first = self.mesh.at.dp == 0
        known = {id(p.grad): first and n in counted for n, p in self.held.items() if p.grad is not None}
        whole = all(id(g) in known for g in gradients)
        for slot in zero.slots.values():
            if slot.held is not slot.parameter and slot.held.grad is not None:
                known[id(slot.held.grad)] = slot.name in counted
        alone = self.mesh.layout.world_size == 1 or (gradients and whole and self.layout.replica_size == 1)
        if alone or not all(id(g) in known for g in gradients):
            return None
        with self.mesh.ledger.during("clip"):
            mine = [g for g in gradients if known[id(g)]]
            return total_norm(mine, self.mesh.world, self.mesh.device, norm_type)

    # -- state
    def state(self) -> RunState:
        """What a checkpoint holds of this rank."""
        held, counted = self.held, self.counted
        slots = self.zero.slots if self.zero is not None else {}
        records = [
            ParameterRecord(
                name,
                parameter,
                self.global_shapes[name],
                self.placement(name),
                name in held,
                name in counted,
                slots.get(parameter),
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


def _whole(value: Any) -> Any:
    return whole(value) if isinstance(value, ShardedTensor) else value


def _nothing() -> None:
    return None


def memory_report(engine: Engine, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Bytes this rank holds: parameters, gradients (largest so far in full-size buffers, plus shards), optimizer."""
    seen: set[int] = set()

    def storage(tensor: Tensor) -> int:
        data = tensor.untyped_storage()
        if data.data_ptr() in seen or not tensor.numel():
            return 0
        seen.add(data.data_ptr())
        return data.nbytes()

    parameters = sum(storage(p.data) for p in engine.held.values())
    zero = engine.zero
    gradients = 0
    if zero is not None:
        gradients = zero.gradient_peak + sum(
            storage(b.published) for b in zero.buckets if b.published is not None and b.sharded
        )
        gradients += sum(
            storage(p.grad) for p in engine.held.values() if p.grad is not None and (zero.passive or zero.shown.wanted)
        )
    state = sum(
        storage(v) for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor)
    )
    return {"parameters": parameters, "gradients": gradients, "optimizer": state}
