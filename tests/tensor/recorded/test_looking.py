"""Whatever the code of a recorded block may look at is changed: the result is that of the rules."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_3d.probe import intercept_functions
from lightning_3d.tensor import function_guard, plan_tensor_parallel, run_simulated
from tests.tensor.recorded.helpers import check_against_rules, reasons, replays, train
from tests.tensor.recorded.test_guards import Block, Model, check, step

NUMBER_OUTSIDE = 1.0
REGISTRY: dict[str, Any] = {"x": {"t": 1.0}}
NESTED = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(t=1.0))))
HIDDEN = {"t": 1.0}
LOCAL = threading.local()
ROOM = types.ModuleType("room_of_settings")
ROOM.t = 1.0  # type: ignore[attr-defined]
sys.modules["room_of_settings"] = ROOM


class Other:
    t = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    t: float = 1.0


class Schedule:
    def __init__(self) -> None:
        self.count = 1

    def value(self) -> float:
        return 1.0 / self.count


def enclosing() -> tuple[Any, Any]:
    t = 1.0

    def read() -> float:
        return t

    def write(new: float) -> None:
        nonlocal t
        t = new

    return read, write


def leaf(h: Tensor, t: list[float] = [1.0]) -> Tensor:  # noqa: B006
    return h * t[0]


class Inner(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.tanh()


class Rectified(Inner):
    def forward(self, h: Tensor) -> Tensor:
        return h.relu()


class Looking(Block):
    """A block that looks at state in one of many places."""

    t_of_class = 1.0
    proxy = types.MappingProxyType(HIDDEN)

    def __init__(self, kind: str) -> None:
        super().__init__(Looking.act)
        self.kind, self.inner = kind, Inner()
        self.nested = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(t=1.0))))
        self.array, self.queue, self.slotted = np.ones(1), collections.deque([1.0]), Slotted()
        self.partial = functools.partial(torch.mul, other=1.0)
        self.schedule = Schedule()
        self.value = self.schedule.value
        self.read, self.write = enclosing()
        self.parent: Any = weakref.ref(self.schedule)
        self.optimizer = torch.optim.SGD([torch.ones(1)], 1.0)

    def act(self, x: Tensor, h: Tensor) -> Tensor:
        return getattr(self, f"by_{self.kind}")(h)

    def by_class(self, h: Tensor) -> Tensor:
        return h * self.t_of_class

    def by_other_class(self, h: Tensor) -> Tensor:
        return h * Other.t

    def by_room(self, h: Tensor) -> Tensor:
        return h * ROOM.t  # type: ignore[attr-defined, no-any-return]

    def by_import(self, h: Tensor) -> Tensor:
        from room_of_settings import t  # type: ignore[import-not-found]

        return h * t

    def by_name_in_room(self, h: Tensor) -> Tensor:
        return h * getattr(ROOM, "".join(["t"]))

    def by_global(self, h: Tensor) -> Tensor:
        return h * NUMBER_OUTSIDE

    def by_registry(self, h: Tensor) -> Tensor:
        return h * REGISTRY["x"]["t"]

    def by_nested_global(self, h: Tensor) -> Tensor:
        return h * NESTED.a.b.c.t

    def by_nested(self, h: Tensor) -> Tensor:
        return h * self.nested.a.b.c.t

    def by_array(self, h: Tensor) -> Tensor:
        return h * float(self.array[0])

    def by_queue(self, h: Tensor) -> Tensor:
        return h * self.queue[-1]

    def by_slots(self, h: Tensor) -> Tensor:
        return h * self.slotted.t

    def by_partial(self, h: Tensor) -> Tensor:
        return self.partial(h)

    def by_method_held(self, h: Tensor) -> Tensor:
        return h * self.value()

    def by_enclosing(self, h: Tensor) -> Tensor:
        return h * self.read()

    def by_default(self, h: Tensor) -> Tensor:
        return leaf(h)

    def by_inner(self, h: Tensor) -> Tensor:
        return self.inner(h)

    def by_class_of_inner(self, h: Tensor) -> Tensor:
        return self.inner(h)

    def by_buffers_of_inner(self, h: Tensor) -> Tensor:
        return h / (1 + len(self.inner._buffers))

    def by_proxy(self, h: Tensor) -> Tensor:
        return h * self.proxy["t"]

    def by_optimizer(self, h: Tensor) -> Tensor:
        return h * self.optimizer.param_groups[0]["lr"]

    def by_method(self, h: Tensor) -> Tensor:
        return h * self.factor_of_class()

    def factor_of_class(self) -> float:
        return 1.0

    def by_environment(self, h: Tensor) -> Tensor:
        return h * float(os.environ.get("SOME_FACTOR", "1"))

    def by_reference(self, h: Tensor) -> Tensor:
        return h / self.parent().count

    def by_deterministic(self, h: Tensor) -> Tensor:
        return h * (0.5 if torch.are_deterministic_algorithms_enabled() else 1.0)

    def by_default_dtype(self, h: Tensor) -> Tensor:
        return h * (0.5 if torch.get_default_dtype() == torch.float64 else 1.0)


def change_of(kind: str, block: Any, undo: Any) -> None:
    """Another value in the place that `kind` names."""
    changes: dict[str, Callable[[], Any]] = {
        "class": lambda: undo.setattr(Looking, "t_of_class", 0.5),
        "other_class": lambda: undo.setattr(Other, "t", 0.5),
        "room": lambda: undo.setattr(ROOM, "t", 0.5),
        "import": lambda: undo.setattr(ROOM, "t", 0.5),
        "name_in_room": lambda: undo.setattr(ROOM, "t", 0.5),
        "global": lambda: undo.setitem(globals(), "NUMBER_OUTSIDE", 0.5),
        "registry": lambda: undo.setitem(REGISTRY["x"], "t", 0.5),
        "nested_global": lambda: undo.setattr(NESTED.a.b.c, "t", 0.5),
        "nested": lambda: setattr(block.nested.a.b.c, "t", 0.5),
        "array": lambda: block.array.__setitem__(0, 0.5),
        "queue": lambda: block.queue.append(0.5),
        "slots": lambda: setattr(block.slotted, "t", 0.5),
        "partial": lambda: block.partial.keywords.__setitem__("other", 0.5),
        "method_held": lambda: setattr(block.value.__self__, "count", 2),
        "enclosing": lambda: block.write(0.5),
        "default": lambda: leaf.__defaults__[0].__setitem__(0, 0.5),  # type: ignore[index]
        "inner": lambda: undo.setattr(Inner, "forward", lambda self, h: h.relu()),
        "class_of_inner": lambda: setattr(block.inner, "__class__", Rectified),
        "buffers_of_inner": lambda: block.inner.register_buffer("extra", torch.ones(1)),
        "proxy": lambda: undo.setitem(HIDDEN, "t", 0.5),
        "optimizer": lambda: block.optimizer.param_groups[0].__setitem__("lr", 0.5),
        "method": lambda: undo.setattr(Looking, "factor_of_class", lambda self: 0.5),
        "environment": lambda: undo.setenv("SOME_FACTOR", "0.5"),
        "reference": lambda: setattr(block.parent(), "count", 2),
        "deterministic": lambda: torch.use_deterministic_algorithms(True),
        "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    }
    changes[kind]()


class LookingModel(Model):
    def __init__(self, kind: str) -> None:
        super().__init__(Looking.act)
        self.blocks = nn.ModuleList(Looking(kind) for _ in range(2))


@pytest.mark.parametrize("kind", [name[3:] for name in vars(Looking) if name.startswith("by_")])
def test_a_change_anywhere_is_followed(kind: str) -> None:
    """Broken before: the program went on with what the class, the module, the object was when it was recorded."""
    dtype = torch.get_default_dtype()
    undos: list[Any] = []

    def changed(model: Any, number: int) -> None:
        if number == 0:
            while undos:
                undos.pop().undo()
            torch.use_deterministic_algorithms(False)
            torch.set_default_dtype(dtype)
            leaf.__defaults__[0][0] = 1.0  # type: ignore[index]
        if number == 4:
            for block in model.blocks:
                undo = pytest.MonkeyPatch()
                undos.append(undo)
                change_of(kind, block, undo)

    def run(record: bool) -> Any:
        changed(None, 0)
        torch.manual_seed(0)
        model = LookingModel(kind).double()
        plan = plan_tensor_parallel(model, step, 2)
        with intercept_functions(function_guard, 1):
            return run_simulated(2, lambda comm: train(model, plan, step, comm, record, steps=7, change=changed))

    try:
        runs = [run(record) for record in (True, False)]
    finally:
        changed(None, 0)
    check_against_rules(*runs)
    losses = runs[1][0].losses
    assert not torch.allclose(losses[3], losses[4])
    assert replays(runs[0]), reasons(runs[0])


def test_a_block_that_takes_from_an_iterator_stays_under_the_rules() -> None:
    def body(self: Any, x: Tensor, h: Tensor) -> Tensor:
        return h * next(self.numbers)

    def build() -> nn.Module:
        model = Model(body)
        for block in model.blocks:
            block.numbers = itertools.count(1)
        return model

    check("refused: iterator", build)


def test_a_block_that_can_look_at_the_lightning_module_stays_under_the_rules() -> None:
    class Whole(pl.LightningModule):
        t = 1.0

    def body(self: Any, x: Tensor, h: Tensor) -> Tensor:
        return h * self.parent().t

    whole = Whole()

    def build() -> nn.Module:
        model = Model(body)
        for block in model.blocks:
            block.parent = weakref.ref(whole)
        return model

    check("refused: LightningModule", build)


def test_a_block_that_looks_at_state_of_its_thread_stays_under_the_rules() -> None:
    def body(self: Any, x: Tensor, h: Tensor) -> Tensor:
        return h * getattr(LOCAL, "t", 1.0)

    check("refused: local", lambda: Model(body))
