"""HOW does a module's forward become another one for a while?"""

from __future__ import annotations

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
            own[key] = wrap(getattr(module, key))
        yield
    finally:
        for own, key, before in undo:
            if before is _NOTHING:
                own.pop(key, None)
            else:
                own[key] = before
