"""WHERE do the values of a model built on the meta device come from?  From the modules' own initialisation.

Modules are initialised one at a time, in order, as they are when a model is built on a real device. Ties survive:
a parameter that several modules share becomes one real parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.deferred import Deferred
from lightning_3d.errors import ConfigurationError

_WIDE = (torch.int32, torch.int64)  # every value of a smaller type may be meant


def materialize(root: nn.Module, device: torch.device) -> bool:
    """Give every meta parameter and buffer of `root` memory on `device` and values by its module's initialisation.

    Args:
        root: The LightningModule.
        device: Where.

    Returns:
        Whether anything was on the meta device.

    Raises:
        ConfigurationError: A module has meta tensors but no way to initialise them.
    """
    if not any(t.is_meta for t in [*root.parameters(), *root.buffers()]):
        return False
    real: dict[int, Tensor] = {}
    with torch.no_grad():
        for name, module in root.named_modules():
            mine = _replace_meta(module, device, real)
            if mine:
                for key in mine:
                    _poison(_own(module, key))
                _initializer(root, name, module, mine)()
                _check_set(root, name, module, [key for key in mine if _is_poisoned(_own(module, key))])
    return True


def _own(module: nn.Module, key: str) -> Tensor:
    tensor = module._parameters.get(key)
    found = module._buffers[key] if tensor is None else tensor
    assert found is not None
    return found


def _poison(tensor: Tensor) -> None:
    """Values no initialisation gives, so that what it leaves alone is seen (new memory may hold anything)."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype in _WIDE:
        tensor.fill_(torch.iinfo(tensor.dtype).max - 1)


def _is_poisoned(tensor: Tensor) -> bool:
    if isinstance(tensor, Deferred) and tensor.window.cell.is_overwritten(since=1):
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype in _WIDE and bool((tensor == torch.iinfo(tensor.dtype).max - 1).any())


def _check_set(root: nn.Module, name: str, module: nn.Module, left: list[str]) -> None:
    if left:
        how = (
            "reset_parameters()" if callable(getattr(module, "reset_parameters", None)) else "_init_weights() above it"
        )
        raise ConfigurationError(
            f"{name or type(root).__name__} ({type(module).__name__}) was built on the meta device, and {how} leaves "
            f"{', '.join(left)} without values. Set them there (buffers too), or build the module on a real device."
        )


def _replace_meta(module: nn.Module, device: torch.device, real: dict[int, Tensor]) -> list[str]:
    """Real tensors in place of the module's own meta ones; names of those that are new (not tied to earlier ones)."""
    new = []
    for table in (module._parameters, module._buffers):
        for key, tensor in list(table.items()):
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in real:
                new.append(key)
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                real[id(tensor)] = empty
            table[key] = real[id(tensor)]  # type: ignore[assignment]
    return new


def _initializer(root: nn.Module, name: str, module: nn.Module, tensors: list[str]) -> Callable[[], Any]:
    """What sets the values of a module's own tensors: its `reset_parameters`, or `_init_weights` of a module above."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        return reset
    path = name.split(".")
    for depth in range(len(path), -1, -1):
        above = root.get_submodule(".".join(path[:depth]))
        initialize: Any = getattr(above, "_init_weights", None)
        if callable(initialize):
            return partial(initialize, module)
    raise ConfigurationError(
        f"{name or type(root).__name__} ({type(module).__name__}) was built on the meta device and has no values for "
        f"{', '.join(tensors)}: it has no reset_parameters(), and no module above it has _init_weights(). Give it a "
        "reset_parameters() that sets them (buffers too), or build it on a real device."
    )
