"""WHAT is a parameter whose values come later?  A tensor of the right shape, type and device that remembers.

What user code does with it works, while the model is built and afterwards: operations with large results are
remembered, others (`.item()`, a norm) compute what they need and let it go. So nothing is special about a model that
is built this way, but that its large tensors take no memory until each rank takes its part of them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.deferred.cell import Call, Cell, Window, default_generator
from lightning_3d.deferred.kept import checksum_of, keep

DEEPEST = 40
"""Tensors that are computed from tensors, from tensors...; beyond that they are computed at once."""
SMALLEST = 16_384
"""Elements; smaller tensors have their values at once. (Norms and biases of large models are smaller.)"""
_RANDOM = torch.Tag.nondeterministic_seeded
_OWN = ("window", "form", "_is_param")
_WRITTEN_WITHOUT_NOTE = frozenset(("running_mean", "running_var", "dropout_state"))
"""Operands that some operations (`native_batch_norm`) write to without their schema saying so."""


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
    back: dict[int, Deferred] = {}

    def real(x: Any) -> Any:
        if not isinstance(x, Deferred):
            return x
        x.window.cell.solidify()
        value = x.value()
        back[id(value)] = x
        alive.append(value)
        return value

    alive: list[Tensor] = []
    with _disable_current_modes():
        real_args, real_kwargs = tree_map(real, (tuple(args), dict(kwargs)))
        out = func(*real_args, **real_kwargs)
    return back.get(id(out), out)


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


def defer(call: Call, forms: Any, device: torch.device) -> Any:
    """What `call` will give when it is needed, of these forms (one tensor or several)."""
    depth = 1 + max((x.cell.depth for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, Window)), default=-1)
    if isinstance(forms, Tensor):
        return Deferred(Window(Cell(call, forms, device, depth=depth)), forms)
    numbered = (replace(call, part=part) for part in range(len(forms)))
    return type(forms)(
        Deferred(Window(Cell(each, form, device, depth=depth)), form)
        for each, form in zip(numbered, forms, strict=True)
    )


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Remember an operation on tensors without values, or do it."""
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Deferred)]
    depth = max(x.window.cell.depth for x in operands)
    forms = _forms(func, args, kwargs)
    if forms is None:
        return _do(func, args, kwargs)
    if _is_view(func):
        return _view(operands[0].window, Call(func, tuple(args[1:]), kwargs), forms)
    if depth >= DEEPEST or any(x.window.cell.solid is not None for x in operands):
        return _do(func, args, kwargs)
    written = _written(func, args, kwargs)
    if written:
        target = written[0]
        if len(written) > 1 or not isinstance(target, Deferred) or not _gives_what_it_writes(func):
            return _do(func, args, kwargs)
        cell = target.window.cell
        if any(x.window.cell is not cell for x in operands):
            cell.depth = max(cell.depth, depth + 1)
        cell.writes.append(remember(func, args, kwargs, cell.device, target))
        return target
    device = torch.device(kwargs.get("device") or operands[0].device)
    if device.type == "meta":
        return forms
    if any(map(is_large, [forms] if isinstance(forms, Tensor) else forms)):
        return defer(remember(func, args, kwargs, device), forms, device)
    return _do(func, args, kwargs)


def remember(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, written: Deferred | None = None
) -> Call:
    """The call, to be done later. What it draws is drawn now, too: the generator goes on as if it had been done.

    Args:
        func, args, kwargs: The operation.
        device: Of its result.
        written: What it writes to.
    """

    def kept(x: Any) -> Any:
        if isinstance(x, Deferred):
            return x.window if written is not None and x.window.cell is written.window.cell else x.window.at_present()
        return keep(x, is_large(x)) if isinstance(x, Tensor) else x

    random = _RANDOM in func.tags
    generator = kwargs.get("generator") or (default_generator(device) if random else None)
    state = generator.get_state() if random and generator is not None else None
    own = {k: (True if v is not None else None) if k == "generator" else v for k, v in kwargs.items()}
    new_args, new_kwargs = tree_map(kept, (tuple(args), own))
    if random:
        _draw(func, args, kwargs, written)
    return Call(func, new_args, new_kwargs, device if random else None, state)


def _draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Deferred | None) -> None:
    """Do a random operation for its numbers alone."""

    def real(x: Any) -> Any:
        if x is written and written is not None:
            form = written.form
            return torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=written.device)
        return x.value() if isinstance(x, Deferred) else x

    with torch.no_grad():
        real_args, real_kwargs = tree_map(real, (tuple(args), dict(kwargs)))
        func(*real_args, **real_kwargs)


def _forms(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the operation's results look like; None if that depends on values, or some are no tensors."""

    def form(x: Any) -> Any:
        return x.form if isinstance(x, Deferred) else x.to("meta") if isinstance(x, Tensor) else x

    own = {k: v for k, v in kwargs.items() if k not in ("generator", "device", "pin_memory")}
    if "device" in kwargs:
        own["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            real_args, real_kwargs = tree_map(form, (tuple(args), own))
            out = func(*real_args, **real_kwargs)
    except Exception:  # torch's meta kernels raise many kinds; the operation itself says what is wrong
        return None
    several = isinstance(out, (tuple, list)) and bool(out) and all(isinstance(x, Tensor) for x in out)
    return out if isinstance(out, Tensor) or several else None


def _view(base: Window, step: Call, forms: Any) -> Any:
    if isinstance(forms, Tensor):
        return Deferred(Window(base.cell, (*base.steps, step)), forms)
    parts = (Call(step.func, step.args, step.kwargs, part=i) for i in range(len(forms)))
    return type(forms)(
        Deferred(Window(base.cell, (*base.steps, part)), form) for part, form in zip(parts, forms, strict=True)
    )


def _do(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do it now, on values that are let go again; what it writes to stays."""
    back: dict[int, Deferred] = {}
    for x in _written(func, args, kwargs):
        if isinstance(x, Deferred):
            x.window.cell.solidify()

    def real(x: Any) -> Any:
        if not isinstance(x, Deferred):
            return x
        value = x.value()
        back[id(value)] = x
        alive.append(value)
        return value

    alive: list[Tensor] = []
    real_args, real_kwargs = tree_map(real, (tuple(args), dict(kwargs)))
    out = func(*real_args, **real_kwargs)
    return tree_map(lambda x: back.get(id(x), x) if isinstance(x, Tensor) else x, out)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _gives_what_it_writes(func: Any) -> bool:
    """Not: a result of its own, and something (noise, statistics) besides."""
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    names = [
        a.name
        for a in func._schema.arguments
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in _WRITTEN_WITHOUT_NOTE
    ]
    return [x for name in names for x in tree_leaves(given.get(name)) if isinstance(x, Tensor)]
