"""HOW do we get a model to experiment with?  A float64 copy of a user's module, whatever hangs on it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_3d.errors import TensorPlanError

_SHARED = ("_trainer", "_fabric")  # references out of the model: never copied
_WIDE = {torch.complex64: torch.complex128}


def exact_copy(module: nn.Module) -> nn.Module:
    """A copy in float64: ties kept, references to a trainer shared, attributes that cannot be copied shared.

    Raises:
        TensorPlanError: A buffer is on the meta device, so it has no values to copy.
    """
    memo: dict[int, Any] = {}
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise TensorPlanError(
                f"buffer {name} is on the meta device and has no values. Materialise the model before it is proved, or "
                "switch the proof off."
            )
        memo[id(buffer)] = _widened(buffer)
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(_widened(parameter), requires_grad=parameter.requires_grad)
    shells = {}
    for metric in [m for m in module.modules() if isinstance(m, Metric)]:
        # a metric's methods are bound to it when it is made; its own copy binds them anew. It must not talk to others.
        memo[id(metric)] = alone = copy.deepcopy(metric)
        alone.distributed_available_fn = _ignore
        memo.update({id(part): part for part in metric.modules() if part is not metric})
    for child in module.modules():
        if id(child) in memo:
            continue
        shells[id(child)] = memo[id(child)] = object.__new__(type(child))
    for child in module.modules():
        if id(child) in shells:
            _fill(shells[id(child)], child, memo)
    root: nn.Module = shells[id(module)]
    silence_logging(root)
    return root


def silence_logging(module: nn.Module) -> None:
    """Let `self.log` of a LightningModule do nothing, so that an experiment needs no trainer and leaves no trace.

    `clip_gradients` (manual optimization) neither: it would look for gradients in the module of the real run.
    """
    for child in module.modules():
        if hasattr(child, "_trainer"):
            child.__dict__.update(log=_ignore, log_dict=_ignore, clip_gradients=_ignore)


@contextmanager
def optimization_untouched(module: nn.Module) -> Iterator[None]:
    """Put back what a step with manual optimization changes in an experiment, whether it comes to its end or not.

    It freezes parameters (`toggle_optimizer`), sets their gradients, steps schedulers and writes into the optimizers'
    groups; steps of the optimizers themselves are the strategy's to refuse.
    """
    trainer = module.__dict__.get("_trainer")
    optimizers = getattr(trainer, "optimizers", ())
    schedulers = [config.scheduler for config in getattr(trainer, "lr_scheduler_configs", ())]
    trained = [(p, p.requires_grad, p.grad) for p in module.parameters()]
    groups = [(g, {k: v for k, v in g.items() if k != "params"}) for o in optimizers for g in o.param_groups]
    before = [
        (s, {k: copy.copy(v) if isinstance(v, (list, dict)) else v for k, v in vars(s).items()}) for s in schedulers
    ]
    try:
        yield
    finally:
        for parameter, requires, gradient in trained:
            parameter.requires_grad_(requires)
            parameter.grad = gradient
        for group, values in groups:
            group.update(values)
        for scheduler, state in before:
            vars(scheduler).clear()
            vars(scheduler).update(state)


def _ignore(*_: Any, **__: Any) -> None:
    return None


def _widened(tensor: Tensor) -> Tensor:
    dtype = torch.float64 if tensor.is_floating_point() else _WIDE.get(tensor.dtype, tensor.dtype)
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=dtype)
    return tensor.detach().to(dtype, copy=True)


def _fill(shell: nn.Module, original: nn.Module, memo: dict[int, Any]) -> None:
    for key, value in original.__dict__.items():
        if key in _SHARED:
            shell.__dict__[key] = value
            continue
        try:
            shell.__dict__[key] = copy.deepcopy(value, memo)
        except Exception:  # a lock, a file, a process group: the experiment can use the original
            shell.__dict__[key] = value


def redraw(module: nn.Module, seed: int) -> None:
    """New values for all parameters, so that nothing hides: no zero bias, no all-ones norm, no tiny logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
            if parameter.ndim >= 2:
                parameter.copy_(noise * min(0.1, parameter.shape[-1] ** -0.5))
            elif parameter.is_floating_point():
                parameter.add_(0.1 * noise)
