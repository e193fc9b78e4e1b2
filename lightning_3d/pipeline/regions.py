"""WHERE does an activation checkpoint begin and end?  Its forward is one region, which must stay in one stage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

_name = "_checkpoint_without_reentrant_generator"
_original = getattr(torch_checkpoint, _name)
_lock = threading.Lock()
_open = 0


@contextmanager
def checkpoint_regions(current: Callable[[], Any]) -> Iterator[None]:
    """While open, non-reentrant checkpoints that glue code makes call `current().on_region()` around their forward.

    Process-wide; `current` looks at its own thread. The patch is gone when the last user is.
    """
    global _open

    def generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
        glue = current()
        if glue is None or glue.inside:
            yield from _original(*args, **kwargs)
            return
        with glue.on_region():
            yield from _original(*args, **kwargs)

    with _lock:
        _open += 1
        setattr(torch_checkpoint, _name, generator)
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                setattr(torch_checkpoint, _name, _original)
