"""HOW does a module's forward become another one for a while?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]
_NOTHING = object()


@contextmanager
def wrapped_forwards(wraps: Iterable[tuple[nn.Module, Callable[[Forward], Forward]]]) -> Iterator[None]:
    """While open, each module runs what its function makes of its forward; nothing stays on the modules."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module, wrap in wraps:
            own = module.__dict__
            # a compiled module never looks at its `forward`
            key = "_compiled_call_impl" if own.get("_compiled_call_impl") is not None else "forward"
            undo.append((own, key, own.get(key, _NOTHING)))
            own[key] = wrap(module.forward if key == "forward" else compiled_alone(module, own[key]))
        yield
    finally:
        for own, key, before in undo:
            _put(own, key, before)


def compiled_alone(module: nn.Module, compiled: Forward) -> Forward:
    """Calls what `module.compile()` made, and the compiler sees the module as it is now.

    Whoever has put another `forward` there meanwhile called the module's hooks around it.
    """
    own = module.__dict__
    before = own.get("forward", _NOTHING)

    @functools.wraps(module.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        now = own.get("forward", _NOTHING)
        if now is before:
            return compiled(*args, **kwargs)
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        saved = [dict(h) for h in hooks]
        for h in hooks:
            h.clear()
        _put(own, "forward", before)
        try:
            return compiled(*args, **kwargs)
        finally:
            _put(own, "forward", now)
            for h, content in zip(hooks, saved, strict=True):
                h.update(content)

    return call


def _put(own: dict[str, Any], key: str, value: Any) -> None:
    if value is _NOTHING:
        own.pop(key, None)
    else:
        own[key] = value
