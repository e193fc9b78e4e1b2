"""Python state of all modules, put back after a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


class ModuleState:
    """A snapshot of every module's `__dict__` (attributes, hook dictionaries, lists), without copying tensors.

    Args:
        module: The root; all its submodules are included.
    """

    def __init__(self, module: nn.Module) -> None:
        self._saved = [
            (m, dict(m.__dict__), {k: copy.copy(v) for k, v in m.__dict__.items() if isinstance(v, (list, dict, set))})
            for m in module.modules()
        ]

    def restore(self, only: Callable[[Any], bool] | None = None) -> None:
        """Put everything back.

        Args:
            only: Undo just the changes whose new value satisfies this (so that what the user's code cached on its
                first call can stay).
        """
        for module, before, containers in self._saved:
            now = module.__dict__
            for key in list(now):
                if key in before and now[key] is before[key]:
                    if key in containers:
                        self._restore_container(now[key], containers[key], only)
                elif only is not None and not only(now[key]):
                    continue
                elif key in before:
                    now[key] = before[key]
                else:
                    del now[key]
            for key in before.keys() - now.keys():
                now[key] = before[key]

    @staticmethod
    def _restore_container(value: Any, before: Any, only: Callable[[Any], bool] | None) -> None:
        if only is not None and not only(list(value.values()) if isinstance(value, dict) else list(value)):
            return
        value.clear()
        if isinstance(value, list):
            value.extend(before)
        else:
            value.update(before)
