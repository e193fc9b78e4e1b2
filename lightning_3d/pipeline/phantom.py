"""WHAT stands for a value that another stage has?

`Phantom`: a tracked value of another stage: shape, dtype, device, no storage. Glue code passes it around; an operation
on it before the window is not computed at all, one inside the window uses the received value. (For a parameter of
another stage: `absent.py`.)
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline.events import TensorMeta, Vid

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


def _has_gradient(x: Tensor, requires_grad: bool = True) -> bool:
    """Whether `x.requires_grad_(requires_grad)` changes nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad == requires_grad


class Resolver(Protocol):
    """Whoever can turn a phantom into the value it stands for."""

    def value(self, phantom: Phantom) -> Any: ...


class Phantom(Tensor):
    """Shape, dtype, device and `requires_grad` of a value that another stage computes; no storage.

    Attributes:
        run: The run it belongs to; it knows the value once it has been received.
        vid: Name of the value.
    """

    run: Resolver
    vid: Vid

    @staticmethod
    def make(run: Resolver, vid: Vid, meta: TensorMeta) -> Phantom:
        phantom: Phantom = Tensor._make_wrapper_subclass(
            Phantom,
            meta.size,
            strides=meta.stride,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad,
        )
        phantom.run, phantom.vid = run, vid
        return phantom

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise PipelineError(f"{func} reached a value of another pipeline stage below the torch-function level.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_passive(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.requires_grad_ and _has_gradient(args[0], *args[1:], **kwargs):
            return args[0]  # what libraries do in hooks on embeddings, for activation checkpoints
        # no interpreter is on: a phantom inside an opaque object reached an owned atom, or a checkpoint recomputes
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([x.run.value(x) if isinstance(x, Phantom) else x for x in leaves], spec)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Phantom(value {self.vid}, {tuple(self.size())})"
