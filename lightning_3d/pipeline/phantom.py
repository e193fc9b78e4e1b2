"""WHAT stands for a value, or a parameter, that another stage has?

`Phantom`: a tracked value of another stage: shape, dtype, device, no storage. Glue code passes it around; an operation
on it before the window is not computed at all, one inside the window uses the received value.
`AbsentParameter`: a parameter of another stage. The same object the user's code knows, without its data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
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
        # no interpreter is on: a phantom inside an opaque object reached an owned atom, or a checkpoint recomputes
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([x.run.value(x) if isinstance(x, Phantom) else x for x in leaves], spec)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Phantom(value {self.vid}, {tuple(self.size())})"


class AbsentParameter(nn.Parameter):
    """A parameter that only other stages hold: `requires_grad`, the global shape, names and groups work; data does not.

    Attributes:
        is_absent: True.
        parameter_name: Full name in the module.
        stages: The stages that hold it.
        local_shape: Shape of the piece a rank of those stages holds (differs from `.shape` under tensor parallelism).
    """

    is_absent = True
    parameter_name: str
    stages: tuple[int, ...]
    local_shape: tuple[int, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if is_passive(func) or name in ("__set__", "__delete__", "requires_grad_") or func in _BOOKKEEPING:
                return func(*args, **kwargs)
            if _is_data_getter(func) or func is Tensor.detach:
                return func(*args, **kwargs).as_subclass(Tensor)
            if func is torch.equal:  # finetuning callbacks look a parameter up with it
                return args[0] is args[1]
            if func in _CONVERSIONS and isinstance(args[0], AbsentParameter):
                return _convert(func, args, kwargs)
        absent = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, AbsentParameter))
        held = f"stage {absent.stages[0]}" if len(absent.stages) == 1 else f"stages {list(absent.stages)}"
        raise PipelineError(
            f"{function_name(func)} on parameter {absent.parameter_name!r}, which only {held} of the pipeline holds. "
            "Only the step methods run in all stages; code in hooks and callbacks must skip parameters with "
            "`.is_absent`, or run where they are held."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"AbsentParameter({self.parameter_name!r}, {tuple(self.shape)}, {self.dtype}, stages {list(self.stages)})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentParameter:
        if id(self) not in memo:
            memo[id(self)] = _rebuild(*self._state())
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, self._state()

    def _state(self) -> tuple[Any, ...]:
        return (tuple(self.shape), self.dtype, self.device, self.requires_grad, dict(self.__dict__))


_BOOKKEEPING: set[Any] = {torch._has_compatible_shallow_copy_type, Tensor.data_ptr, Tensor.untyped_storage}
_CONVERSIONS: set[Any] = {
    getattr(Tensor, name)
    for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone")
}


def _is_data_getter(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") == "data"


def _convert(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A change of dtype or device, done on the single stored element."""
    element = args[0].data.as_subclass(Tensor).as_strided((), ())
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    with torch.no_grad():
        return func(element, *args[1:], **kwargs).expand(args[0].shape)


def _nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element that looks like `shape`; NaN where the dtype has it, so that a use by mistake is seen."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def _rebuild(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool, attributes: dict[str, Any]
) -> AbsentParameter:
    parameter = nn.Parameter(_nothing(shape, dtype, device), requires_grad=requires_grad)
    parameter.__class__ = AbsentParameter
    parameter.__dict__.update(attributes)
    return parameter  # type: ignore[return-value]


def is_absent(parameter: object) -> bool:
    """Whether this rank does not hold the parameter."""
    return isinstance(parameter, AbsentParameter)


def drop(module: nn.Module, held: Collection[str], holders: Mapping[str, tuple[int, ...]] | None = None) -> list[str]:
    """Free the data of every parameter that is not in `held`; the objects stay, as `AbsentParameter`.

    Args:
        module: The root; names are those of its `named_parameters()`.
        held: Names this rank keeps.
        holders: Name -> stages that hold it, for the error text.

    Returns:
        Names of the parameters dropped.
    """
    dropped = []
    for name, parameter in module.named_parameters():
        if name in held or is_absent(parameter):
            continue
        make_absent(parameter, name, (holders or {}).get(name, ()))
        dropped.append(name)
    return dropped


def make_absent(parameter: nn.Parameter, name: str, stages: tuple[int, ...]) -> None:
    """Turn one parameter into an `AbsentParameter`, in place."""
    local_shape = tuple(parameter.shape)
    shape = tuple(getattr(parameter, "global_shape", None) or local_shape)
    parameter.grad = None
    parameter.data = _nothing(shape, parameter.dtype, parameter.device)
    parameter.__class__ = AbsentParameter
    absent: Any = parameter
    absent.parameter_name, absent.stages, absent.local_shape = name, stages, local_shape
