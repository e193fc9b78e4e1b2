"""Modules whose hooks read and change gradients, for `test_hooks.py`."""

from __future__ import annotations

import contextlib
import os
import types
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy.fits import replica_difference


def halved_after_backward(self: Any) -> None:
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def scaled_before_step(self: Any, optimizer: Any) -> None:
    halved_after_backward(self)


def replaced_before_step(self: Any, optimizer: Any) -> None:
    """New tensors in place of gradients, and none at all for the biases."""
    for name, parameter in self.named_parameters():
        if name.endswith("bias"):
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad = parameter.grad * 0.3


def clipped_by_torch(self: Any, optimizer: Any) -> None:
    clip_grad_norm_(self.parameters(), 0.05)


def clipped_in_two_calls(self: Any, optimizer: Any) -> None:
    """What clip_grad_norm_ is made of, as code does that logs the norm."""
    held = [p for p in self.parameters() if p.grad is not None]
    clip_grads_with_norm_(held, 0.05, get_total_norm([p.grad for p in held]))


def scaled_by_norms(self: Any, optimizer: Any) -> None:
    """With every parameter's norm and that of all, which must be those of whole gradients."""
    norms = grad_norm(self, 2)
    for n, p in self.named_parameters():
        if p.grad is not None:
            p.grad.mul_(0.1 / (norms[f"grad_2.0_norm/{n}"] + norms["grad_2.0_norm_total"]))
    part = grad_norm(self.net[-1], "inf")
    assert set(part) == {"grad_inf_norm/weight", "grad_inf_norm/bias", "grad_inf_norm_total"}


def clipped_as_the_optimizer_sees_them(self: Any, optimizer: Any) -> None:
    clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05)


def clipping_overridden(
    self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
) -> None:
    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


def by_hand(self: Any, batch: Any, batch_idx: int) -> Any:
    """Two optimizers stepped in training_step, as GANs do."""
    ends, middle = self.optimizers()
    self.toggle_optimizer(middle)
    self.manual_backward(self.loss(batch))
    clip_grad_norm_(middle.param_groups[0]["params"], 0.05)
    middle.step()
    self.zero_grad()
    self.untoggle_optimizer(middle)
    loss = self.loss(batch) * 2
    self.toggle_optimizer(ends)
    self.manual_backward(loss)
    halved_after_backward(self)
    self.clip_gradients(ends, 0.1, "norm")
    ends.step()
    ends.zero_grad()
    self.untoggle_optimizer(ends)
    return loss


def two_backwards(self: Any, batch: Any, batch_idx: int) -> Any:
    """Two forwards before two backwards; the second graph twice."""
    optimizer = self.optimizers()
    optimizer.zero_grad()
    first, second = self.loss(batch), self.loss({**batch, "x": batch["x"] * 0.5})
    self.manual_backward(first)
    self.manual_backward(second, retain_graph=True)
    self.manual_backward(second * 0.3)
    total = grad_norm(self, 2)["grad_2.0_norm_total"]
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1.0 / (1.0 + total))
    optimizer.step()


def reads_all(self: Any, loss: Any) -> None:
    """In the middle of a step; and once more inside."""
    whole = getattr(self.trainer.strategy, "whole_parameters", contextlib.nullcontext)
    with whole(), torch.no_grad():
        with whole():
            pass
        held = [p for p in self.parameters() if not getattr(p, "is_absent", False)]
        assert all(bool(p.isfinite().all()) for p in held)


def doubled(self: Any, loss: Any) -> None:
    (2 * loss).backward()


def weights_seen(self: Any, batch: Any, batch_idx: int) -> None:
    """Outside of a step, where parameters are parts."""
    whole = getattr(self.trainer.strategy, "whole_parameters", contextlib.nullcontext)
    with whole():
        self.scale = 10.0 / float(get_total_norm(self.parameters()))


def scaled_by_weights(self: Any, batch: Any, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    scale = 10.0 / get_total_norm(self.parameters())
    self.manual_backward(self.loss(batch) * getattr(self, "scale", 1.0) * scale)
    optimizer.step()


def two_optimizers(self: Any) -> Any:
    middle = list(self.backbone.parameters())
    ends = [p for p in self.parameters() if not any(p is m for m in middle)]
    return torch.optim.AdamW(ends, 0.01), torch.optim.SGD(middle, 0.1, momentum=0.9)


def trainable_only(self: Any) -> Any:
    return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1, momentum=0.9)


CASES: dict[str, tuple[dict[str, Callable[..., Any]], dict[str, Any]]] = {
    "halved after backward": ({"on_after_backward": halved_after_backward}, {}),
    "halved while accumulating": ({"on_after_backward": halved_after_backward}, {"accumulate_grad_batches": 2}),
    "scaled before the step": ({"on_before_optimizer_step": scaled_before_step}, {"gradient_clip_val": 0.05}),
    "replaced, then clipped by value": (
        {"on_before_optimizer_step": replaced_before_step},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    ),
    "replaced, then clipped by norm": ({"on_before_optimizer_step": replaced_before_step}, {"gradient_clip_val": 0.05}),
    "torch's clip_grad_norm_": ({"on_before_optimizer_step": clipped_by_torch}, {}),
    "torch's get_total_norm": ({"on_before_optimizer_step": clipped_in_two_calls}, {}),
    "Lightning's grad_norm": ({"on_before_optimizer_step": scaled_by_norms}, {}),
    "the same on the optimizer's": ({"on_before_optimizer_step": clipped_as_the_optimizer_sees_them}, {}),
    "parameters read before the backward": ({"on_before_backward": reads_all}, {}),
    "loss doubled while accumulating": ({"backward": doubled}, {"accumulate_grad_batches": 2}),
    "configure_gradient_clipping": ({"configure_gradient_clipping": clipping_overridden}, {}),
}
MANUAL: dict[str, tuple[dict[str, Callable[..., Any]], dict[str, Any]]] = {
    "manual": ({"training_step": by_hand, "configure_optimizers": two_optimizers}, {}),
    "two backwards": ({"training_step": two_backwards}, {}),
    "norm of weights": ({"training_step": scaled_by_weights, "on_train_batch_start": weights_seen}, {}),
}
FINETUNING: dict[str, tuple[dict[str, Callable[..., Any]], dict[str, Any]]] = {
    "finetuning": ({"configure_optimizers": trainable_only}, {"max_epochs": 3}),
}
ALL = CASES | MANUAL | FINETUNING


def parameters_after(names: list[str], sizes: dict[str, Any] | None) -> list[tuple[dict[str, Any], float]]:
    """Every case trained on this layout (None: one process); the whole parameters, and how far copies are apart."""
    out = []
    for name in names:
        methods, options = ALL[name]
        module = models.build("mlp")
        kind = type(module)
        backbone = property(lambda self: self.net[1:-1])
        module.__class__ = type(f"Hooked{kind.__name__}", (kind,), {"backbone": backbone, **methods})
        module.automatic_optimization = name not in MANUAL
        callbacks = []
        if name in FINETUNING:
            callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)]
        strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(**{
            "accelerator": "cpu", "devices": 1 if sizes is None else int(os.environ["WORLD_SIZE"]), "logger": False,
            "precision": "64-true", "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1,
            "enable_model_summary": False, "strategy": strategy, "use_distributed_sampler": False,
            "callbacks": callbacks, **options,
        })  # fmt: skip
        data = types.SimpleNamespace(replica=0, replicas=1)
        if isinstance(strategy, ThreeDStrategy):
            data.replicas = int(os.environ["WORLD_SIZE"]) // strategy.layout.replica_size
            data.replica = int(os.environ["RANK"]) // strategy.layout.replica_size
        trainer.fit(module, models.loader("mlp", 32, 8, data.replica, data.replicas))
        parallel = isinstance(strategy, ThreeDStrategy)
        if parallel and strategy.layout.tp > 1:
            assert strategy.engine.tensor_plan.sharded_fraction > 0.5
        whole = full_parameters(strategy) if parallel else dict(module.named_parameters())
        apart = replica_difference(strategy) if parallel else 0.0
        out.append(({n: p.detach().clone() for n, p in whole.items()}, apart))
    return out
