"""WHAT around a run looks at the module as if it were whole?  The summary before it, calls of the user after it."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_3d.layout import Layout


class Surroundings:
    """Prepares Lightning's summary of the model, and says once what a call of a divided layer after the run needs."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._example: Any = None

    def begin(self, trainer: Any, module: Any, layout: Layout) -> None:
        """Lightning's table of the model runs `example_input_array` and counts parameters on this rank alone."""
        shown = any(type(c).__name__.endswith("ModelSummary") for c in trainer.callbacks)
        if not shown or layout.replica_size == 1:
            return
        note = "the model summary counts what this rank holds"
        if module.example_input_array is not None and layout.pp > 1:
            self._example, module.example_input_array = module.example_input_array, None
            note += ", and shows no sizes of inputs and outputs: no rank can run example_input_array alone"
        rank_zero_info(f"lightning_3d: {note}. The sizes of the whole: print(strategy.explain()).")

    def end(self, module: Any) -> None:
        """The run is over: the module is the user's again, and still cut."""
        self.clear()
        if self._example is not None:
            module.example_input_array, self._example = self._example, None
        for child in module.modules():
            if any(hasattr(p, "placement") for p in child._parameters.values()):
                self._handles.append(child.register_forward_pre_hook(_say))

    def clear(self) -> None:
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
