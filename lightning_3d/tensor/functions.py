"""WHAT happens to a custom autograd.Function that gets a sharded tensor?

`Function.apply` bypasses torch-function overrides: it would see the wrapper, and the gradient would be lost silently.
`function_guard` is a handler for `probe.intercept_functions`; it must be active while a rewritten model runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_3d.probe.intercept import original_apply
from lightning_3d.tensor.operands import derive
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import OWN_RULES, Args, Kwargs
from lightning_3d.tensor.sharded import ShardedTensor, fall_back, is_sharded

_verdicts: dict[Any, bool] = {}


def function_guard(proceed: Callable[..., Any], function: type, args: Args, kwargs: Kwargs) -> Any:
    """Run a Function on the shard if it is proved pointwise (or has a rule); otherwise gather its operands."""
    if not any(is_sharded(a) for a in (*args, *kwargs.values())):
        return proceed(*args, **kwargs)
    proceed.__name__ = function.__name__
    try:
        if function in OWN_RULES:
            return OWN_RULES[function](proceed, args, kwargs)
        x = args[0] if args else None
        alone = not kwargs and not any(isinstance(a, Tensor) for a in args[1:])
        if isinstance(x, ShardedTensor) and alone and is_pointwise(function, args[1:], x.local.device):
            return derive(proceed(x.local, *args[1:]), x.placement, x)
        raise NoRule("a custom autograd.Function that is not proved to act on each element alone")
    except NoRule as reason:
        return fall_back(proceed, args, kwargs, reason)


def is_pointwise(function: type, rest: Args, device: torch.device | None = None) -> bool:
    """Whether a Function of one tensor acts on each element alone, found by experiment.

    It does iff f(permuted, sliced x) = permuted, sliced f(x), for values and for gradients. Tried on random data on
    `device` (a kernel may not exist elsewhere) with the other arguments as given; the verdict is remembered.
    """
    device = torch.device("cpu") if device is None or device.type == "meta" else device
    key: Any = (function, rest, device.type)
    try:
        hash(key)
    except TypeError:
        return _experiment(function, rest, device)
    if key not in _verdicts:
        _verdicts[key] = _experiment(function, rest, device)
    return _verdicts[key]


def _experiment(function: type, rest: Args, device: torch.device) -> bool:
    quiet = torch._C.DisableTorchFunction()  # no mode may record these operations
    devices = [] if device.type == "cpu" else [device]
    with unset_fake_temporarily(), torch.random.fork_rng(devices), torch.enable_grad(), quiet:
        for dtype in (torch.float64, torch.float32):
            try:
                return _commutes_with_picking(function, rest, device, dtype)
            except Exception:  # it may not exist in this precision, or need something else than such a tensor
                continue
    return False


def _commutes_with_picking(function: type, rest: Args, device: torch.device, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(6, 10, dtype=dtype, generator=generator).to(device) for _ in range(2))
    rows, columns = torch.randperm(6, generator=generator), torch.randperm(10, generator=generator)
    y, dx = _value_and_gradient(function, x, rest, weight)
    # a square root is not a number for half of them; what is left must be evidence enough
    if y.shape != x.shape or (y.isfinite() & dx.isfinite()).sum() < x.numel() // 3:
        return False
    for i, j in ((rows[:3], columns[:4]), (rows[3:4], columns[:7]), (rows, columns[9:])):
        i, j = i.to(device), j.to(device)
        part, dpart = _value_and_gradient(function, x[i][:, j], rest, weight[i][:, j])
        alike = torch.allclose(part, y[i][:, j], equal_nan=True)
        if not (alike and torch.allclose(dpart, dx[i][:, j], equal_nan=True)):
            return False
    return True


def _value_and_gradient(function: type, x: Tensor, rest: Args, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = original_apply(function, x, *rest)
    (gradient,) = torch.autograd.grad((y * weight).sum(), x)
    return y.detach(), gradient
