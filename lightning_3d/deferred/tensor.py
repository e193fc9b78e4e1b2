"""WHAT is a parameter whose values come later?  A tensor of the right shape, type and device that remembers.

What user code does with it works, while the model is built and afterwards: operations with large results are
remembered, others (`.item()`, a norm) compute what they need and let it go. So nothing is special about a model that
is built this way, but that its large tensors take no memory until each rank takes its part of them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.deferred.cell import Window
from lightning_3d.deferred.kept import checksum_of

SMALLEST = 16_384
"""Elements; smaller tensors have their values at once. (Norms and biases of large models are smaller.)"""
_OWN = ("window", "form", "_is_param")


class Deferred(Tensor):
    """A tensor without values.

    Attributes:
        window: What it shows of which memory.
        form: On the meta device; views of one memory are views of one another there, too.
    """

    window: Window
    form: Tensor

    @staticmethod
    def __new__(cls, window: Window, form: Tensor) -> Deferred:
        made: Deferred = Tensor._make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.stride(),
            storage_offset=form.storage_offset(),
            dtype=form.dtype,
            layout=form.layout,
            device=window.cell.device,
        )
        made.window, made.form = window, form
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing: `torch.Tensor(8, 8)` calls it with its own arguments."""

    def value(self) -> Tensor:
        """Its values, in memory of this call alone unless they had to stay."""
        with torch.no_grad(), _disable_current_modes():  # what is made while it is made is real
            return self.window.of(self.window.cell.make(self.window.version))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__set__" and func.__self__ is torch._C.TensorBase.data:
            return assign(args[0], args[1])
        if func is Tensor.tolist:
            return args[0].value().tolist()
        if func in _TO_NUMPY and is_deferred(args[0]):
            return _lent(args[0], func, *args[1:], **kwargs)
        if func in _SHOWS_MEMORY:
            return _shown(func, args, kwargs)
        if getattr(func, "__name__", "") in _CHANGES_FORM and is_deferred(args[0]):
            args[0].window.cell.solidify()
            assign(args[0], args[0].value())
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except RuntimeError as error:
            if "data is not allocated yet" not in str(error):
                raise
            return _shown(func, args, kwargs)  # it looks into the memory before it is an operation

    def as_subclass(self, cls: Any) -> Any:
        """See `torch.Tensor.as_subclass`; has values."""
        self.window.cell.solidify()
        return self.value().as_subclass(cls)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See `torch.Tensor.set_`, which asks no subclass; `register_parametrization` calls it."""
        if is_deferred(source) and not args and not kwargs:
            assign(self, source)
            return self
        return self._with_values("set_", *([] if source is None else [source]), *args, **kwargs)

    def resize_(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.Tensor.resize_`, which asks no subclass."""
        return self._with_values("resize_", *args, **kwargs)

    def resize_as_(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.Tensor.resize_as_`, which asks no subclass."""
        return self._with_values("resize_as_", *args, **kwargs)

    def _with_values(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.window.cell.solidify()
        assign(self, self.value())
        return getattr(Tensor, name)(self, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from lightning_3d.deferred.operations import dispatch

        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "parameter" if isinstance(self, nn.Parameter) else "tensor"
        return f"<{kind} of shape {tuple(self.shape)}, {self.dtype}, {self.device}; its values come in set-up>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made: Any = self.detach().clone()
            made.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in _OWN[:2]}, memo))
            memo[id(self)] = made.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self.value()
        real = nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value
        return real.__reduce_ex__(protocol)


_CHANGES_FORM = frozenset(
    [
        "as_strided_",
        "detach_",
        "resize_",
        "resize_as_",
        "set_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
    ]
)
_TO_NUMPY: frozenset[Any] = frozenset((Tensor.numpy, Tensor.__array__))
_SHOWS_MEMORY: frozenset[Any] = frozenset(
    (
        Tensor.apply_,
        Tensor.data_ptr,
        Tensor.is_shared,
        Tensor.map_,
        Tensor.map2_,
        Tensor.share_memory_,
        Tensor.storage,
        Tensor.untyped_storage,
        Tensor._typed_storage,
        Tensor.__dlpack__,
    )
)


def is_large(form: Tensor) -> bool:
    """Whether a tensor of this form is worth being made later."""
    return form.numel() >= SMALLEST


def is_deferred(value: object) -> bool:
    """Whether this is a tensor whose values come later."""
    return isinstance(value, Deferred)


def _shown(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do what looks into memory, or writes there, unseen by us: the values stay from now on."""
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, Deferred):
            x.window.cell.solidify()
    with _disable_current_modes():
        return on_values(func, args, kwargs)


def on_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with values in place of tensors without; where it gives one of them back, so is the tensor."""
    of: dict[int, tuple[Tensor, Deferred]] = {}  # holds the values, so that no two have one id

    def real(x: Any) -> Any:
        if not isinstance(x, Deferred):
            return x
        value = x.value()
        of[id(value)] = (value, x)
        return value

    real_args, real_kwargs = tree_map(real, (tuple(args), dict(kwargs)))
    out = func(*real_args, **real_kwargs)
    return tree_map(lambda x: of[id(x)][1] if isinstance(x, Tensor) and id(x) in of else x, out)


def _lent(tensor: Deferred, func: Any, *args: Any, **kwargs: Any) -> Any:
    """An array of its memory. Whoever has it may write to it; if nobody did, the values go with the array."""
    cell = tensor.window.cell
    memory = cell.lend()
    array = func(tensor.window.of(memory).requires_grad_(tensor.requires_grad), *args, **kwargs)
    if not cell.stays:
        weakref.finalize(array, cell.returned, checksum_of(memory))
    return array


def assign(target: Tensor, value: Tensor) -> None:
    """`target.data = value`, where one of them has no values yet. `target` stays the object it is, hooks included."""
    requires_grad, value = target.requires_grad, value.detach()
    made: Any = nn.Parameter(value, requires_grad=False) if isinstance(target, nn.Parameter) else value
    made.__dict__.update({k: v for k, v in target.__dict__.items() if k not in _OWN})
    hooks, after = target._backward_hooks, getattr(target, "_post_accumulate_grad_hooks", None)
    # as torch.utils.swap_tensors, which refuses where there are weak references (LSTMs have some): they shall follow
    target.__class__, made.__class__ = made.__class__, target.__class__
    target.__dict__, made.__dict__ = made.__dict__, target.__dict__
    torch._C._swap_tensor_impl(target, made)
    target.requires_grad_(requires_grad)
    if hooks:
        target._backward_hooks = hooks
    if after:
        target._post_accumulate_grad_hooks = after
