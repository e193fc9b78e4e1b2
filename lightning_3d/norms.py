"""WHAT do norm functions that user code calls find?  The mesh's gradient, though they see one rank's.

User code has bound such functions by many names before a run begins, so what all names lead to is replaced while a
`fit` runs: in torch the function that `clip_grad_norm_` looks up, in Lightning's `grad_norm` its code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn


class GlobalTorchNorm:
    """While installed, `torch.nn.utils.clip_grad_norm_` on the module's parameters uses the norm of the whole mesh.

    Args:
        norm: (gradients, norm type) -> the mesh's norm, or None where these gradients are not the module's.
    """

    def __init__(self, norm: Callable[[list[Tensor], float], Tensor | None]) -> None:
        self._norm = norm
        self._local: Callable[..., Tensor] | None = None

    def install(self) -> None:
        from torch.nn.utils import clip_grad

        if self._local is None:
            self._local = clip_grad._get_total_norm
            clip_grad._get_total_norm = self._total_norm

    def remove(self) -> None:
        from torch.nn.utils import clip_grad

        if self._local is not None:
            clip_grad._get_total_norm, self._local = self._local, None

    def _total_norm(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        assert self._local is not None
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm = self._norm(given, float(norm_type))
        if norm is None:
            return self._local(given, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        return norm


Norms = dict[str, Tensor]
"""Name of a parameter -> norm of its whole gradient."""


class GlobalGradNorm:
    """While installed, Lightning's `grad_norm(module, norm_type)` gives norms of whole gradients, alike on all ranks.

    Args:
        package: The Lightning package of the run.
        norms: (module, norm type) -> norms by the module's own names, or None where its parameters are not the run's.
    """

    def __init__(self, package: str, norms: Callable[[nn.Module, float], Norms | None]) -> None:
        self._package, self._norms = package, norms
        self._code: CodeType | None = None

    def install(self) -> None:
        utility = self._utility()
        if self._code is None and not hasattr(utility, "_of_the_mesh"):
            self._code = utility.grad_norm.__code__
            vars(utility)["_of_the_mesh"] = self._grad_norm
            utility.grad_norm.__code__ = _asks_the_mesh.__code__

    def remove(self) -> None:
        if self._code is not None:
            utility = self._utility()
            utility.grad_norm.__code__, self._code = self._code, None
            del vars(utility)["_of_the_mesh"]

    def _utility(self) -> ModuleType:
        root = self._package.partition(".pytorch")[0]
        return sys.modules[f"{root}.pytorch.utilities.grads" if root == "lightning" else f"{root}.utilities.grads"]

    def _grad_norm(self, module: nn.Module, norm_type: float | int | str, group_separator: str) -> dict[str, Any]:
        order = float(norm_type)
        if order <= 0:
            raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {order}")
        found = self._norms(module, order)
        if found is None:
            found = {n: p.grad.data.norm(order) for n, p in module.named_parameters() if p.grad is not None}
        norms = {f"grad_{order}_norm{group_separator}{name}": norm for name, norm in found.items()}
        if norms:
            norms[f"grad_{order}_norm_total"] = torch.tensor(list(norms.values())).norm(order)
        return norms


def _asks_the_mesh(module: Any, norm_type: Any, group_separator: Any = "/") -> Any:
    """Its code runs as Lightning's function, with that module's globals."""
    return _of_the_mesh(module, norm_type, group_separator)  # type: ignore[name-defined]  # noqa: F821
