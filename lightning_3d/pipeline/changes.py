"""WHICH buffers does the step change?  With every microbatch, where one process would change them once per batch."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm

from lightning_3d.pipeline.events import Trace

_WARNED_OF = (_BatchNorm, _InstanceNorm, _SpectralNorm)
"""Modules the strategy warns of by their class (`suitability.py`)."""


def warn_of_changed_buffers(module: nn.Module, trace: Trace, microbatches: int) -> bool:
    """Name the buffers of the user's own code that a traced step changed; returns whether there are any."""
    known = [name + "." for name, m in module.named_modules() if isinstance(m, _WARNED_OF)]
    names = [name for name in trace.changed_buffers if not name.startswith(tuple(known))]
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        rank_zero_warn(
            f"{trace.step} changes the buffers {', '.join(map(repr, names[:5]))}{more} (a counter, a running mean, an "
            f"EMA). In a pipeline it runs once per microbatch, {microbatches} times per batch, and sees a microbatch "
            "each time, so they get other values than in one process. Change them in a hook that runs once per batch "
            "(on_train_batch_end), or set num_microbatches=1, if that matters."
        )
    return bool(names)
