"""HOW is one module cut?  The rooms put together: tensor plan, then pipeline.

The order is fixed by what each room must see (docs/decisions/0001): the optimizers are configured on the whole
module, then the tensor plan is made, proved and applied, then the pipeline is traced on the rewritten module and what
other stages hold is dropped, and last ZeRO re-points the optimizers' groups (engine.py). Parameters keep their identity
all along.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_3d.batch_loss import warn_of_cut_loss
from lightning_3d.deferred import realize_all
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.microbatches import count_microbatches
from lightning_3d.observe import TraceRecorder, windows_of
from lightning_3d.observe.device import DeviceClock
from lightning_3d.pipeline import Partition, PipelineRunner
from lightning_3d.pipeline.training_schedule import TrainingSchedule
from lightning_3d.probe import agree, metrics_alone, try_step
from lightning_3d.proof import prove
from lightning_3d.recompute import Recompute
from lightning_3d.settings import Settings
from lightning_3d.tensor import (
    Placement,
    TensorGroup,
    TensorPlan,
    mark_state_dicts,
    plan_tensor_parallel,
    rewrite,
)
from lightning_3d.tensor.recorded.compiled import warn_uncompiled
from lightning_3d.tensor.recorded.eager import compiled_modules
from lightning_3d.tensor.recorded.recording import Recording
from lightning_3d.zero import Zero

_log = logging.getLogger(__name__)


class Construction:
    """What is made of one LightningModule on this rank.

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
        if self.settings.pipeline_split == "measured":
            realize_all(self.module)  # blocks are run
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
                return try_step(module, step_name, batch, 0)

        overrides = self.settings.tensor_parallel_plan
        self.tensor_plan = plan_tensor_parallel(
            self.module,
            lambda module: step_on(module, batch),
            self.layout.tp,
            overrides=None if isinstance(overrides, str) else overrides,
            sequence=bool(self.settings.sequence_parallel),
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
        cuts = [d.placement for d in self.tensor_plan.decisions.values() if d.placement is not None]
        shared = {copies for cut in cuts for copies in (cut.copies, *cut.shares)}
        self.tensor_group.parts = {c: self.mesh.tensor_part(c) for c in sorted(shared) if 1 < c < self.layout.tp}
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

    def _microbatches(self, batch: Any) -> int:
        return count_microbatches(self.layout, self.settings.num_microbatches, batch)

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        """Around every forward (of a microbatch and stage), never around a backward."""
        with self.settings.forward_context(), self.tensor_group.shared_entries.one_forward():
            yield

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
        return {n for n in names if self.counts(n)}

    def counts(self, name: str) -> bool:
        """Whether no other tp rank counts what this one has of a parameter."""
        at, cut = self.mesh.at.tp, self.placement(name)
        return at == 0 or (cut is not None and at % cut.copies == 0)

    def placement(self, name: str) -> Placement | None:
        """How a parameter is cut over tp, or None."""
        return getattr(self.parameters[name], "placement", None)


def _ancestors(name: str) -> list[str]:
    """The modules a module lies in, by name."""
    keys = name.split(".")
    return [".".join(keys[:n]) for n in range(1, len(keys))]
