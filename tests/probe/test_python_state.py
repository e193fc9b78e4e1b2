"""What of Python's state a run may change, put back: nested objects, closures, classes, iterators, arrays."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_3d.probe import common_state, python_state

TABLE: dict[str, Any] = {"deep": {"n": 1}}
NUMBER = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    n: int = 1


class Cycle:
    """An iterator of the user's."""

    def __init__(self) -> None:
        self.at, self.inner = 0, iter(range(9))

    def __next__(self) -> int:
        self.at += 1
        return self.at + next(self.inner)

    def __call__(self) -> int:
        return next(self)


class Worker:
    def __init__(self) -> None:
        self.lock, self.done = threading.Lock(), 0


class Tool:
    shared = 1


def counting() -> Any:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


class User(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slotted, self.queue, self.array = Slotted(), [collections.deque([1, 2])], np.ones(3)
        self.hidden, self.counting = {"tensor": torch.ones(2)}, counting()
        self.generator = (n for n in range(9))
        self.lines = {"open": iter([1, 2, 3])}

    def forward(self) -> list[Any]:
        global NUMBER
        TABLE["deep"]["n"] += 1
        NUMBER += 1
        self.slotted.n += 1
        Tool.shared += 1
        self.array[0] += 1
        self.hidden["tensor"].add_(1)
        drawn = [random.random(), np.random.rand(), torch.rand(()).item(), next(self.generator)]
        seen = [NUMBER, TABLE["deep"]["n"], Tool.shared, self.slotted.n, self.array[0], self.hidden["tensor"][0].item()]
        return [*drawn, *seen, next(self.lines["open"]), self.queue[0].popleft(), self.counting()]


def test_every_run_begins_alike_and_leaves_nothing() -> None:
    module = User()
    with python_state(module) as state:
        first = module()
        state.restore()
        assert module() == first
        assert module() != first
    assert module() == first
    again = copy.deepcopy(module.generator)
    assert next(again) == next(module.generator) == 1


def test_an_iterator_nobody_took_from_stays_itself() -> None:
    module = User()
    before = module.generator
    with python_state(module):
        pass
    assert module.generator is before


def test_a_moment_is_taken_down_and_put_back() -> None:
    module = User()
    module.ticket = itertools.count()  # type: ignore[assignment]
    with python_state(module):
        put_back = common_state()
        one = module()
        put_back()
        assert module() == one


def test_what_runs_by_itself_is_left_alone() -> None:
    module = User()
    module.worker = Worker()  # type: ignore[assignment]
    with python_state(module):
        module.worker.done += 1  # by a thread, say
    assert module.worker.done == 1


def test_an_iterator_of_the_users_is_an_object(tmp_path: Path) -> None:
    module: Any = User()
    module.cycle, module.log = Cycle(), (tmp_path / "log").open("w")
    with python_state(module) as state:
        assert (module.cycle(), module.cycle()) == (1, 3)
        assert type(module.cycle) is Cycle
        state.restore()
        with module.log as file:
            file.write("a")
    assert (module.cycle(), module.cycle()) == (1, 3)
