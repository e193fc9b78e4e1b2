"""WHAT do norm functions that user code calls find?  The mesh's gradient, though they see one rank's.

User code has bound such functions by many names before a run begins, so what all names lead to is replaced while a
`fit` runs: their code. Several runs of a process may be open; the one whose parameters they are answers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.utils import clip_grad


class GlobalTorchNorm:
    """While installed, torch's norms of the module's gradients are those of the whole mesh.

    `torch.nn.utils.clip_grad_norm_` and `get_total_norm` (whose result `clip_grads_with_norm_` takes) are one function.

    Args:
        norm: (gradients, norm type) -> the mesh's norm, or None where these gradients are not the module's.
    """

    installed: ClassVar[list[GlobalTorchNorm]] = []

    def __init__(self, norm: Callable[[list[Tensor], float], Tensor | None]) -> None:
        self.norm = norm

    def install(self) -> None:
        self.installed.append(self)
        vars(clip_grad)["_of_the_mesh"] = _total_norm
        _torch_norm.__code__ = _total_of_the_mesh.__code__

    def remove(self) -> None:
        if self in self.installed:
            self.installed.remove(self)
        if not self.installed:
            _torch_norm.__code__ = _local_total_norm.__code__
            vars(clip_grad).pop("_of_the_mesh", None)


_torch_norm: Any = inspect.unwrap(clip_grad._get_total_norm)  # torch runs it without recording gradients
_local_total_norm: Any = FunctionType(
    _torch_norm.__code__, _torch_norm.__globals__, _torch_norm.__name__, _torch_norm.__defaults__
)


def _total_norm(
    tensors: Tensor | Iterable[Tensor], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    norm: Tensor | None = _first(each.norm(given, float(norm_type)) for each in reversed(GlobalTorchNorm.installed))
    if norm is None:
        local: Tensor = _local_total_norm(given, norm_type, error_if_nonfinite, foreach)
        return local
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    return norm


def _total_of_the_mesh(tensors: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False, foreach: Any = None) -> Any:
    """Its code runs as torch's function, with that module's globals."""
    return _of_the_mesh(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[name-defined]  # noqa: F821


class GlobalGradNorm:
    """While installed, Lightning's `grad_norm(module, norm_type)` gives norms of whole gradients, alike on all ranks.

    Args:
        package: The Lightning package of the run.
        norms: (module, norm type) -> norms by the module's own names, or None where its parameters are not the run's.
    """

    installed: ClassVar[list[GlobalGradNorm]] = []
    codes: ClassVar[dict[Any, CodeType]] = {}
    """Lightning's functions (two packages may be in use) -> their own code."""

    def __init__(self, package: str, norms: Callable[[nn.Module, float], dict[str, Tensor] | None]) -> None:
        self.norms = norms
        self.function: Any = vars(sys.modules[f"{package}.utilities.grads"])["grad_norm"]

    def install(self) -> None:
        self.installed.append(self)
        if self.function not in self.codes:
            self.codes[self.function] = self.function.__code__
            self.function.__globals__["_of_the_mesh"] = _grad_norm
            self.function.__code__ = _asks_the_mesh.__code__

    def remove(self) -> None:
        if self in self.installed:
            self.installed.remove(self)
        if self.function in self.codes and all(other.function is not self.function for other in self.installed):
            self.function.__code__ = self.codes.pop(self.function)
            del self.function.__globals__["_of_the_mesh"]


def _grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str) -> dict[str, Any]:
    """As Lightning's, whose errors and names it has."""
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {order}")
    found = _first(each.norms(module, order) for each in reversed(GlobalGradNorm.installed))
    if found is None:
        found = {n: p.grad.data.norm(order) for n, p in module.named_parameters() if p.grad is not None}
    norms = {f"grad_{order}_norm{group_separator}{name}": norm for name, norm in found.items()}
    if norms:
        values = list(norms.values())
        planned = isinstance(values[0], FakeTensor)  # has no number to make a tensor of
        total = torch.stack([v.float() for v in values]) if planned else torch.tensor(values)
        norms[f"grad_{order}_norm_total"] = total.norm(order)
    return norms


def _asks_the_mesh(module: Any, norm_type: Any, group_separator: Any = "/") -> Any:
    """Its code runs as Lightning's function, with that module's globals."""
    return _of_the_mesh(module, norm_type, group_separator)  # type: ignore[name-defined]  # noqa: F821


def _first(answers: Iterable[Any]) -> Any:
    """The first answer that is one."""
    return next((answer for answer in answers if answer is not None), None)
