"""WHO ends the training?  A rank whose code sets `trainer.should_stop` ends it for all, after the same batch.

Lightning's own callbacks agree before they set it. Code of the user may set it on one rank only; the others would wait
for that rank for ever. Where such code is in sight, the ranks agree at the end of every batch and epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from lightning_3d.probe.reach import functions_of, mentions

_NAMES = frozenset(("should_stop",))


def may_stop(module: Any, callbacks: Iterable[Any]) -> bool:
    """Whether code of the user, in the module or in a callback, names `should_stop`."""
    return mentions(functions_of((module, *callbacks)), _NAMES)


def stop_together(trainer: Any, any_rank: Callable[[bool], bool]) -> None:
    """From now on the ranks agree on `trainer.should_stop` wherever the Trainer is about to look at it.

    Args:
        trainer: Lightning's Trainer; its loops are patched.
        any_rank: Whether it is True on any rank; collective.
    """
    for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop):
        vars(loop).pop("on_advance_end", None)  # of an earlier run
        loop.on_advance_end = functools.partial(_agreed, trainer, loop.on_advance_end, any_rank)


def _agreed(trainer: Any, plain: Callable[..., None], any_rank: Callable[[bool], bool], *args: Any) -> None:
    trainer.should_stop = any_rank(trainer.should_stop)
    plain(*args)  # it may validate, and hooks of the validation may set it
    trainer.should_stop = any_rank(trainer.should_stop)
