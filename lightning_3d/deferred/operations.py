"""WHAT becomes of an operation on tensors without values?  It is remembered, or done on values that are let go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.deferred.cell import Call, Cell, Window, default_generator
from lightning_3d.deferred.kept import keep
from lightning_3d.deferred.tensor import Deferred, is_large, on_values

DEEPEST = 40
"""Tensors that are computed from tensors, from tensors...; beyond that they are computed at once."""
_RANDOM = torch.Tag.nondeterministic_seeded
_WRITTEN_WITHOUT_NOTE = frozenset(("running_mean", "running_var", "dropout_state"))
"""Operands that some operations (`native_batch_norm`) write to without their schema saying so."""


def defer(call: Call, forms: Any, device: torch.device) -> Any:
    """What `call` will give when it is needed, of these forms (one tensor or several)."""
    depth = 1 + max((x.cell.depth for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, Window)), default=-1)
    if isinstance(forms, Tensor):
        return Deferred(Window(Cell(call, forms, device, depth=depth)), forms)
    numbered = (replace(call, part=part) for part in range(len(forms)))
    return type(forms)(
        Deferred(Window(Cell(each, form, device, depth=depth)), form)
        for each, form in zip(numbered, forms, strict=True)
    )


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Remember an operation on tensors without values, or do it."""
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Deferred)]
    depth = max(x.window.cell.depth for x in operands)
    forms = forms_of(func, args, kwargs)
    if forms is None:
        return _do(func, args, kwargs)
    if _is_view(func):
        return _view(operands[0].window, Call(func, tuple(args[1:]), kwargs), forms)
    if depth >= DEEPEST or any(x.window.cell.solid is not None for x in operands):
        return _do(func, args, kwargs)
    written = _written(func, args, kwargs)
    if written:
        target = written[0]
        if len(written) > 1 or not isinstance(target, Deferred) or not _gives_what_it_writes(func):
            return _do(func, args, kwargs)
        cell = target.window.cell
        if any(x.window.cell is not cell for x in operands):
            cell.depth = max(cell.depth, depth + 1)
        cell.writes.append(remember(func, args, kwargs, cell.device, target))
        return target
    device = torch.device(kwargs.get("device") or operands[0].device)
    if device.type == "meta":
        return forms
    if any(map(is_large, [forms] if isinstance(forms, Tensor) else forms)):
        return defer(remember(func, args, kwargs, device), forms, device)
    return _do(func, args, kwargs)


def remember(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, written: Deferred | None = None
) -> Call:
    """The call, to be done later. What it draws is drawn now, too: the generator goes on as if it had been done.

    Args:
        func, args, kwargs: The operation.
        device: Of its result.
        written: What it writes to.
    """

    def kept(x: Any) -> Any:
        if isinstance(x, Deferred):
            return x.window if written is not None and x.window.cell is written.window.cell else x.window.at_present()
        return keep(x, is_large(x)) if isinstance(x, Tensor) else x

    random = _RANDOM in func.tags
    generator = kwargs.get("generator") or (default_generator(device) if random else None)
    state = generator.get_state() if random and generator is not None else None
    own = {k: (True if v is not None else None) if k == "generator" else v for k, v in kwargs.items()}
    new_args, new_kwargs = tree_map(kept, (tuple(args), own))
    if random:
        _draw(func, args, kwargs, written)
    return Call(func, new_args, new_kwargs, device if random else None, state)


def _draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Deferred | None) -> None:
    """Do a random operation for its numbers alone."""

    def real(x: Any) -> Any:
        if x is written and written is not None:
            form = written.form
            return torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=written.device)
        return x.value() if isinstance(x, Deferred) else x

    with torch.no_grad():
        real_args, real_kwargs = tree_map(real, (tuple(args), dict(kwargs)))
        func(*real_args, **real_kwargs)


def forms_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the operation's results look like; None if that depends on values, or some are no tensors."""

    def form(x: Any) -> Any:
        return x.form if isinstance(x, Deferred) else x.to("meta") if isinstance(x, Tensor) else x

    own = {k: v for k, v in kwargs.items() if k not in ("generator", "device", "pin_memory")}
    if "device" in kwargs:
        own["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            real_args, real_kwargs = tree_map(form, (tuple(args), own))
            out = func(*real_args, **real_kwargs)
    except Exception:  # torch's meta kernels raise many kinds; the operation itself says what is wrong
        return None
    several = isinstance(out, (tuple, list)) and bool(out) and all(isinstance(x, Tensor) for x in out)
    return out if isinstance(out, Tensor) or several else None


def _view(base: Window, step: Call, forms: Any) -> Any:
    if isinstance(forms, Tensor):
        return Deferred(Window(base.cell, (*base.steps, step)), forms)
    parts = (Call(step.func, step.args, step.kwargs, part=i) for i in range(len(forms)))
    return type(forms)(
        Deferred(Window(base.cell, (*base.steps, part)), form) for part, form in zip(parts, forms, strict=True)
    )


def _do(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do it now, on values that are let go again; what it writes to stays."""
    for x in _written(func, args, kwargs):
        if isinstance(x, Deferred):
            x.window.cell.solidify()
    return on_values(func, args, kwargs)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _gives_what_it_writes(func: Any) -> bool:
    """Not: a result of its own, and something (noise, statistics) besides."""
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    names = [
        a.name
        for a in func._schema.arguments
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in _WRITTEN_WITHOUT_NOTE
    ]
    return [x for name in names for x in tree_leaves(given.get(name)) if isinstance(x, Tensor)]
