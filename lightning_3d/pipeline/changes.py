"""WHAT does the step change and read?  With every microbatch, where one process would do so once per batch."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm

from lightning_3d.pipeline.events import Trace
from lightning_3d.pipeline.glue_state import name_of
from lightning_3d.probe import saved
from lightning_3d.probe.reach import codes_of, functions_of

_WARNED_OF = (_BatchNorm, _InstanceNorm, _SpectralNorm)
"""Modules the strategy warns of by their class (`suitability.py`)."""


def warn_of_changed_state(module: nn.Module, trace: Trace, microbatches: int, opened: Iterable[nn.Module]) -> bool:
    """Name the buffers and attributes that a traced step changes and reads; returns whether there are any.

    Attributes that code of the user only writes, and lists it appends to, are left out.
    """
    known = tuple(name + "." for name, m in module.named_modules() if isinstance(m, _WARNED_OF))
    names = [name for name in trace.changed_buffers if not name.startswith(known)]
    read = _names_read(opened)
    for piece in trace.pieces:
        if isinstance(piece, saved.Held) and piece.key in read:
            value = piece.space.get(piece.key)
            if isinstance(value, (int, float, Tensor, type(None))) and not isinstance(value, nn.Parameter):
                names.append(name_of(piece, module))
    names = list(dict.fromkeys(names))
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        rank_zero_warn(
            f"{trace.step} changes and reads {', '.join(map(repr, names[:5]))}{more} (a counter, a running mean, an "
            f"EMA). In a pipeline it runs once per microbatch, {microbatches} times per batch, and sees a microbatch "
            "each time; what it writes after the model was called is read by the next batch, not by the next "
            "microbatch. So the values are others than in one process. Change them in a hook that runs once per batch "
            "(on_train_batch_end), or set num_microbatches=1, if that matters."
        )
    return bool(names)


def _names_read(modules: Iterable[nn.Module]) -> set[str]:
    """Attributes that code of the user's reads (`self.count`, also in `self.count += 1`)."""
    codes = [inner for code in codes_of(functions_of(modules)) for inner in _with_inner(code)]
    return {i.argval for code in codes for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)
