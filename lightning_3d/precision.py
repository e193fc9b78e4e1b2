"""HOW are gradients clipped and scaled?  What Lightning's precision plugin computes locally, made global.

The plugin *instance* is patched: a subclass would change the name under which its state is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.comm import Communicator


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
        collect()

    def hooks_and_collect(*args: Any, **kwargs: Any) -> None:
        after_closure(*args, **kwargs)
        collect()

    plugin.clip_grad_by_norm = lambda optimizer, clip_val, *_, **__: clip_by_norm(optimizer, float(clip_val))
    plugin.clip_grad_by_value, plugin._after_closure = collect_and_clip, hooks_and_collect


def make_scaler_global(
    plugin: Any,
    world: Communicator,
    device: torch.device,
    collect: Callable[[], None],
    unscaled: Callable[[Optimizer, Tensor], None],
) -> None:
    """All ranks decide alike whether fp16 gradients overflowed, so that all of them skip the step and lower the scale.

    Args:
        plugin: Lightning's precision plugin; without a gradient scaler nothing happens.
        world: All ranks.
        device: This rank's; it may have no gradient at all.
        collect: Takes over what hooks put into `.grad`.
        unscaled: Told when what an optimizer holds of the gradients was multiplied with a number, and which.

    Collectives: an all-reduce of one number over `world` per optimizer step.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return
    vars(scaler).pop("_unscale_grads_", None)  # of an earlier run
    local = scaler._unscale_grads_

    def unscale(optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        if all(p.grad.device.type == "cpu" for g in optimizer.param_groups for p in g["params"] if p.grad is not None):
            # an optimizer on the host would read these before they are there: torch does not wait for their copies
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        collect()
        found: dict[torch.device, Tensor] = local(optimizer, inv_scale, found_inf, allow_fp16)
        unscaled(optimizer, inv_scale)
        mine = [value.to(device).reshape(()) for value in found.values()] or [torch.zeros((), device=device)]
        with world.ledger.during("clip"):
            anywhere = world.all_reduce(torch.stack(mine).max(), "max")
        return {**dict.fromkeys(found, anywhere), device: anywhere}

    scaler._unscale_grads_ = unscale


def loss_scale(plugin: Any, device: torch.device) -> Tensor | float:
    """What the precision plugin will multiply the loss with before its backward, without a wait for the device."""
    scaler = getattr(plugin, "scaler", None)
    return 1.0 if scaler is None else scaler.scale(torch.ones((), device=device))
