"""WHICH ways to make a tensor do not ask the tensor they are given?  Some of torch's own; they are told here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import parameter as kinds

from lightning_3d.deferred.tensor import Deferred, assign

_DATA: Any = torch._C.TensorBase.data


@contextmanager
def constructors_told() -> Iterator[None]:
    """While open, what has a class of its own (subclasses of `nn.Parameter`) gets values, and lazy modules get none."""
    tensor_class: Any = Tensor
    parameter_class: Any = nn.Parameter
    lazy_class: Any = kinds.UninitializedTensorMixin  # type: ignore[attr-defined]
    make_subclass, new_parameter = Tensor._make_subclass, nn.Parameter.__new__
    own_data = vars(Tensor).get("data")  # of one that is open around this
    materialize: Any = lazy_class.materialize

    def subclass(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        return make_subclass(cls, _with_values(data), *args, **kwargs)

    def parameter(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_parameter(cls, data if cls is nn.Parameter else _with_values(data), *args, **kwargs)

    def set_data(self: Any, value: Any) -> None:
        if isinstance(value, Deferred) or isinstance(self, Deferred):  # torch does not ask the value
            assign(self, value)
        else:
            _DATA.__set__(self, value)

    def lazy(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        made = torch.empty(shape, device=device or self.data.device, dtype=dtype or self.data.dtype)
        if isinstance(made, Deferred):
            assign(self, made)
        else:
            materialize(self, shape, device, dtype)

    tensor_class._make_subclass = staticmethod(subclass)
    tensor_class.data = property(_DATA.__get__, set_data)
    parameter_class.__new__ = staticmethod(parameter)
    lazy_class.materialize = lazy
    try:
        yield
    finally:
        tensor_class._make_subclass = staticmethod(make_subclass)
        if own_data is None:
            del tensor_class.data  # torch's own is in the class above
        else:
            tensor_class.data = own_data
        parameter_class.__new__ = staticmethod(new_parameter)
        lazy_class.materialize = materialize


def _with_values(data: Any) -> Any:
    if not isinstance(data, Deferred):
        return data
    data.window.cell.solidify()
    return data.value()
