"""WHAT happens to a custom autograd.Function that gets a sharded tensor?

`Function.apply` bypasses torch-function overrides: it would see the wrapper, and the gradient would be lost silently.
`function_guard` is a handler for `probe.intercept_functions`; it must be active while a rewritten model runs.

A Function may run on the shard if it acts on each element alone. Two things must say so: the operations it runs,
forward and backward, are such that no element can reach another (a norm, a maximum or a value read ends it, whatever it
is used for); and it commutes with picking elements, on values of many magnitudes, which also tries what is no operation
of torch (a kernel). One whose code reads sizes is tried on the very shapes it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.probe.intercept import original_apply
from lightning_3d.probe.reach import mentions
from lightning_3d.tensor.operands import derive
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import OWN_RULES, Args, Kwargs, words
from lightning_3d.tensor.sharded import ShardedTensor, fall_back, is_sharded

_verdicts: dict[Any, bool] = {}
_SCALES = ((1.0, 1.0), (1e-6, 1.0), (1e6, 1.0), (1.0, 1e-6), (1.0, 1e6), (30.0, 30.0))
"""Magnitudes of the values and of the gradients to try."""
_LARGEST = 2**22
"""Elements of the largest tensor a Function that reads sizes is tried on."""
_SIZES = frozenset(words("numel nelement size shape dim ndim ndimension len nbytes stride __len__ itemsize"))
_APART = frozenset(
    words(
        """
        clone detach alias _to_copy empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full
        empty empty_strided zeros ones full scalar_tensor lift_fresh copy copy_ fill fill_ zero_ _unsafe_view
        _reshape_alias new_empty_strided contiguous
        """
    )
)
"""Operations that copy, or make something of no element at all."""


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
        if isinstance(x, ShardedTensor) and alone and is_pointwise(function, args[1:], x.local.device, _cut_of(x)):
            return derive(proceed(x.local, *args[1:]), x.placement, x)
        raise NoRule("a custom autograd.Function that is not proved to act on each element alone")
    except NoRule as reason:
        return fall_back(proceed, args, kwargs, reason, lambda a, k: function_guard(proceed, function, a, k))


Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""A global shape, and the shape of a shard."""


def _cut_of(x: ShardedTensor) -> Cut:
    return tuple(x.shape), tuple(x.local.shape)


def is_pointwise(function: type, rest: Args, device: torch.device | None = None, cut: Cut | None = None) -> bool:
    """Whether a Function of one tensor acts on each element alone, found by experiment.

    It does iff f(permuted, sliced x) = permuted, sliced f(x), for values and for gradients, and no operation mixes
    elements. Tried on random data on `device` (a kernel may not exist elsewhere) with the other arguments as given; the
    verdict is remembered.

    Args:
        function: The Function.
        rest: Its arguments after the first.
        device: Where to try.
        cut: The shapes it gets, for a Function that reads sizes.
    """
    device = torch.device("cpu") if device is None or device.type == "meta" else device
    cut = cut if _reads_sizes(function) else None
    key: Any = (function, rest, device.type, cut)
    try:
        hash(key)
    except TypeError:
        return _experiment(function, rest, device, cut)
    if key not in _verdicts:
        _verdicts[key] = _experiment(function, rest, device, cut)
    return _verdicts[key]


def _reads_sizes(function: Any) -> bool:
    """Its code, or that of functions it names, asks for numbers of elements."""
    return mentions((function.forward, function.backward, getattr(function, "setup_context", None)), _SIZES)


def _experiment(function: type, rest: Args, device: torch.device, cut: Cut | None) -> bool:
    quiet = torch._C.DisableTorchFunction()  # no mode may record these operations
    devices = [] if device.type == "cpu" else [device]
    if cut is not None and math.prod(cut[0]) > _LARGEST:
        return False
    with unset_fake_temporarily(), torch.random.fork_rng(devices), torch.enable_grad(), quiet:
        for dtype in (torch.float64, torch.float32):
            try:
                if not _commutes_with_picking(function, rest, device, dtype):
                    return False
                return cut is None or _commutes_with_cutting(function, rest, device, dtype, cut)
            except _Mixes:
                return False
            except Exception:  # it may not exist in this precision, or need something else than such a tensor
                continue
    return False


def _commutes_with_picking(function: type, rest: Args, device: torch.device, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(6, 10, dtype=dtype, generator=generator).to(device) for _ in range(2))
    rows, columns = torch.randperm(6, generator=generator), torch.randperm(10, generator=generator)
    enough = False
    for scale, slope in _SCALES:
        tried, along = x * scale, weight * slope
        y, dx = _value_and_gradient(function, tried, rest, along)
        if y.shape != x.shape:
            return False
        # a square root is not a number for half of them; what is left must be evidence enough
        enough = enough or bool((y.isfinite() & dx.isfinite()).sum() >= x.numel() // 3)
        for i, j in ((rows[:3], columns[:4]), (rows[3:4], columns[:7]), (rows, columns[9:])):
            i, j = i.to(device), j.to(device)
            part, dpart = _value_and_gradient(function, tried[i][:, j], rest, along[i][:, j])
            if not (_alike(part, y[i][:, j]) and _alike(dpart, dx[i][:, j])):
                return False
    return enough


def _commutes_with_cutting(function: type, rest: Args, device: torch.device, dtype: torch.dtype, cut: Cut) -> bool:
    """On the shapes it gets: the whole, and a shard of it."""
    generator = torch.Generator().manual_seed(0)
    whole_shape, shard_shape = cut
    x, weight = (torch.randn(whole_shape, dtype=dtype, generator=generator).to(device) for _ in range(2))
    index = tuple(slice(min(n, m)) for n, m in zip(whole_shape, shard_shape, strict=True))
    for scale, slope in _SCALES:
        y, dx = _value_and_gradient(function, x * scale, rest, weight * slope)
        part, dpart = _value_and_gradient(function, x[index] * scale, rest, weight[index] * slope)
        if not (_alike(part, y[index]) and _alike(dpart, dx[index])):
            return False
    return True


def _alike(got: Tensor, want: Tensor) -> bool:
    """Equal up to rounding, whatever the magnitude."""
    finite = want[want.isfinite()].abs()
    rounding = 100 * torch.finfo(want.dtype).eps * float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(got, want, rtol=1e-5, atol=rounding, equal_nan=True)


def _value_and_gradient(function: type, x: Tensor, rest: Args, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    with _Watched():
        y = original_apply(function, x, *rest)
        (gradient,) = torch.autograd.grad(y, x, weight)
    return y.detach(), gradient


class _Mixes(Exception):
    """An operation that lets elements reach each other."""


class _Watched(TorchDispatchMode):
    """Only operations on each element alone, and views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not _keeps_elements_apart(func):
            raise _Mixes(str(func))
        return func(*args, **(kwargs or {}))


def _keeps_elements_apart(func: Any) -> bool:
    name = func.overloadpacket.__name__
    if torch.Tag.pointwise in func.tags or name in _APART or func.is_view:
        return True
    plain = getattr(torch.ops.aten, name.rstrip("_"), None)  # in place
    return plain is not None and any(torch.Tag.pointwise in getattr(plain, o).tags for o in plain.overloads())
