"""WHAT happens between `setup` and `teardown`?  The part of the strategy that runs steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_3d.data import (
    check_equal_batches,
    check_equal_evaluation,
    check_same_batch,
    fit_loader_to_replicas,
    stand_in_for_empty,
)
from lightning_3d.norms import GlobalGradNorm, GlobalTorchNorm
from lightning_3d.observe.relay import LogCall, Relay
from lightning_3d.precision import loss_scale
from lightning_3d.probe import own_parameters
from lightning_3d.set_up import SetUp
from lightning_3d.skipping import SKIPPED, Skips, drop_gradients
from lightning_3d.suitability import ZERO_GRAD_HOOKS, is_overridden
from lightning_3d.surrogate import surrogate_loss
from lightning_3d.surroundings import Surroundings

if TYPE_CHECKING:
    from lightning_3d.pipeline import StepResult
_ALLOWS_EMPTY = "allow_zero_length_dataloader_with_multiple_devices"


class Lifecycle(SetUp):
    """Steps, logs and failures; `ThreeDStrategyBase` adds the arguments, the mesh and checkpoints."""

    def _init_lifecycle(self) -> None:
        self._accumulating = False
        self._planning = False
        self._init_processes()
        self._init_saving()
        self._checked: set[str] = set()
        self._relay: Relay | None = None
        self._norms: list[GlobalTorchNorm | GlobalGradNorm] = []
        self._skips: Skips | None = None
        self._surroundings = Surroundings()

    # -- data
    def process_dataloader(self, dataloader: object) -> object:
        mesh = self.mesh
        loader = fit_loader_to_replicas(
            dataloader, mesh.at.dp, mesh.layout.dp, mesh.layout.world_size, pl_worker_init_function
        )
        trainer: Any = self._module.trainer
        owners = (self._module, trainer.datamodule)
        if trainer.evaluating and any(getattr(o, _ALLOWS_EMPTY, False) for o in owners):
            loader = stand_in_for_empty(loader, mesh.control)
        return loader

    def on_train_start(self) -> None:
        trainer = self._module.trainer
        left = inf if trainer.max_steps < 0 else (trainer.max_steps - trainer.global_step)
        batches = left * trainer.accumulate_grad_batches
        check_equal_batches(trainer.num_training_batches, batches, self.mesh.control)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.mesh.layout.world_size > 1:  # the hooks that change what is trained have run
            self._check_optimizers()

    def on_train_end(self) -> None:
        if self.mesh.layout.world_size > 1:
            self._check_optimizers()

    def _check_first_batches(self, step_name: str, batch: Any) -> None:
        """The first batch of every kind of step is compared inside the replica."""
        if step_name not in self._checked and self.mesh.replica.size > 1:
            self._checked.add(step_name)
            check_same_batch(batch, self.mesh.replica, f"first batch of {step_name}")

    # -- evaluation
    def on_validation_start(self) -> None:
        trainer = self._module.trainer
        self._check_evaluation(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)
        self._share_statistics()

    def on_test_start(self) -> None:
        self._check_evaluation(self._module.trainer.num_test_batches)
        self._share_statistics()

    def on_predict_start(self) -> None:
        self._check_evaluation(self._module.trainer.num_predict_batches)

    def _check_evaluation(self, batches: Any) -> None:
        if self.engine.units is not None:
            check_equal_evaluation(batches if isinstance(batches, Sequence) else [batches], self.mesh.control)

    def _share_statistics(self) -> None:
        """Replica 0's running statistics everywhere: every replica has seen other samples. (DDP does so, too.)"""
        if self.mesh.layout.dp > 1:
            for norm in self._module.modules():
                if isinstance(norm, _BatchNorm) and norm.track_running_stats:
                    for buffer in norm.buffers():
                        self.mesh.data.broadcast(buffer, 0)

    # -- steps
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        args = (*args, *kwargs.values())
        self._check_first_batches("training_step", args[0])
        trainer: Any = self._module.trainer
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        if engine.runner is None:
            self._zero.begin()
            out = engine.direct_step("training_step", args, number)
            return SKIPPED if out is None and self._skips is not None else out
        if trainer.fit_loop._skip_backward:
            return self._shared(self._evaluate("training_step", args), training=True)[0]
        scale = loss_scale(self.precision_plugin, self.mesh.device) / trainer.accumulate_grad_batches
        batch_idx = args[1] if len(args) > 1 else 0
        last = not self._accumulating
        assert self._relay is not None
        with self._relay.step():
            watched = is_overridden(self._module, trainer.callbacks, ZERO_GRAD_HOOKS)
            result = engine.pipeline_train(args[0], batch_idx, scale, last, watched, number)
        if self._skips is not None and self._relay.is_leader:
            result.loss = self._skips.settle(result.loss, last, self.mesh.device)
        loss, outputs = self._shared(result, training=True)
        if loss is None:
            if last:
                drop_gradients(self._zero)
            return SKIPPED
        loss = surrogate_loss(loss, self._zero, scale, last)
        return {**outputs, "loss": loss} if isinstance(outputs, dict) else loss

    def _evaluation_step(self, step_name: str, args: Sequence[Any]) -> Any:
        engine = self.engine
        self._check_first_batches(step_name, args[0])
        if engine.runner is None:
            return engine.direct_step(step_name, args)
        result = self._evaluate(step_name, args)
        if step_name == "predict_step":  # no logging there
            assert self._relay is not None
            return self._relay.broadcast(result.outputs)
        return self._shared(result, training=False)[1]

    def _evaluate(self, step_name: str, args: Sequence[Any]) -> StepResult:
        assert self._relay is not None
        with self._relay.step(), torch.no_grad():
            return self.engine.pipeline_evaluate(step_name, args)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation_step", (*args, *kwargs.values()))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test_step", (*args, *kwargs.values()))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("predict_step", (*args, *kwargs.values()))

    def _shared(self, result: StepResult, training: bool) -> tuple[Tensor | None, Any]:
        """The last stage's loss and outputs on every rank; its logs replayed through the real `self.log`."""
        assert self._relay is not None
        calls = [LogCall(log.name, log.values, log.weights, log.kwargs) for log in result.logs]
        outputs = result.outputs
        if training:  # the loss travels by itself
            rest = {k: v for k, v in outputs.items() if k != "loss"} if isinstance(outputs, dict) else {}
            outputs = rest or None
        shared = self._relay.share(result.loss, calls, outputs, self._module)
        for name, value, options in shared.logs:
            self._module.log(name, value, **options)
        return shared.loss, shared.outputs

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._planning:  # manual optimization calls it while its step is being followed
            _leave_fake_gradients(self._module)
            return closure_loss
        engine = self.engine
        module, zero, precision = self._module, self._zero, self.precision_plugin
        direct = engine.runner is None
        zero.shown.hide()
        self.pre_backward(closure_loss)
        reduces = direct and (zero.reduces_always or not self._accumulating)
        if reduces:
            zero.start_reducing()
        with (
            engine.sharding_rules(training=True),
            engine.mesh.ledger.during("backward"),
            zero.gathering_backward(last=module.automatic_optimization),
        ):
            closure_loss = precision.pre_backward(closure_loss, module)
            precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        if reduces:
            zero.finish(final=not self._accumulating)
        if self._accumulating:
            zero.shown.show_local(zero.buckets)
        elif direct:
            zero.publish()
        closure_loss = precision.post_backward(closure_loss, module)  # runs on_after_backward
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any | None = None, **kwargs: Any) -> Any:
        if self._planning:  # nothing is stepped, but what the closure computes is part of the step
            return closure() if closure is not None else None
        return super().optimizer_step(optimizer, closure, model, **kwargs)


def _leave_fake_gradients(module: nn.Module) -> None:
    """What a step that scales or clips `p.grad` after its `manual_backward` finds while it is being followed."""
    with torch._C.DisableTorchFunction():  # the plan must not see these as uses of the parameters
        for parameter in own_parameters(module):
            if isinstance(parameter, FakeTensor) and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
