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

from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.arguments import CheckedArguments, check_effect, check_loss_weighting
from lightning_3d.asked import Asked
from lightning_3d.comm import Ledger
from lightning_3d.exchange import Exchange
from lightning_3d.gradients import gradient_norm
from lightning_3d.launch import WholeWeightsLauncher
from lightning_3d.memory import memory_report
from lightning_3d.recompute import check_choice
from lightning_3d.saving import unwrapped
from lightning_3d.settings import Settings
from lightning_3d.values import check_flags, check_processes, check_values

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class ThreeDStrategyBase(Exchange, _Base, metaclass=CheckedArguments):
    """What both strategies share; see `lightning_3d.ThreeDStrategy`."""

    package = ""
    """The Lightning package the class belongs to."""
    launcher_class: Any = WholeWeightsLauncher
    """Starts the processes of a machine with `start_method="fork"` or `"spawn"`."""

    def __init__(
        self,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        data_parallel_size: int | Literal["auto"] = "auto",
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        zero_stage: int | None = None,
        master_weights: bool | None = None,
        float32_gradients: bool = False,
        offload_optimizer: bool = False,
        num_microbatches: int | Literal["auto"] = "auto",
        pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"] | str | None = None,
        virtual_pipeline_size: int | None = None,
        virtual_pipeline_order: Literal["looped", "contiguous"] = "looped",
        sequence_parallel: bool | None = None,
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
        layout: Literal["auto"] | str | None = None,
    ) -> None:
        """See the class for the arguments.

        Args:
            tensor_parallel_size: Ranks that share every large matrix; they should be on one machine. Default: 1.
            pipeline_parallel_size: Consecutive parts the model is cut into. Default: 1.
            data_parallel_size: Replicas; "auto" is world / (tensor x pipeline x context).
            context_parallel_size: Ranks that share one sequence (not in this version).
            expert_parallel_size: Ranks that share the experts (not in this version).
            zero_stage: 0: replicas hold everything; 1 (the default): they share the optimizer state; 2: and the
                gradients, which are reduced after every backward; 3: and the parameters, which are gathered for their
                use.
            master_weights: Where parameters are bfloat16 or float16 (`precision="bf16-true"`), optimizers step on
                float32 copies of them, so that small updates are not lost. (12 bytes per parameter with Adam, shared by
                the replicas from zero_stage=1 on, against 4.) Checkpoints hold the copies. Default: True there; with
                other parameters there is nothing to choose.
            float32_gradients: Gradients of such parameters are added up (over accumulated batches and microbatches) and
                reduced over the replicas in float32; otherwise in the parameters' precision.
            offload_optimizer: The optimizers' state and what they step on (this rank's part) are in the host's memory,
                and they step there, on the CPU: the device keeps parameters and gradients. A step becomes slower;
                optimizers with fused=True are fastest there.
            num_microbatches: Slices of a batch that follow each other through the pipeline; "auto" is
                min(batch, 4 x pipeline_parallel_size), or what a schedule's file is made for. Needs
                pipeline_parallel_size > 1.
            pipeline_schedule: Order of forwards and backwards. "1f1b" (the default) keeps at most
                `pipeline_parallel_size` microbatches alive on a stage, "gpipe" all of them; "interleaved_1f1b" gives
                every rank several parts of the model; "zb_h1" and "zb_v" fill idle time with the gradients of weights.
                Or the path of a file with one's own lists of actions. docs/schedules.md compares them.
            virtual_pipeline_size: Parts of the model per pipeline rank, for "interleaved_1f1b" ("zb_v" always has 2).
                Default: 1.
            virtual_pipeline_order: How these parts are dealt: "looped" (1 2 1 2, smaller bubble) or "contiguous"
                (1 1 2 2).
            sequence_parallel: Also cut norms, dropout and residuals along the sequence between tensor-parallel layers.
                Default: False.
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
            layout: "auto": what is not given here is chosen in set-up, for the most samples per second, from the
                model, the batch its loader gives (that of one replica), the devices and their measured speed;
                `chosen` and `freeze(file)` tell what it came to. Or the sizes as one text, "tp2-pp2-zero1-1f1b".

        Raises:
            ConfigurationError: Arguments that are unknown, impossible, not built yet, or without effect.
        """
        check_flags(
            sequence_parallel=sequence_parallel is not None and sequence_parallel,
            exact_dropout=exact_dropout,
            save_distributed_checkpoint=save_distributed_checkpoint,
            allow_cross_node_tensor_parallel=allow_cross_node_tensor_parallel,
            record_timeline=record_timeline,
            record=record,
            master_weights=master_weights is None or master_weights,
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
        self._asked = Asked.read(
            layout,
            {
                "tp": tensor_parallel_size,
                "pp": pipeline_parallel_size,
                "dp": None if data_parallel_size == "auto" else data_parallel_size,
                "cp": None if context_parallel_size == 1 else context_parallel_size,
                "ep": None if expert_parallel_size == 1 else expert_parallel_size,
                "zero": zero_stage,
                "schedule": pipeline_schedule,
                "virtual": virtual_pipeline_size,
                "order": None if virtual_pipeline_order == "looped" else virtual_pipeline_order,
            },
        )
        self._layout = self._asked.layout
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
        check_values(self._settings)
        if self._layout is None:
            check_choice(self._settings.activation_checkpointing)
        else:
            check_effect(self._layout, self._settings)
        self._init_lifecycle()

    def __repr__(self) -> str:
        other = "pytorch_lightning" if self.package == "lightning.pytorch" else "lightning.pytorch"
        where = "lightning_3d" if other == "lightning.pytorch" else "lightning_3d.pytorch_lightning"
        return (
            f"ThreeDStrategy({self._layout or 'layout=auto'}) for `{self.package}` (for a Trainer of `{other}` use "
            f"{where}.ThreeDStrategy)"
        )

    # -- what users read
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

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register "3d" and "3d_auto"; Lightning calls it only for its own classes, `import lightning_3d` for this."""
        if "3d" not in strategy_registry.available_strategies():
            what = "Tensor x pipeline x data parallelism with ZeRO"
            strategy_registry.register("3d", cls, description=what)
            strategy_registry.register("3d_auto", cls, description=f"{what}, sizes chosen in set-up", layout="auto")

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
