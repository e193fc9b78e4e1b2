"""A block does something odd, or is changed after it was recorded: never another result than under the rules."""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import ConfigurationError
from lightning_3d.tensor import plan_tensor_parallel, run_simulated
from lightning_3d.testing import relative_error
from tests.tensor.models import NanoGPT, Square, next_token
from tests.tensor.recorded.helpers import both, check_against_rules, reasons, replays, train

FACTOR = 1.0
NOTES: list[int] = []
OUTSIDE = torch.full((), 2.0, dtype=torch.float64)
Body = Callable[..., Tensor]


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0


class Block(nn.Module):
    """An MLP whose middle is the test's `body`."""

    def __init__(self, body: Body | None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(0.1)
        self.body, self.factor, self.settings, self.notes, self.count = body, 1.0, Settings(), [], 0
        self.cached: Tensor | None = None
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        h = self.activation(self.up(self.norm(x))) * self.factor
        if self.body is not None:
            h = self.body(self, x, h, *args, **kwargs)
        return x + self.dropout(self.down(h))


class Model(nn.Module):
    def __init__(self, body: Body | None = None, run: Any = None, arguments: Any = ((), {})) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(body) for _ in range(2)])
        self.run, self.arguments, self.length, self.number = run, arguments, (lambda number: 5), 0

    def forward(self) -> Tensor:
        x = torch.randn(2, self.length(self.number), 16, dtype=torch.float64, requires_grad=True)
        self.number += 1
        args, kwargs = self.arguments
        for block in self.blocks:
            x = block(x, *args, **kwargs) if self.run is None else self.run(block, x)
        return x.pow(2).mean()


def step(model: Any) -> Tensor:
    return model()


def check(expected: str, build: Callable[[], nn.Module], change: Any = None, steps: int = 4, run: Any = step) -> Any:
    """`expected`: "recorded" (before step 5, at which `change` is made), or "refused: <reason>"."""

    def changed(model: nn.Module, number: int) -> None:
        if number == 4 and change is not None:
            change(model)

    steps = 8 if change is not None else steps
    _, _, recorded, rules = both(build, run, change=changed, steps=steps)
    check_against_rules(recorded, rules)
    if expected == "recorded":
        assert replays(recorded), reasons(recorded)
    elif expected.startswith("refused"):
        assert not replays(recorded)
        assert expected.partition(": ")[2] in reasons(recorded)
    return recorded


def each(action: Callable[[Block], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for block in model.blocks:
            action(block)

    return change


def other_forward(self: Block, x: Tensor) -> Tensor:
    return x + self.down(self.up(self.norm(x)).tanh())


CHANGES = {
    "eval": lambda m: m.eval(),
    "attribute": each(lambda b: setattr(b, "factor", 3.0)),
    "attribute of a submodule": each(lambda b: setattr(b.dropout, "p", 0.5)),
    "settings object": each(lambda b: setattr(b.settings, "scale", 3.0)),
    "list": each(lambda b: b.notes.append(2.0)),
    "submodule replaced": each(lambda b: setattr(b, "activation", nn.ReLU())),
    "hook": each(lambda b: b.activation.register_forward_hook(lambda module, inputs, output: output * 2)),
    "hook of the block itself": each(lambda b: b.register_forward_hook(lambda module, inputs, output: output * 2)),
    "forward": each(lambda b: setattr(b, "forward", functools.partial(other_forward, b))),
    "frozen": each(lambda b: b.norm.weight.requires_grad_(False)),
    "all frozen": lambda m: m.requires_grad_(False),
    "parameter replaced": each(lambda b: setattr(b.norm, "weight", nn.Parameter(b.norm.weight.detach() * 2))),
    "buffer replaced": each(lambda b: setattr(b, "total", b.total + 1)),
}


def looks(self: Block, x: Tensor, h: Tensor) -> Tensor:
    return h * self.settings.scale * (1 + sum(self.notes)) + self.total


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_followed(name: str) -> None:
    recorded = check("recorded", lambda: Model(looks), CHANGES[name])
    block = recorded[0].recording.blocks["blocks.1"]
    if name == "hook":
        assert block.replays == 2  # steps 3 and 4; then the block is on the rules
    elif name == "hook of the block itself":
        assert block.replays == 6  # it runs around the program
    elif name == "forward":
        assert block.replays == 4  # forgotten, met again in step 5, recorded in 6
    elif name != "frozen":
        assert block.replays == 5  # steps 3 and 4; step 5 is recorded anew, 6 to 8 run by that


def test_a_changed_global_is_followed() -> None:
    def body(self: Block, x: Tensor, h: Tensor) -> Tensor:
        return h * FACTOR

    torch.manual_seed(0)
    model = Model(body).double()
    plan = plan_tensor_parallel(model, step, 2)

    def change(model: nn.Module, number: int) -> None:
        globals()["FACTOR"] = 1.0 if number < 4 else 3.0

    ours, rules = (
        run_simulated(2, lambda comm, on=on: train(model, plan, step, comm, on, 8, change))  # type: ignore[misc]
        for on in (True, False)
    )
    globals()["FACTOR"] = 1.0
    check_against_rules(ours, rules)
    assert replays(ours)
    assert not torch.equal(rules[0].losses[3], rules[0].losses[4])


TABLE = {"factor": 1.0}


def test_changed_objects_outside_of_the_block_are_followed() -> None:
    held = Settings()

    def body(self: Block, x: Tensor, h: Tensor) -> Tensor:
        return h * TABLE["factor"] * held.scale * self.friend[0].p

    def build() -> Any:
        model = Model(body)
        friend = nn.Dropout(0.5)
        for block in model.blocks:
            block.friend = [friend]  # a list: no submodule
        return model

    torch.manual_seed(0)
    model = build().double()
    plan = plan_tensor_parallel(model, step, 2)
    for which in range(3):

        def change(model: Any, number: int, which: int = which) -> None:
            values = [2.0 if number >= 4 and which == i else 0.5 for i in range(3)]
            TABLE["factor"], held.scale, model.blocks[0].friend[0].p = values

        ours, rules = (
            run_simulated(2, lambda comm, on=on: train(model, plan, step, comm, on, 8, change))  # type: ignore[misc]
            for on in (True, False)
        )
        check_against_rules(ours, rules)
        assert replays(ours), reasons(ours)
        assert relative_error(rules[0].losses[3], rules[0].losses[4]) > 1e-3


def appends(self: Block, x: Tensor, h: Tensor) -> Tensor:
    self.notes.append(1)
    return h


def writes(self: Block, x: Tensor, h: Tensor) -> Tensor:
    self.count += 1
    return h


def notes_globally(self: Block, x: Tensor, h: Tensor) -> Tensor:
    NOTES.append(1)
    return h


def hidden(self: Block, x: Tensor, h: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        z = x * 2
    return h * z.mean()


def hidden_in_place(self: Block, x: Tensor, h: Tensor) -> Tensor:
    z = torch.zeros((), dtype=torch.float64)
    with torch._C.DisableTorchFunction():
        z.add_(x.detach().mean())
    return h * z


def draws(generate: Callable[[], Any]) -> Body:
    def body(self: Block, x: Tensor, h: Tensor) -> Tensor:
        generate()
        return h

    return body


def prints(self: Block, x: Tensor, h: Tensor) -> Tensor:
    print("", end="")
    return h


def tensor_hook(self: Block, x: Tensor, h: Tensor) -> Tensor:
    x = x * 1
    x.register_hook(lambda g: g * 2)
    return h * x.mean()


REFUSED: dict[str, tuple[Body, str]] = {
    "branch on a value": (lambda self, x, h: h * 2 if x.sum() > 0 else h, "reads a value"),
    "item": (lambda self, x, h: h * x.abs().max().item(), "reads a value"),
    "mask": (lambda self, x, h: h * x[x > 0].sum(), "depends on values"),
    "nonzero": (lambda self, x, h: h * x.nonzero().shape[0], "depends on values"),
    "numpy": (lambda self, x, h: h * float(x.detach().numpy().mean()), "reads a value"),
    "Python random": (draws(random.random), "random"),
    "NumPy random": (draws(np.random.rand), "random"),
    "list": (appends, "writes attributes"),
    "attribute": (writes, "writes attributes"),
    "global list": (notes_globally, "global container"),
    "global tensor": (lambda self, x, h: h * OUTSIDE, "no input"),
    "output": (prints, "output"),
    "hidden operation": (hidden, ""),
    "hidden write": (hidden_in_place, ""),
    "tensor hook": (tensor_hook, "side effect"),
    "checkpoint inside": (
        lambda self, x, h: h * checkpoint(lambda z: z.tanh(), x, use_reentrant=False).mean(),
        "saved-tensor hooks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_stays_under_the_rules(name: str) -> None:
    body, why = REFUSED[name]
    check(f"refused: {why}", lambda: Model(body))


def caches(self: Block, x: Tensor, h: Tensor) -> Tensor:
    if self.cached is None:
        self.cached = torch.ones(x.shape[1], 1, dtype=x.dtype)
    return h * self.cached


def in_place(self: Block, x: Tensor, h: Tensor) -> Tensor:
    h = h + 0
    h *= 2
    h[:, 0] = 0
    h.add_(1)
    self.total.add_(1)
    return h * self.total


def no_grad_inside(self: Block, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        z = x.sum(-1, keepdim=True)
    return h * z


def autocast_inside(self: Block, x: Tensor, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = x.float() @ x.float().transpose(-1, -2)
    return h * z.double().mean()


def takes_arguments(self: Block, x: Tensor, h: Tensor, a: int, b: str, c: Any = None) -> Tensor:
    return h * a * c["w"][1]


RECORDED: dict[str, Body] = {
    "cache of the first call": caches,
    "in place, and a buffer": in_place,
    "no_grad inside": no_grad_inside,
    "autocast inside": autocast_inside,
    "branch on requires_grad": lambda self, x, h: h * (x.detach().mean() if x.requires_grad else 0),
    "custom Function": lambda self, x, h: Square.apply(h) * Square.apply(x).mean(),
    "random numbers": lambda self, x, h: h * torch.rand(x.shape[1], 1, dtype=x.dtype),
    "several operations of functional": lambda self, x, h: F.normalize(h.tanh(), dim=1) * F.softmax(x, -1).mean(),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_can_be_repeated_is(name: str) -> None:
    check("recorded", lambda: Model(RECORDED[name]))


def test_arguments_of_many_kinds() -> None:
    half = torch.full((), 0.5, dtype=torch.float64)
    check("recorded", lambda: Model(takes_arguments, arguments=((2, "q"), {"c": {"w": (1, half)}})))
    body: Body = lambda self, x, h, o: h * o.scale  # noqa: E731
    check("refused: argument of type Settings", lambda: Model(body, arguments=((Settings(),), {})))


def test_changing_lengths() -> None:
    def build(count: int) -> nn.Module:
        model = Model()
        model.length = lambda number: 5 + number % count
        return model

    check("recorded", lambda: build(1))
    check("recorded", lambda: build(3), steps=12)
    check("refused", lambda: build(30), steps=12)


WAYS = {
    "twice": lambda block, x: block(block(x)),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=True),
}


@pytest.mark.parametrize("name", WAYS)
def test_called_in_other_ways(name: str) -> None:
    check("recorded", lambda: Model(run=WAYS[name]))


def test_under_no_grad_and_autocast() -> None:
    def quiet(model: Any) -> Tensor:
        with torch.no_grad():
            before = model()
        return before + model()

    def low(model: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model()

    check("recorded", Model, run=quiet)
    check("recorded", Model, run=low)


@pytest.mark.parametrize("when", [0, 4])
def test_a_hook_on_one_rank_only(when: int) -> None:
    """All ranks stay under the rules, or that rank returns to them; nobody waits for anybody."""

    def change(model: Any, number: int) -> None:
        if number == when and model.blocks[0].up.tensor_group.rank == 0:
            for block in model.blocks:
                block.activation.register_forward_hook(lambda module, inputs, output: None)

    _, _, recorded, rules = both(Model, step, change=change, steps=10)
    check_against_rules(recorded, rules)
    counts = [run.recording.blocks["blocks.1"].replays for run in recorded]
    assert counts == ([0, 0] if when == 0 else [2, 8])


def test_switching_it_off_needs_tensor_parallelism() -> None:
    with pytest.raises(ConfigurationError, match="record=False has no effect"):
        ThreeDStrategy(record=False)


def test_a_checkpoint_recomputes_under_another_default_dtype() -> None:
    """As in Lightning's "64-true", whose default dtype ends with the step: by the program the forward ran."""

    def widened(model: Any) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return model()  # type: ignore[no-any-return]
        finally:
            torch.set_default_dtype(torch.float32)

    check("recorded", lambda: Model(run=WAYS["checkpoint"]), run=widened)


def test_second_derivatives() -> None:
    def penalty(model: Any) -> Tensor:
        loss = model()
        parameters = [p for p in model.parameters() if p.ndim == 1 and not hasattr(p, "placement")]
        found = torch.autograd.grad(loss, parameters, create_graph=True)
        return loss + sum(g.pow(2).sum() for g in found)

    check("recorded", Model, run=penalty)


def test_the_garbage_collector_is_no_code_of_the_block() -> None:
    """Its callbacks (profilers, test tools) may run at any moment."""

    def timed(phase: str, info: dict[str, int]) -> None:
        time.perf_counter()

    before = gc.get_threshold()
    gc.callbacks.append(timed)
    gc.set_threshold(5)
    try:
        _, _, recorded, rules = both(lambda: NanoGPT(), next_token)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(timed)
    check_against_rules(recorded, rules)
    assert replays(recorded) >= 4, reasons(recorded)
    assert gc.isenabled()
