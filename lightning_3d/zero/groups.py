"""WHAT stands in an optimizer's groups?  Pieces in place of parameters, with their state, and one process's names.

Also the methods by which some optimizers write into parameters outside of their steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.errors import ConfigurationError
from lightning_3d.zero.piece import Piece, Slot

_SWAPS = ("train", "eval")
"""With these, schedule-free optimizers exchange parameters for averages."""
_ALL = (*_SWAPS, "zero_grad")


def names_in(optimizer: Optimizer, group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    """Names of the parameters of a group.

    Args:
        optimizer: Whose group.
        group: It.
        names: `id(parameter)` -> name, of the whole module.

    Raises:
        ConfigurationError: It holds something that is not the module's.
    """
    for parameter in group["params"]:
        if id(parameter) not in names:
            raise ConfigurationError(
                f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is not a "
                "parameter of the LightningModule, so its gradient would not be reduced. Register it: "
                "self.name = nn.Parameter(...)."
            )
    return [names[id(p)] for p in group["params"]]


def replace_by_pieces(optimizer: Optimizer, group: dict[str, Any], slots: Mapping[nn.Parameter, Slot]) -> None:
    """Put what is held of them in place of parameters, and its part in place of their state."""
    before = list(group["params"])
    group["params"][:] = [slots[p].held if p in slots else p for p in before]
    for old, now in zip(before, group["params"], strict=True):
        if old is not now and old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[now] = {key: _cut(slots[old], value) for key, value in state.items()}
    # torch picks foreach by exact type, which a Piece is not
    on_cuda = any(isinstance(p, Piece) and p.is_cuda for p in group["params"])
    if on_cuda and group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = True


def _cut(slot: Slot, value: Any) -> Any:
    """This rank's part of a full-size state tensor; anything else as it is."""
    if not isinstance(value, Tensor) or value.numel() != slot.numel or slot.held is slot.parameter:
        return value
    if not slot.owned:
        return value.new_empty(0, device=slot.held.device)
    dtype = slot.held.dtype if value.dtype == slot.parameter.dtype else value.dtype
    part = value.detach().reshape(-1)[slot.low : slot.high]
    return part.to(slot.held.device, dtype, copy=True).view(slot.held.shape)


def check_reduced(what: str, left: Sequence[str]) -> None:
    """No gradients may be left out that were computed.

    Args:
        what: What happened.
        left: Names of parameters whose gradients it should have had.

    Raises:
        ConfigurationError: There are some.
    """
    if left:
        some = ", ".join(map(repr, sorted(left)[:3]))
        raise ConfigurationError(
            f"{what} with gradients of {some} that were computed, but not summed over the replicas. With manual "
            "optimization call self.manual_backward(loss) in place of loss.backward(), and let the last one before a "
            "step synchronize (no sync_grad=False). After a backward for something else (an adversary, an estimate) "
            "zero the gradients, or compute it with torch.autograd.grad."
        )


def surround_swaps(
    optimizer: Optimizer, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]
) -> None:
    """Methods that write into parameters outside of steps are surrounded like steps, where the optimizer has such."""
    for name in _SWAPS:
        surround(optimizer, name, before, after)


def surround(
    optimizer: Optimizer, name: str, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]
) -> None:
    """Run something before and after a method of one optimizer, if it has such a method."""

    def surrounded(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            before(optimizer)
            out = method(*args, **kwargs)
            after(optimizer)
            return out

        return call

    method = getattr(optimizer, name, None)
    if callable(method):
        setattr(optimizer, name, surrounded(method))


def lend_swaps(optimizer: Optimizer, wrapper: Any) -> None:
    """Lightning's wrapper inherits an optimizer's methods from its class: give it what stands in for them, too."""
    vars(wrapper).update({name: vars(optimizer)[name] for name in _ALL if name in vars(optimizer)})
