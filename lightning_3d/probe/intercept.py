"""One registry for calls of `autograd.Function.apply`, which no torch-function mode sees."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction

Handler = Callable[[Callable[..., Any], type, tuple[Any, ...], dict[str, Any]], Any]
"""handler(next, function_class, args, kwargs) -> result; `next(*args, **kwargs)` goes on inwards."""

# `Function.apply` is Python code that ends in `super().apply`. Patching there also reaches an `apply` that was looked
# up before (`swiglu = SwiGLU.apply` at import is usual), and saves our own Functions that code.
_base: Any = torch._C._FunctionBase.__dict__["apply"]
_handlers: list[tuple[int, Handler]] = []
_lock = threading.Lock()


def original_apply(function: type, *args: Any, **kwargs: Any) -> Any:
    """`function.apply(...)` past all handlers."""
    return _base.__get__(None, function)(*args, **kwargs)


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    handlers = list(_handlers)

    def call(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index == len(handlers):
            return original_apply(cls, *args, **kwargs)
        return handlers[index][1](lambda *a, **k: call(index + 1, a, k), cls, args, kwargs)

    return call(0, args, kwargs)


@contextmanager
def intercept_functions(handler: Handler, level: int) -> Iterator[None]:
    """Route every `autograd.Function.apply` of the process through `handler` while the context is open.

    Process-wide on purpose: a checkpoint may recompute in an autograd thread. A handler that belongs to one thread
    looks at its own thread-local state. The patch is gone when the last handler is.

    Args:
        handler: See `Handler`.
        level: Order of nesting; lower is outer.
    """
    entry = (level, handler)
    with _lock:
        _handlers.append(entry)
        _handlers.sort(key=lambda h: h[0])
        _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with _lock:
            _handlers.remove(entry)
            if not _handlers:
                del _SingleLevelFunction.apply  # type: ignore[attr-defined]
