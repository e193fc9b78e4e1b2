"""What does a probe answer when code reads a value that does not exist?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")

_READ_METHODS = (
    *("__repr__", "__format__", "item", "tolist", "numpy", "__bool__", "__int__"),
    *("__float__", "__complex__", "__index__", "__array__", "__contains__"),
)
VALUE_READS: frozenset[Any] = frozenset(getattr(Tensor, name) for name in _READ_METHODS) | {
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
}
"""Torch functions whose result is a Python value that depends on the data of a tensor."""

_BOOLS = {"__bool__", "equal", "allclose", "is_nonzero", "__contains__"}


class Answers:
    """Invented results of value reads. Booleans are remembered, so a run can be repeated with one flipped.

    Args:
        preset: Booleans to give first; after them every answer is False.
    """

    def __init__(self, preset: Iterable[bool] = ()) -> None:
        self._preset = list(preset)
        self.given: list[bool] = []

    def __call__(self, func: Any, tensor: Tensor) -> Any:
        name = getattr(func, "__name__", "")
        if name in _BOOLS:
            answer = self._preset[len(self.given)] if len(self.given) < len(self._preset) else False
            self.given.append(answer)
            return answer
        if name in ("__repr__", "__format__"):
            return "<value not computed here>"
        ones = torch.ones(tuple(tensor.shape), dtype=tensor.dtype)
        if name == "tolist":
            return ones.tolist()
        if name in ("numpy", "__array__"):
            return ones.numpy()
        return 1.0 if tensor.dtype.is_floating_point else 1


def retry(run: Callable[[Answers], R], fatal: tuple[type[BaseException], ...] = (), tries: int = 8) -> R:
    """Call `run(answers)`; if it raises after an invented boolean, again with that boolean flipped.

    So `assert not torch.isnan(x).any()` and guards like `if not mask.all(): raise` survive a run without values.

    Args:
        run: What to do; it must be repeatable.
        fatal: Errors that no other answer can cure.
        tries: Upper bound on the number of runs.

    Raises:
        Exception: What the first run raised, when no combination of answers helped.
    """
    todo: list[list[bool]] = [[]]
    first: Exception | None = None
    while todo and tries:
        preset = todo.pop(0)
        tries -= 1
        answers = Answers(preset)
        try:
            return run(answers)
        except fatal:
            raise
        except Exception as error:
            first = first or error
            for i in range(len(answers.given) - 1, len(preset) - 1, -1):
                todo.append([*answers.given[:i], not answers.given[i]])
    assert first is not None
    raise first
