"""WHERE does an activation checkpoint begin and end?  Its forward is one region, which must stay in one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from lightning_3d.pipeline.compiled import Uncompiled
from lightning_3d.probe import SharedPatch

_name = "_checkpoint_without_reentrant_generator"
_original = getattr(torch_checkpoint, _name)


def checkpoint_regions(current: Callable[[], Any]) -> SharedPatch:
    """While it is open, non-reentrant checkpoints made by glue code call `current().on_region()` around their forward.

    `current` looks at its own thread. Those inside atoms as well set `current().checkpointed`.
    """

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        glue = current()
        if glue is not None:
            glue.checkpointed = True
        if glue is None or glue.inside:
            yield from _original(function, *args, **kwargs)
            return
        with glue.on_region(), glue.keeping((args, kwargs)) as (kept, named):  # the forward itself has the user's
            yield from _original(_as_glue(function), *kept, **named)

    return SharedPatch(
        lambda: setattr(torch_checkpoint, _name, generator), lambda: setattr(torch_checkpoint, _name, _original)
    )


def _as_glue(function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs once more in the backward is compiled there where it was compiled in the forward."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with Uncompiled():
            return function(*args, **kwargs)

    return call
