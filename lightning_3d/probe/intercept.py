"""One registry for calls of `autograd.Function.apply`, which no torch-function mode sees."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction

Handler = Callable[[Callable[..., Any], type, tuple[Any, ...], dict[str, Any]], Any]
"""handler(next, function_class, args, kwargs) -> result; `next(*args, **kwargs)` goes on inwards."""

# `Function.apply` is Python code that ends in `super().apply`. Patching there also reaches an `apply` that was looked
# up before (`swiglu = SwiGLU.apply` at import is usual), and saves our own Functions that code.
_base: Any = torch._C._FunctionBase.__dict__["apply"]
_handlers: list[tuple[int, Handler]] = []
"""Every one once, however often it is open."""
_open: Counter[tuple[int, Handler]] = Counter()
_lock = threading.Lock()


def original_apply(function: type, *args: Any, **kwargs: Any) -> Any:
    """`function.apply(...)` past all handlers."""
    return _base.__get__(None, function)(*args, **kwargs)


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    proceed = partial(original_apply, cls)
    for _, handler in reversed(_handlers):  # never changed, only replaced
        proceed = partial(_through, handler, proceed, cls)
    return proceed(*args, **kwargs)


def _through(handler: Handler, proceed: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    return handler(proceed, cls, args, kwargs)


class intercept_functions:
    """Route every `autograd.Function.apply` of the process through `handler` while the context is open.

    Process-wide on purpose: a checkpoint may recompute in an autograd thread. A handler that belongs to one thread
    looks at its own thread-local state. One that is open several times is called once. The patch is gone when the last
    handler is; it is made once, for a change of a class costs all lookups of its subclasses.

    Args:
        handler: See `Handler`.
        level: Order of nesting; lower is outer.
    """

    def __init__(self, handler: Handler, level: int) -> None:
        self._entry = (level, handler)

    def __enter__(self) -> None:
        global _handlers
        with _lock:
            _open[self._entry] += 1
            if _open[self._entry] == 1:
                _handlers = sorted([*_handlers, self._entry], key=lambda h: h[0])
                if len(_handlers) == 1:
                    _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        global _handlers
        with _lock:
            _open[self._entry] -= 1
            if not _open[self._entry]:
                del _open[self._entry]
                _handlers = [h for h in _handlers if h != self._entry]
                if not _handlers:
                    del _SingleLevelFunction.apply  # type: ignore[attr-defined]
