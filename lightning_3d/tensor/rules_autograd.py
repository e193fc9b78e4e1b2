"""Gradients that user code asks for or looks at itself: of the shards, shown as cut as what they are gradients of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.operands import derive
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, argument, first, register_rule
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded, local


def hook_on_whole(
    hook: Callable[[Tensor], Any], cut: Placement, group: TensorGroup, sources: frozenset[str]
) -> Callable[[Tensor], Tensor | None]:
    """A gradient hook of a shard that lets `hook` see the gradient of the whole tensor, cut as the tensor is."""

    def on_local(grad: Tensor) -> Tensor | None:
        total = group.sum_copies(grad, cut.copies) if cut.copies > 1 else grad
        changed = hook(ShardedTensor(total, cut, group, sources))
        if changed is None:
            return None
        shard = local(changed) if is_sharded(changed) else cut.to_local(changed, group.rank, group.size)
        return shard / cut.copies if cut.copies > 1 else shard

    return on_local


@first("register_hook")
def _register_hook(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The hook sees the gradient of the whole tensor, cut as the tensor is."""
    x, hook = args[0], argument(args, kwargs, 1, "hook")
    return func(x.local, hook_on_whole(hook, x.placement, x.group, x.sources))


@register_rule(torch.autograd.grad)
def _grad(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.grad(loss, list(self.parameters()))`."""
    inputs = argument(args, kwargs, 1, "inputs")
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    sharded = [x for x in inputs if is_sharded(x)]
    if sharded and sharded[0].group.dry:  # planning shows a new view with every read: there is no graph between them
        return tuple(derive(torch.zeros_like(x.local), x.placement, x) if is_sharded(x) else x * 0 for x in inputs)

    if any(x.placement.copies > 1 for x in sharded):
        raise NoRule("several ranks hold the input, each with a part of the gradient", fatal=True)

    def enter(value: Any) -> Any:
        return tuple(map(enter, value)) if isinstance(value, (list, tuple)) else local(value)

    options = {k: enter(v) for k, v in kwargs.items() if k not in ("outputs", "inputs")}
    found = func(enter(argument(args, kwargs, 0, "outputs")), enter(inputs), *map(enter, args[2:]), **options)
    return tuple(
        derive(g, x.placement, x) if is_sharded(x) and g is not None else g for x, g in zip(inputs, found, strict=True)
    )
