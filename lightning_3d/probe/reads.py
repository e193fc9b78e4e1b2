"""What does a probe answer when code reads a value that does not exist?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_3d.errors import ConfigurationError
from lightning_3d.where import Place, current_place, text_of

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
_OFTEN = 100
_TOO_OFTEN = 3000


class Endless(BaseException):
    """One line has asked so often that the answers may be what keeps it in a loop. Not for user code to catch."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.place = place


class Answers:
    """Invented results of value reads. Booleans are remembered, so a run can be repeated with one flipped.

    Args:
        preset: Booleans to give first; after them every answer is False.
        ending: Lines that get other answers than usual: True and 0, for False and 1.
        patient: Lines that may ask very often: a check in a long loop.

    Attributes:
        given: The booleans that were given.
        asked: How often every line has asked.
        refusal: What is raised when a line never stops asking.
    """

    refusal: type[ConfigurationError] = ConfigurationError

    def __init__(
        self, preset: Iterable[bool] = (), ending: Iterable[Place] = (), patient: Iterable[Place] = ()
    ) -> None:
        self._preset, self._ending, self._patient = list(preset), frozenset(ending), frozenset(patient)
        self.given: list[bool] = []
        self.asked: Counter[Place] = Counter()

    def __call__(self, func: Any, tensor: Tensor) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__repr__", "__format__"):
            return "<value not computed here>"
        place = current_place()
        self.asked[place] += 1
        if self.asked[place] > (_TOO_OFTEN if place in self._patient else _OFTEN):
            raise Endless(place)
        other = place in self._ending
        if name in _BOOLS:
            answer = self._preset[len(self.given)] if len(self.given) < len(self._preset) else other
            self.given.append(answer)
            return answer
        usual = torch.full(tuple(tensor.shape), 0 if other else 1, dtype=tensor.dtype)
        if name == "tolist":
            return usual.tolist()
        if name in ("numpy", "__array__"):
            return usual.numpy()
        return float(not other) if tensor.dtype.is_floating_point else int(not other)


def retry(run: Callable[[Answers], R], fatal: tuple[type[BaseException], ...] = (), tries: int = 8) -> R:
    """Call `run(answers)`; if it raises after an invented boolean, again with that boolean flipped.

    So `assert not torch.isnan(x).any()` and guards like `if not mask.all(): raise` survive a run without values. A loop
    that goes on until a value says stop (`while not done.all()`) is repeated with the other answer at that line; if
    the line asks as often again, it is a check in a long loop, which gets more time instead.

    Args:
        run: What to do; it must be repeatable.
        fatal: Errors that no other answer can cure.
        tries: Upper bound on the number of runs, not counting those for loops.

    Raises:
        Exception: What the first run raised, when no combination of answers helped.
        ConfigurationError: A loop does not end with any answer; `Answers.refusal` says which kind.
    """
    todo: list[list[bool]] = [[]]
    first: Exception | None = None
    ending: list[Place] = []
    patient: list[Place] = []
    untried: Place | None = None  # the line whose other answer no run has survived yet
    while todo and tries:
        preset = todo.pop(0)
        answers = Answers(preset, ending, patient)
        try:
            return run(answers)
        except Endless as endless:
            place = endless.place
            if place in patient:
                error = answers.refusal(_no_end(place))
                error.names_line = True  # type: ignore[attr-defined]
                raise error from None
            if place in ending:
                ending.remove(place)
                patient.append(place)
                untried = None
            else:
                ending.append(place)
                untried = place
            todo.insert(0, preset)
        except Exception as error:
            if untried is not None:
                ending.remove(untried)
                patient.append(untried)
                untried = None
                todo.insert(0, preset)
                continue
            if isinstance(error, fatal):
                raise
            tries -= 1
            first = first or error
            for i in range(len(answers.given) - 1, len(preset) - 1, -1):
                todo.append([*answers.given[:i], not answers.given[i]])
    assert first is not None
    raise first


def _no_end(place: Place) -> str:
    return (
        f"a loop never ends when the step is planned:\n  in {text_of(place)}\nThis line has asked {_TOO_OFTEN} times "
        "for a value that the model computes. The plan is made without values, so the answers are invented, and none "
        "of them ends the loop. Use a fixed number of iterations (`for _ in range(n)`) and mask what comes after the "
        "end, or put the loop into the forward of one module."
    )
