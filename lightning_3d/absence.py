"""WHAT stands in for data that is elsewhere, and which uses of it need none?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_VALUE_GETTERS = {"data", "T", "mT", "H", "mH", "real", "imag"}
_PASSIVE_METHODS = [
    "size",
    "dim",
    "stride",
    "numel",
    "nelement",
    "ndimension",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "get_device",
    "element_size",
    "storage_offset",
    "__len__",
    "is_signed",
    "__hash__",
    "register_hook",
    "retain_grad",
    "is_conj",
    "is_neg",
    "__dir__",
    "register_post_accumulate_grad_hook",
    "is_inference",
]
_PASSIVE: set[Any] = {getattr(Tensor, name) for name in _PASSIVE_METHODS} | {
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.is_same_size,
    torch.is_grad_enabled,
    torch.get_default_dtype,
}
_STATE_SETTERS = {
    "_set_grad_enabled",
    "_enter_autocast",
    "_exit_autocast",
    "set_autocast_enabled",
    "set_autocast_dtype",
    "autocast_increment_nesting",
    "autocast_decrement_nesting",
    "clear_autocast_cache",
    "set_autocast_cache_enabled",
}
_known: dict[Any, bool] = {}


def is_passive(func: Any) -> bool:
    """Whether a torch function neither computes nor reads values (shape getters, mode setters): it is no event."""
    known = _known.get(func)
    if known is None:
        known = _known[func] = _is_passive(func)
    return known


def _is_passive(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if func in _PASSIVE or name in _STATE_SETTERS:
        return True
    if name in ("__get__", "__set__", "__delete__"):
        return bool(name == "__get__" and getattr(func.__self__, "__name__", "") not in _VALUE_GETTERS)
    return False


def function_name(func: Any) -> str:
    """The name an event gets."""
    name = getattr(func, "__name__", None) or str(func)
    return f"{func.__self__.__name__}.{name}" if name == "__get__" else name


def nothing(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element that looks like `shape`; NaN where the dtype has it, so that a use by mistake is seen."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))
