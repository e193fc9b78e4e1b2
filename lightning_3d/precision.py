"""HOW are gradients clipped and scaled?  What Lightning's precision plugin computes locally, made global.

The plugin *instance* is patched: a subclass would change the name under which its state is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_3d.errors import not_yet


def make_clipping_global(plugin: Any, clip_by_norm: Callable[[Optimizer, float], None]) -> None:
    """Replace the plugin's norm clipping, which would see this rank's shards only.

    Clipping by value works element by element and needs no change.

    Args:
        plugin: Lightning's precision plugin.
        clip_by_norm: Clips the gradients of an optimizer to a norm of the whole mesh.
    """
    plugin.clip_grad_by_norm = lambda optimizer, clip_val, *_, **__: clip_by_norm(optimizer, float(clip_val))


def check_precision(plugin: Any) -> None:
    """Refuse precisions whose bookkeeping is not global yet.

    Raises:
        ConfigurationError: fp16 with a gradient scaler: every rank would decide on its own whether to skip a step.
    """
    if getattr(plugin, "scaler", None) is not None:
        raise not_yet("precision='16-mixed' with a gradient scaler", "Use 'bf16-mixed', 'bf16-true' or '32-true'.")
