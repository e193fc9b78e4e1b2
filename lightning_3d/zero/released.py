"""WHAT is a parameter while its values are divided over the replicas (stage 3)?  The same object, without its data.

Names, shapes, groups and gradients work. Whoever reads values inside a step gets them: they are gathered first. Outside
of steps, where ranks do not run the same code, that is an error with the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_3d.absence import function_name, is_passive
from lightning_3d.errors import ConfigurationError

_BOOKKEEPING: set[Any] = {torch._has_compatible_shallow_copy_type, Tensor.data_ptr, Tensor.requires_grad_}


class ReleasedParameter(nn.Parameter):
    """A parameter of stage 3 outside of its use.

    Attributes:
        parameter_name: Its name in the module.
        before_read: Called with the name and what is to be done when somebody needs the values; then they are here.
    """

    parameter_name: str
    before_read: Callable[[str, str], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.equal and all(isinstance(x, nn.Parameter) for x in args):
            return _same(*args)
        if not (is_passive(func) or func in _BOOKKEEPING or _leaves_data(func)):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, ReleasedParameter):
                    value.before_read(value.parameter_name, function_name(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __eq__(self, other: object) -> Any:
        # a piece has the hash of its parameter, and stands for it where somebody looks it up
        return True if isinstance(other, nn.Parameter) and hash(other) == hash(self) else super().__eq__(other)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedParameter({self.parameter_name!r}, {tuple(self.shape)}, {self.dtype}, divided over dp)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise refused(self.parameter_name, "a deep copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refused(self.parameter_name, "pickling (torch.save of the module)")


def _same(one: nn.Parameter, other: nn.Parameter) -> bool:
    """`torch.equal`, with which finetuning callbacks look parameters up between steps, where they have no values."""
    if hash(one) == hash(other) or one.shape != other.shape:
        return hash(one) == hash(other)
    try:
        return bool((one == other).all())
    except ConfigurationError:
        return False


def refused(name: str, what: str) -> ConfigurationError:
    """The error for a use where nobody can gather."""
    return ConfigurationError(
        f"{what} on parameter {name!r} outside of a step. With zero_stage=3 its values are divided over the "
        "data-parallel replicas, which gather them together in training, validation, test and predict steps only. To "
        "look at them or change them elsewhere, on all ranks: with trainer.strategy.whole_parameters(): .... To save "
        "the model: trainer.save_checkpoint(path); to use it after training: trainer.strategy.whole_state_dict(), both "
        "on all ranks."
    )


def _leaves_data(func: Any) -> bool:
    """Setting or deleting `.grad`, `.requires_grad` and the like."""
    name = getattr(func, "__name__", "")
    return name == "__delete__" or (name == "__set__" and getattr(func.__self__, "__name__", "") != "data")
