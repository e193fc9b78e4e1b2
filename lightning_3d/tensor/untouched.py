"""HOW is a step followed without leaving a trace?  State, buffers and random numbers are put back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_3d.probe import ModuleState, PythonState, python_state
from lightning_3d.tensor.replica import optimization_untouched, silence_logging


@contextmanager
def untouched(module: nn.Module) -> Iterator[PythonState]:
    """Module state, buffers and Python state as before; a LightningModule's `log` does nothing meanwhile.

    What it gives begins again: `restore()` before every run makes all runs draw the same random numbers.
    """
    with python_state(module) as start, _modules_untouched(module):
        yield start


@contextmanager
def _modules_untouched(module: nn.Module) -> Iterator[None]:
    state = ModuleState(module)
    buffers: list[tuple[Tensor, int, Tensor]] = [
        (b, b._version, b.detach().clone()) for b in module.buffers() if not b.is_meta and not b.is_inference()
    ]
    with optimization_untouched(module):
        silence_logging(module)
        try:
            yield
        finally:
            state.restore()
            with torch.no_grad():
                for buffer, version, value in buffers:
                    if buffer._version != version:
                        buffer.copy_(value)


@contextmanager
def quiet_failures() -> Iterator[None]:
    """torch logs a traceback for every operation it cannot follow without values; a real run comes next."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
