"""WHEN are tensors made without values?  While a model is built inside of `building`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.deferred.constructors import constructors_told
from lightning_3d.deferred.operations import defer, dispatch, forms_of, remember
from lightning_3d.deferred.tensor import Deferred, is_large


class building(TorchDispatchMode):
    """While open, large tensors that this thread makes on `device` are `Deferred`.

    Random numbers are drawn as they would be (and let go), so whatever reads or sets the generators in between finds
    what it would find in one process.

    Args:
        device: Where the model will be; tensors on others, and on the meta device, are made as usual.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._told = ExitStack()

    def __enter__(self) -> building:
        self._told.enter_context(constructors_told())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._told.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):  # operations on functions (flex_attention): done with values
            return func(*tree_map(_value, tuple(args)), **tree_map(_value, dict(kwargs)))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, Deferred) for x in tensors):
            return dispatch(func, args, kwargs)
        if tensors or not self._makes(func, kwargs):
            return func(*args, **kwargs)
        form = forms_of(func, args, {**kwargs, "device": self.device})
        if not isinstance(form, Tensor) or not is_large(form):
            return func(*args, **kwargs)
        fixed = {**kwargs, "dtype": form.dtype, "device": self.device}  # defaults may be others, later
        return defer(remember(func, args, fixed, self.device), form, self.device)

    def _makes(self, func: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether an operation without operands makes a dense tensor on the device."""
        known = {a.name for a in func._schema.arguments}
        device = torch.device(kwargs.get("device") or "cpu")
        dense = kwargs.get("layout") in (None, torch.strided) and not kwargs.get("pin_memory")
        return {"device", "dtype"} <= known and dense and self._is_here(device)

    def _is_here(self, device: torch.device) -> bool:
        here = self.device
        return device.type == here.type and (device.index is None or device.index == here.index)


def _value(x: Any) -> Any:
    return x.value() if isinstance(x, Deferred) else x
