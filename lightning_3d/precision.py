"""HOW are gradients clipped and scaled?  What Lightning's precision plugin computes locally, made global.

The plugin *instance* is patched: a subclass would change the name under which its state is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.errors import not_yet


def make_clipping_global(
    plugin: Any, clip_by_norm: Callable[[Optimizer, float], None], collect: Callable[[], None]
) -> None:
    """Replace the plugin's norm clipping, which would see this rank's shards only.

    Clipping by value works element by element: it only has to see what hooks left in `.grad`.

    Args:
        plugin: Lightning's precision plugin.
        clip_by_norm: Clips the gradients of an optimizer to a norm of the whole mesh.
        collect: Takes over what hooks put into `.grad`; called before clipping and before the optimizer's step.
    """
    for name in ("clip_grad_by_value", "_after_closure"):
        vars(plugin).pop(name, None)  # of an earlier run
    by_value, after_closure = plugin.clip_grad_by_value, plugin._after_closure

    def collect_and_clip(*args: Any, **kwargs: Any) -> None:
        collect()
        by_value(*args, **kwargs)

    def hooks_and_collect(*args: Any, **kwargs: Any) -> None:
        after_closure(*args, **kwargs)
        collect()

    plugin.clip_grad_by_norm = lambda optimizer, clip_val, *_, **__: clip_by_norm(optimizer, float(clip_val))
    plugin.clip_grad_by_value, plugin._after_closure = collect_and_clip, hooks_and_collect


class GlobalTorchNorm:
    """While installed, `torch.nn.utils.clip_grad_norm_` on the module's parameters uses the norm of the whole mesh.

    User code binds that function by many names, but all of them look up `_get_total_norm` when called.

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


def check_precision(plugin: Any) -> None:
    """Refuse precisions whose bookkeeping is not global yet.

    Raises:
        ConfigurationError: fp16 with a gradient scaler: every rank would decide on its own whether to skip a step.
    """
    if getattr(plugin, "scaler", None) is not None:
        raise not_yet("precision='16-mixed' with a gradient scaler", "Use 'bf16-mixed', 'bf16-true' or '32-true'.")
