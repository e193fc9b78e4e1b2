"""WHAT stands in for data that is elsewhere, and which uses of it need none?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d.errors import PipelineError

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
KEEP_TOGETHER = (
    "Code in hooks and callbacks can combine parameters of one stage only (averages of a model beside it, momentum "
    "encoders). A copy that is not trained is put on the stages of its original if both are attributes of one module "
    "(self.model, self.ema_model), of one class and with the same shapes, or if it has the same values at the start "
    "(copy.deepcopy), unless pipeline_split names a part of it. Keep the copy so, or use "
    "pipeline_parallel_size=1: tensor and data parallelism work."
)

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


_made_of_nothing: dict[int, tuple[StorageWeakRef, str]] = {}
"""Memory of what was computed from data that is elsewhere, and the name of a parameter whose data that is."""
_MANY = 10_000


def remember(value: Tensor, name: str) -> None:
    """`value` was computed from the data of a parameter that is elsewhere."""
    if len(_made_of_nothing) > _MANY:
        for key in [key for key, (memory, _) in _made_of_nothing.items() if memory.expired()]:
            del _made_of_nothing[key]
    memory = StorageWeakRef(value.untyped_storage())
    _made_of_nothing[memory.cdata] = (memory, name)


def check_have_values(named: Mapping[str, Tensor]) -> None:
    """Refuse data that was put into parameters that are here (torch tells nobody of `parameter.data = ...`).

    Args:
        named: The parameters, or their data, by name.

    Raises:
        PipelineError: One was computed from a parameter that only other stages hold.
    """
    if not _made_of_nothing:
        return
    for name, value in named.items():
        if type(value) not in (nn.Parameter, Tensor):  # divided over the replicas: nobody could give it data
            continue
        memory, source = _made_of_nothing.get(value.untyped_storage()._cdata, (None, ""))
        if memory is not None and not memory.expired():
            raise PipelineError(
                f"parameter {name!r} was given data (name.data = ...) computed from parameter {source!r}, which only "
                f"other stages of the pipeline hold; here that has no values. {KEEP_TOGETHER}"
            )
