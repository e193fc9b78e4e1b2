"""WHAT if user code calls the cut module when the run is over?  A word before it waits for the other ranks."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn


class Afterwards:
    """Says once, at the first call of a divided layer after the run, what that call needs."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def begin(self, module: nn.Module) -> None:
        """The run is over."""
        self.end()
        for child in module.modules():
            if any(hasattr(p, "placement") for p in child._parameters.values()):
                self._handles.append(child.register_forward_pre_hook(_say))

    def end(self) -> None:
        """Another run begins."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _say(module: nn.Module, args: Any) -> None:
    """A hook at the top level of the file, so that the module can be pickled."""
    warnings.warn(
        "the module is still cut over tensor-parallel ranks after the run: calling it talks to the other ranks, so "
        "every rank must make the same call. A call on one rank only (`if trainer.is_global_zero:`) waits for ever, or "
        "ends in 'Connection closed by peer'. Use trainer.predict, trainer.validate or trainer.test; or load "
        "strategy.whole_state_dict() (called on all ranks) into a new module.",
        stacklevel=2,
    )
