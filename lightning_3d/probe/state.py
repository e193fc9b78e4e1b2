"""Python state of all modules, put back after a run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from torch import nn

from lightning_3d.probe.saved import Elements, Held, Items


class ModuleState:
    """A snapshot of every module's `__dict__` (attributes, hook dictionaries, lists), without copying tensors.

    Args:
        module: The root; all its submodules are included.
        modules: Only these instead.
    """

    def __init__(self, module: nn.Module, modules: Iterable[nn.Module] | None = None) -> None:
        self._saved = [
            (m, dict(m.__dict__), {k: _taken(v) for k, v in m.__dict__.items() if isinstance(v, (list, dict, set))})
            for m in (module.modules() if modules is None else modules)
        ]

    def changed(self) -> list[nn.Module]:
        """Modules whose attributes, or lists, dicts and sets in them, are not what they were."""
        return [module for module, before, containers in self._saved if _differs(module.__dict__, before, containers)]

    def changed_hooks(self) -> list[Held]:
        """Dictionaries of hooks that have others in them."""
        return [
            Held(module.__dict__, key)
            for module, _, containers in self._saved
            for key, (container, before) in containers.items()
            if key.endswith("_hooks") and not _taken(module.__dict__[key])[0].same(before)
        ]

    def restore(
        self, only: Callable[[Any], bool] | None = None, modules: Container[nn.Module] | None = None, hooks: bool = True
    ) -> None:
        """Put everything back.

        Args:
            only: Undo just the changes whose new value satisfies this (so that what the user's code cached on its
                first call can stay).
            modules: Of these modules; default: all.
            hooks: Also dictionaries of hooks.
        """
        for module, before, containers in self._saved:
            if modules is not None and module not in modules:
                continue
            now = module.__dict__
            for key in before.keys() - now.keys():
                now[key] = before[key]
            for key in list(now):
                if key in before and now[key] is before[key]:
                    if key in containers and (hooks or not key.endswith("_hooks")):
                        self._restore_container(*containers[key], only)
                elif only is not None and not only(now[key]):
                    continue
                elif key in before:
                    now[key] = before[key]
                else:
                    del now[key]

    @staticmethod
    def _restore_container(container: Any, before: list[Any], only: Callable[[Any], bool] | None) -> None:
        if only is None or only([v for _, v in container.take()] if isinstance(container, Items) else container.take()):
            container.put(before)


def _taken(value: Any) -> tuple[Items | Elements, list[Any]]:
    """A container and what is in it, past whatever a subclass makes of that (some refuse to be written to)."""
    container = Items(value) if isinstance(value, dict) else Elements(value)
    return container, container.take()


def _differs(now: dict[str, Any], before: dict[str, Any], containers: dict[str, Any]) -> bool:
    if now.keys() != before.keys() or any(now[key] is not before[key] for key in before):
        return True
    return any(not container.same(contents) for container, contents in containers.values())
