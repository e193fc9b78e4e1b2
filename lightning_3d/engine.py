"""WHAT does a rank run for this module?  Steps through what was constructed, with ZeRO around them; and its state.

Last in the order of set-up (construction.py), ZeRO re-points the optimizers' groups.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_3d.checkpoint import ParameterRecord, RunState
from lightning_3d.construction import Construction
from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline import StepResult
from lightning_3d.pipeline.rng import forked, mix, seed_torch
from lightning_3d.pipeline.schedule import Action
from lightning_3d.probe import call_step, intercept_functions
from lightning_3d.recompute import find_blocks
from lightning_3d.tensor import (
    ShardedTensor,
    cut_optimizer_state,
    function_guard,
    whole,
)
from lightning_3d.zero import Share, Units, Zero, find_units, is_low

_log = logging.getLogger(__name__)


class Engine(Construction):
    """Everything made for one LightningModule on this rank; see `Construction`."""

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
        if not any(map(is_low, self.parameters.values())):
            self._check_precision_arguments()
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
            cut={n: cut for n in self.parameters if (cut := self.placement(n)) is not None},
            tensor=self.mesh.tensor,
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
            master_weights=self.settings.masters,
            float32_gradients=self.settings.float32_gradients,
            offload=self.settings.offload_optimizer,
            bucket_bytes=self._bucket_bytes,
        )

    def _check_precision_arguments(self) -> None:
        """Refuse what is for parameters of low precision, where there are none."""
        if self.settings.float32_gradients:
            raise ConfigurationError(
                "float32_gradients=True has no effect: no parameter has less than float32 precision, so gradients are "
                "added up and reduced in the parameters' own. It is for precision='bf16-true' or '16-true'; remove it."
            )
        if self.settings.master_weights is not None:
            raise ConfigurationError(
                f"master_weights={self.settings.master_weights} has no effect: no parameter has less than float32 "
                "precision, so optimizers step on the parameters themselves. It is for precision='bf16-true' or "
                "'16-true' (where it is True unless you say otherwise); remove it."
            )

    @property
    def _bucket_bytes(self) -> int:
        return self.settings.bucket_bytes or (4 << 20 if self.mesh.device.type == "cpu" else 25 << 20)

    def _units(self) -> Units:
        """In a pipeline all parameters of the stage are gathered once for all microbatches of a batch."""
        names: dict[str, list[str]] = {}
        if self.runner is None:
            names = find_units(self.module, find_blocks(self.module), self._bucket_bytes)
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
    def _recorded(self, number: int) -> Iterator[None]:
        if self.recorder is not None:
            self.recorder.begin_step(number)
        yield
        if self.recorder is not None:
            self.recorder.end_step()

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


def _whole(value: Any) -> Any:
    return whole(value) if isinstance(value, ShardedTensor) else value


def _local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Also of what only other stages hold, so that all ranks refuse alike."""
    return tuple(getattr(parameter, "local_shape", parameter.shape))
