"""WHEN does Lightning ask, and which room answers?  The strategy: hook -> room, nothing else.

Written once as a mixin over Lightning's `DDPStrategy` (the only base class that every one of Lightning's closed
isinstance lists accepts: distributed samplers, `sync_dist`, precision plugins). `lightning.pytorch` and
`pytorch_lightning` are two packages with unrelated classes; each gets its own strategy out of the mixin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.arguments import CheckedArguments, check_effect, check_loss_weighting
from lightning_3d.comm import Ledger, ProcessCommunicator
from lightning_3d.data import random_state_kept
from lightning_3d.errors import ConfigurationError, LayoutError
from lightning_3d.gradients import gradient_norm
from lightning_3d.launch import WholeWeightsLauncher
from lightning_3d.layout import Layout
from lightning_3d.lifecycle import Lifecycle
from lightning_3d.memory import memory_report
from lightning_3d.mesh import Mesh
from lightning_3d.saving import unwrapped
from lightning_3d.settings import Settings
from lightning_3d.values import check_flags, check_processes

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class ThreeDStrategyBase(Lifecycle, _Base, metaclass=CheckedArguments):
    """What both strategies share; see `lightning_3d.ThreeDStrategy`."""

    package = ""
    """The Lightning package the class belongs to."""
    launcher_class: Any = WholeWeightsLauncher
    """Starts the processes of a machine with `start_method="fork"` or `"spawn"`."""

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int | Literal["auto"] = "auto",
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        zero_stage: int = 1,
        master_weights: bool = True,
        float32_gradients: bool = False,
        offload_optimizer: bool = False,
        num_microbatches: int | Literal["auto"] = "auto",
        pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"] | str = "1f1b",
        virtual_pipeline_size: int = 1,
        virtual_pipeline_order: Literal["looped", "contiguous"] = "looped",
        sequence_parallel: bool = False,
        tensor_parallel_plan: Literal["auto"] | dict[str, str] = "auto",
        strict_tensor_parallel: float | None = None,
        exact_dropout: bool = False,
        activation_checkpointing: Literal["full", "selective"] | list[str] | dict[str, str] | None = None,
        pipeline_split: Literal["auto", "measured"] | list[str] = "auto",
        loss_weighting: Literal["microbatch_mean", "tokens"] = "microbatch_mean",
        save_distributed_checkpoint: bool = True,
        verify: bool | Literal["auto"] = "auto",
        allow_cross_node_tensor_parallel: bool = False,
        bucket_size_mb: float | None = None,
        record_timeline: bool = False,
        hang_report_after: float | None = 60.0,
        record: bool = True,
        timeout: timedelta = timedelta(minutes=30),
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        """See the class for the arguments.

        Args:
            tensor_parallel_size: Ranks that share every large matrix; they should be on one machine.
            pipeline_parallel_size: Consecutive parts the model is cut into.
            data_parallel_size: Replicas; "auto" is world / (tensor x pipeline x context).
            context_parallel_size: Ranks that share one sequence (not in this version).
            expert_parallel_size: Ranks that share the experts (not in this version).
            zero_stage: 0: replicas hold everything; 1: they share the optimizer state; 2: and the gradients, which are
                reduced after every backward; 3: and the parameters, which are gathered for their use.
            master_weights: Where parameters are bfloat16 or float16 (`precision="bf16-true"`), optimizers step on
                float32 copies of them, so that small updates are not lost. (12 bytes per parameter with Adam, shared by
                the replicas from zero_stage=1 on, against 4.) Checkpoints hold the copies.
            float32_gradients: Gradients of such parameters are added up (over accumulated batches and microbatches) and
                reduced over the replicas in float32; otherwise in the parameters' precision.
            offload_optimizer: The optimizers' state and what they step on (this rank's part) are in the host's memory,
                and they step there, on the CPU: the device keeps parameters and gradients. A step becomes slower;
                optimizers with fused=True are fastest there.
            num_microbatches: Slices of a batch that follow each other through the pipeline; "auto" is
                min(batch, 4 x pipeline_parallel_size), or what a schedule's file is made for. Needs
                pipeline_parallel_size > 1.
            pipeline_schedule: Order of forwards and backwards. "1f1b" keeps at most `pipeline_parallel_size`
                microbatches alive on a stage, "gpipe" all of them; "interleaved_1f1b" gives every rank several parts
                of the model; "zb_h1" and "zb_v" fill idle time with the gradients of weights. Or the path of a file
                with one's own lists of actions. docs/schedules.md compares them.
            virtual_pipeline_size: Parts of the model per pipeline rank, for "interleaved_1f1b" ("zb_v" always has 2).
            virtual_pipeline_order: How these parts are dealt: "looped" (1 2 1 2, smaller bubble) or "contiguous"
                (1 1 2 2).
            sequence_parallel: Also cut norms, dropout and residuals along the sequence between tensor-parallel layers.
            tensor_parallel_plan: "auto", or patterns on module or parameter names to "column", "row", "vocab" or
                "replicate"; what they do not name stays automatic.
            strict_tensor_parallel: Least part (0 to 1) of the parameters that tensor parallelism must divide; if it is
                less, set-up fails and lists what stays whole and why.
            exact_dropout: Draw the dropout masks of whole activations on every rank and use a part of them, so that
                tensor parallelism gives what one process gives: for tests, it costs the whole masks.
            activation_checkpointing: Do not keep the activations of the model's blocks but compute them again in the
                backward. "full": keep a block's arguments only; "selective": also the results of matrix products and
                attention. A list gives every pipeline stage its own mode ("none": keep all), a dict patterns on
                module names their modes.
            pipeline_split: "auto" balances the estimated cost of the parts, "measured" runs every kind of block on this
                device at set-up and balances the times; or the name of the first module of every part of the model
                but the first (stages, or with virtual_pipeline_size > 1 the parts they run).
            loss_weighting: "microbatch_mean": microbatches weighted by samples, replicas equally (what DDP with
                gradient accumulation gives).
            save_distributed_checkpoint: Checkpoints are directories every rank writes its part of, readable by any
                layout; False: one plain Lightning file, gathered on rank zero.
            verify: Before training, prove the tensor-parallel plan in float64 on simulated ranks. "auto": models of up
                to 50 million parameters are run on part of the first batch, original against cut, loss and every
                gradient (memory: some 20 times their number in bytes on rank zero); of larger ones every kind of
                operation is tried alone. A model that was proved before on this machine is not proved again
                (`$LIGHTNING_3D_CACHE`). True: run it whatever its size, every time. False: no proof.
                With a pipeline, models of that size also compare the loss of the first batch with that of its
                microbatches, and warn if it is another one.
            allow_cross_node_tensor_parallel: Allow tensor_parallel_size to span machines.
            bucket_size_mb: Size of gradient buckets; None chooses by device (4 on CPU, 25 on CUDA).
            record_timeline: Keep the times of pipeline actions in `strategy.recorder`.
            hang_report_after: Seconds a rank may wait before a report says who waits for whom, down to the rank that
                does not wait, with its stack. None: no report. Nothing is ended by it.
            record: Record what every repeated block does on this rank, prove it, and run that in place of the block's
                own code under the sharding rules (tensor parallelism only). Blocks compiled by you need it.
            timeout: How long a collective may wait.
            process_group_backend: "nccl", "gloo", ...; None chooses by device.
            start_method: How Lightning launches the processes of a machine when nobody else has.
            cluster_environment: Lightning plugin that tells ranks and addresses; None detects it.
            checkpoint_io: Lightning plugin for plain checkpoint files.

        Raises:
            ConfigurationError: Arguments that are unknown, impossible, not built yet, or without effect.
        """
        check_flags(
            sequence_parallel=sequence_parallel,
            exact_dropout=exact_dropout,
            save_distributed_checkpoint=save_distributed_checkpoint,
            allow_cross_node_tensor_parallel=allow_cross_node_tensor_parallel,
            record_timeline=record_timeline,
            record=record,
            master_weights=master_weights,
            float32_gradients=float32_gradients,
            offload_optimizer=offload_optimizer,
        )
        check_processes(timeout, process_group_backend, bucket_size_mb)
        super().__init__(
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._data_parallel_size = data_parallel_size
        self.layout = Layout(
            tp=tensor_parallel_size,
            pp=pipeline_parallel_size,
            dp=1 if data_parallel_size == "auto" else data_parallel_size,
            cp=context_parallel_size,
            ep=expert_parallel_size,
            zero=zero_stage,
            schedule=pipeline_schedule,
            virtual=virtual_pipeline_size,
            order=virtual_pipeline_order,
        )
        self.layout.check_supported()
        check_loss_weighting(loss_weighting)
        self._allow_cross_node = allow_cross_node_tensor_parallel
        self._save_distributed = save_distributed_checkpoint
        self._settings = Settings(
            num_microbatches=num_microbatches,
            sequence_parallel=sequence_parallel,
            tensor_parallel_plan=tensor_parallel_plan,
            strict_tensor_parallel=strict_tensor_parallel,
            pipeline_split=pipeline_split,
            verify=verify,
            bucket_bytes=None if bucket_size_mb is None else int(bucket_size_mb * 2**20),
            timeout=timeout,
            record_timeline=record_timeline,
            hang_report_after=hang_report_after,
            exact_dropout=exact_dropout,
            activation_checkpointing=activation_checkpointing,  # type: ignore[arg-type]
            record=record,
            master_weights=master_weights,
            float32_gradients=float32_gradients,
            offload_optimizer=offload_optimizer,
        )
        check_effect(self.layout, self._settings)
        self._init_lifecycle()

    def __repr__(self) -> str:
        other = "pytorch_lightning" if self.package == "lightning.pytorch" else "lightning.pytorch"
        where = "lightning_3d" if other == "lightning.pytorch" else "lightning_3d.pytorch_lightning"
        return (
            f"ThreeDStrategy({self.layout}) for `{self.package}` (for a Trainer of `{other}` use "
            f"{where}.ThreeDStrategy)"
        )

    # -- what users read
    @property
    def data_parallel_size(self) -> int:
        """Number of replicas: scale learning rates and count samples with it, not with the world size."""
        return self.layout.dp

    @property
    def data_parallel_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.mesh.at.dp

    @property
    def ledger(self) -> Ledger:
        """Every collective of the run, counted."""
        return self.mesh.ledger

    @property
    def recorder(self) -> Any:
        """The recorded pipeline actions, or None (`record_timeline=True`)."""
        return self.engine.recorder

    def explain(self) -> str:
        """The mesh, what became of every matrix and which module went to which stage, as text."""
        from lightning_3d.explain import describe

        return describe(self.engine)

    def memory_report(self) -> dict[str, int]:
        """Bytes on this rank: parameters, gradients, optimizer."""
        return memory_report(self.engine, self.optimizers)

    def gradient_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """Norm of the whole mesh's gradient of an optimizer (None: the first); collective over all ranks."""
        return gradient_norm(self.engine, unwrapped(optimizer or self.optimizers[0]), norm_type)

    def whole_state_dict(self) -> dict[str, Any]:
        """The module's `state_dict` as one device would have it, on the CPU of global rank zero (empty elsewhere).

        Parameters of less precision that are stepped as float32 copies (`master_weights`) are float32 here.

        Collective over all ranks; one tensor at a time is assembled on every rank.
        """
        from lightning_3d.checkpoint import whole_checkpoint

        whole: dict[str, Any] = whole_checkpoint({"state_dict": self.lightning_module_state_dict()}, self.mesh.world)
        return whole["state_dict"]

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """With zero_stage=3: the parameters have their values here, outside of steps too, on all ranks.

        What is changed in them is kept; it must be changed on all ranks alike. Collective: an all-gather of the
        parameters over dp. Without ZeRO-3 nothing happens: replicas have their parameters.
        """
        units = self._engine.units if self._engine is not None else None
        with units.all_whole() if units is not None else nullcontext():
            yield

    # -- mesh and processes
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = self.launcher_class(self, start_method=self._start_method)

    def set_world_ranks(self) -> None:
        """Called while the Trainer is made: the earliest place where the number of processes is known."""
        super().set_world_ranks()
        world = self.num_nodes * self.num_processes
        if self._data_parallel_size == "auto":
            self.layout = self.layout.with_world_size(world)
        self.layout.check_world_size(world)
        if self.num_nodes > 1 and self.num_processes % self.layout.tp and not self._allow_cross_node:
            raise LayoutError(
                f"tensor_parallel_size={self.layout.tp} does not fit into machines of {self.num_processes} devices: "
                "its all-reduces (several per layer) would cross the network, which is 10 to 30 times slower than the "
                "links inside a machine. Use a divisor of the devices per machine and more pipeline stages, or set "
                "allow_cross_node_tensor_parallel=True."
            )

    def setup_environment(self) -> None:
        # Lightning seeds again here so that ranks agree; ours agree later, and one process would not have drawn this
        with random_state_kept(_collect_rng_states, _set_rng_states):
            super().setup_environment()
        if self._mesh is None:
            self._mesh = Mesh(self.layout, self.root_device, self._settings.timeout)
        if self._watch is None:  # after a teardown, too
            self._watch_failures()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh.device_mesh
        self._follow_replicas_in_sampling()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.dp, "rank": self._mesh.at.dp if self._mesh is not None else 0}

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel axis (all ranks of a replica hold the same value), or over `group`.

        Returns a new tensor; the argument is left alone. The mean of integers is exact (float64).
        """
        if not isinstance(tensor, Tensor) or self._mesh is None:
            return tensor
        self._before_collective()
        axis = self._mesh.data if group is None else ProcessCommunicator("user", group, self.root_device)
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower().rpartition(".")[2]
        value = tensor.detach().clone()
        if name in ("mean", "avg"):
            value = value if value.is_floating_point() else value.double()
            return axis.all_reduce(value) / axis.size
        if name not in ("sum", "max", "min"):
            raise ConfigurationError(f"cannot reduce by {reduce_op!r}; use 'mean', 'sum', 'max' or 'min'.")
        return axis.all_reduce(value, name)  # type: ignore[arg-type]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One decision over all ranks."""
        if self._mesh is None:
            return decision
        self._before_collective()
        flag = torch.tensor([int(decision)], device=self.root_device)
        return bool(self._mesh.world.all_reduce(flag, "min" if all else "max").item())

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._before_collective()
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._before_collective()
        return super().broadcast(obj, src)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self._before_collective()
        return super().all_gather(*args, **kwargs)

    def _before_collective(self) -> None:
        """With ZeRO-3 nobody may wait here for a replica that waits for this one's part in a gather."""
        if self._engine is not None and self._engine.units is not None:
            self._engine.units.before_collective()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The batches inside accumulate: nothing is reduced over the replicas."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register "3d"; Lightning calls it only for its own classes, `import lightning_3d` for this one."""
        if "3d" not in strategy_registry.available_strategies():
            strategy_registry.register("3d", cls, description="Tensor x pipeline x data parallelism with ZeRO")

    def teardown(self) -> None:
        """Release what the run held. Parameters stay where they are: moving them one by one would break the buckets."""
        self._stop_watching()
        self._is_set_up = False
        if self._engine is not None and self.lightning_module is not None:
            self._surroundings.end(self.lightning_module)
        for norm in self._norms:
            norm.remove()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


class ThreeDStrategy(ThreeDStrategyBase, DDPStrategy):
    """Tensor x pipeline x data parallelism for an unmodified LightningModule of `lightning.pytorch`.

    Example::

        trainer = Trainer(devices=8, strategy=ThreeDStrategy(tensor_parallel_size=2, pipeline_parallel_size=2))
        trainer.fit(MyLightningModule(), datamodule)
    """

    package = "lightning.pytorch"
