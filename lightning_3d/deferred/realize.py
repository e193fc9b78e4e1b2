"""WHEN do parameters get their values?  Each by itself, when this rank's part of it is known."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_3d.deferred.cell import Call
from lightning_3d.deferred.files import read_tensor
from lightning_3d.deferred.operations import defer
from lightning_3d.deferred.tensor import Deferred, assign


def realize(tensor: Tensor) -> None:
    """Give a tensor its values, in memory of its own. It stays the object it is; one that has values is left alone."""
    if isinstance(tensor, Deferred):
        assign(tensor, _own_value(tensor))


def is_unwritten(tensor: Tensor) -> bool:
    """Whether a tensor was made without values (`torch.empty`), and nobody has given it any."""
    return isinstance(tensor, Deferred) and tensor.window.cell.is_unwritten


def leave_empty(tensor: Tensor) -> None:
    """Its values will be written before anybody reads them; what it was to get is forgotten."""
    if isinstance(tensor, Deferred):
        form, device = tensor.form, tensor.device
        call = Call(torch.empty, (tuple(form.shape),), {"dtype": form.dtype, "device": device})
        assign(tensor, defer(call, torch.empty(form.shape, dtype=form.dtype, device="meta"), device))


def realize_all(module: nn.Module) -> None:
    """All parameters and buffers, and tensors in attributes of modules. The largest one is in memory twice, at most."""
    for parameter in module.parameters():
        realize(parameter)
    realize_all_but_parameters(module)


def realize_all_but_parameters(module: nn.Module) -> None:
    """What steps look at while they are planned, when only parameters may be without values."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):  # C++ holds its tensors: they cannot be exchanged inside
            for name, parameter in list(part.named_parameters(recurse=False)):
                if isinstance(parameter, Deferred):
                    setattr(part, name, nn.Parameter(_own_value(parameter), parameter.requires_grad))
        for leaf in tree_leaves(dict(vars(part))):
            if isinstance(leaf, Deferred) and not isinstance(leaf, nn.Parameter):
                realize(leaf)


def _own_value(tensor: Deferred) -> Tensor:
    """A deferred tensor's values, in memory that is not larger, nor a file's, nor anybody else's."""
    value, cell = tensor.value(), tensor.window.cell
    shared = cell.solid is not None or (cell.origin is not None and cell.origin.func is read_tensor)
    return value.clone() if shared or value.nbytes < value.untyped_storage().nbytes() else value
