"""WHAT stands for a parameter that only other stages hold?  The same object the user's code knows, without its data.

Names, shapes, groups, conversions and assignments work. Its data and what is computed from them are `AbsentValue`s,
which may be written back into absent parameters; whatever would take a value out of them is an error that names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.absence import KEEP_TOGETHER, function_name, is_passive, nothing, remember
from lightning_3d.errors import PipelineError

_BOOKKEEPING: set[Any] = {torch._has_compatible_shallow_copy_type, Tensor.data_ptr, Tensor.untyped_storage}
_CONVERSIONS: set[Any] = {
    getattr(Tensor, name)
    for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone")
}
_ARITHMETIC: set[Any] = {
    getattr(space, name)
    for space in (torch, Tensor)
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "lerp",
        "addcmul",
        "neg",
        "__rmul__",
        "__rsub__",
        "zeros_like",
        "empty_like",
    )
    if hasattr(space, name)
}
"""What averages of weights are made of."""
_IN_PLACE = ("__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__")


_NEEDS_MORE = ("requires_grad_", "share_memory_", "set_", "resize_", "resize_as_", "swap_")
_RANDOM = ("normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_")
"""These would leave the random generators of the stages at different places."""


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
            if is_passive(func) or name in ("__delete__", "requires_grad_") or func in _BOOKKEEPING:
                return func(*args, **kwargs)
            if name == "__set__" and isinstance(args[0], AbsentParameter):
                return func(*tree_map(_plain, args), **kwargs)
            if _is_data_getter(func):
                return AbsentValue.of(args[0], func(*args, **kwargs))
            if isinstance(args[0], AbsentParameter) and _writes(name):
                return args[0]  # a constraint on weights (clamp_, mul_): the stages that hold it do that
            if func is torch.equal:  # finetuning callbacks look a parameter up with it
                return args[0] is args[1]
            if func in _CONVERSIONS and isinstance(args[0], AbsentParameter):
                return AbsentValue.of(args[0], _convert(func, args, kwargs))
        if func is Tensor.detach and sys._getframe(1).f_code is not nn.Module._save_to_state_dict.__code__:
            return _value_of(args[0])
        if not torch.is_grad_enabled() and (func in _ARITHMETIC or _writes(name) or name.startswith("_foreach_")):
            out = func(*tree_map(_value_of, args), **tree_map(_value_of, kwargs))
            return args[0] if _writes(name) else out
        absent = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, AbsentParameter))
        raise _refused("state_dict()" if func is Tensor.detach else function_name(func), absent)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"AbsentParameter({self.parameter_name!r}, {tuple(self.shape)}, {self.dtype}, stages {list(self.stages)})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentParameter:
        if id(self) not in memo:
            memo[id(self)] = _rebuild(tuple(self.shape), self.dtype, self.device, self.requires_grad, self.__dict__)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refused("pickling (torch.save of the module)", self)


class AbsentValue(Tensor):
    """The data of an absent parameter, or a tensor computed from them: it has a shape, and no value to look at.

    Attributes:
        origin: The parameter.
    """

    origin: AbsentParameter

    @staticmethod
    def of(origin: AbsentParameter, value: Tensor) -> AbsentValue:
        made: AbsentValue = value.as_subclass(AbsentValue)
        made.origin = origin
        with torch._C.DisableTorchFunctionSubclass():
            remember(made, origin.parameter_name)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        origin = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, AbsentValue)).origin
        if name.startswith("_foreach_"):
            return _foreach(func, args, kwargs)
        if _in_place(name) and name != "requires_grad_":
            if not isinstance(args[0], AbsentValue):
                raise _not_together(func, args[0], origin)
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if is_passive(func) or func in _BOOKKEEPING:
            return out
        if "out" in kwargs or not all(isinstance(x, Tensor) for x in tree_leaves(out)):
            raise _refused(function_name(func), origin)
        return tree_map(lambda x: AbsentValue.of(origin, x), out)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentValue(of {self.origin.parameter_name!r}, {tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refused("pickling (torch.save)", self.origin)


def _value_of(x: Any) -> Any:
    if not isinstance(x, AbsentParameter):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return AbsentValue.of(x, x.data)


def _writes(name: str) -> bool:
    """Whether the torch function of this name changes its first argument's values in place, the same way everywhere."""
    return _in_place(name) and name not in _NEEDS_MORE and name not in _RANDOM


def _in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on lists: done for the places that have values."""
    tensors = list(args[0])
    lists = [x for x in args if isinstance(x, (list, tuple)) and len(x) == len(tensors)]
    absent = [next((x[i] for x in lists if isinstance(x[i], AbsentValue)), None) for i in range(len(tensors))]
    writes = _writes(func.__name__)
    for x, value in zip(tensors, absent, strict=True):
        if writes and value is not None and not isinstance(x, AbsentValue):
            raise _not_together(func, x, value.origin)
    here = [i for i, value in enumerate(absent) if value is None]
    chosen = [[x[i] for i in here] if any(x is known for known in lists) else x for x in args]
    done = dict(zip(here, func(*chosen, **kwargs) or [], strict=not writes)) if here else {}
    if writes:
        return args[0]
    return [done[i] if x is None else AbsentValue.of(x.origin, x) for i, x in enumerate(absent)]


def _not_together(func: Any, written: Any, origin: AbsentParameter) -> PipelineError:
    name = getattr(written, "parameter_name", "another tensor")
    return PipelineError(
        f"{function_name(func)} writes into {name}, which this stage of the pipeline has, a value computed from "
        f"parameter {origin.parameter_name!r}, which only {_held(origin)} holds. {KEEP_TOGETHER}"
    )


def _held(absent: AbsentParameter) -> str:
    return f"stage {absent.stages[0]}" if len(absent.stages) == 1 else f"stages {list(absent.stages)}"


def _refused(what: str, absent: AbsentParameter) -> PipelineError:
    return PipelineError(
        f"{what} on parameter {absent.parameter_name!r}, which only {_held(absent)} of the pipeline holds; here it has "
        "a shape and no values. Only the step methods run in all stages: other code in hooks and callbacks must skip "
        "parameters with `.is_absent`, or run where they are held. To save the model use "
        "trainer.save_checkpoint(path) on all ranks, and `lightning-3d checkpoint export` for one plain file; to look "
        "at all of it, or to use it after training, call trainer.strategy.whole_state_dict() on all ranks."
    )


def _is_data_getter(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") == "data"


def _plain(value: Any) -> Any:
    """What an absent parameter gets for its data: one element again, whatever was computed."""
    return nothing(value.shape, value.dtype, value.device) if isinstance(value, AbsentValue) else value


def _convert(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A change of dtype or device, done on the single stored element."""
    element = args[0].data.as_subclass(Tensor).as_strided((), ())
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    with torch.no_grad():
        return func(element, *args[1:], **kwargs).expand(args[0].shape)


def _rebuild(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool, attributes: dict[str, Any]
) -> AbsentParameter:
    parameter = nn.Parameter(nothing(shape, dtype, device), requires_grad=requires_grad)
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
    parameter.data = nothing(shape, parameter.dtype, parameter.device)
    parameter.__class__ = AbsentParameter
    absent: Any = parameter
    absent.parameter_name, absent.stages, absent.local_shape = name, stages, local_shape
