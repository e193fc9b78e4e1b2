"""The probe's tools: fake parameters, module state, answers to value reads, interception, agreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_3d.comm import Communicator
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.probe import VALUE_READS, Answers, FakeParameters, ModuleState, agree, intercept_functions, retry
from lightning_3d.testing import run_distributed

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm, self.rnn = nn.BatchNorm1d(4), nn.LSTM(4, 4)
        self.history: list[int] = []
        self.table: dict[str, int] = {"a": 1}


def test_fake_parameters_keep_ties_names_and_real_locals() -> None:
    module = Tied()
    before = dict(module.named_parameters())
    flat = module.rnn._flat_weights
    state = torch.get_rng_state()
    with FakeParameters(module, CPU, [module.norm]) as fakes:
        fake = module.embed.weight
        assert fake is module.head.weight
        assert isinstance(fake, FakeTensor)
        assert isinstance(fake, nn.Parameter)
        assert fakes.names[id(fake)] == "embed.weight"
        assert set(fakes.names.values()) == set(before)
        assert isinstance(module.norm.running_mean, FakeTensor)
        assert all(isinstance(w, FakeTensor) for w in module.rnn._flat_weights)
        with fakes.mode:
            assert module.embed(torch.zeros(3, dtype=torch.long)).shape == (3, 4)
            assert module.rnn(torch.zeros(2, 3, 4))[0].shape == (2, 3, 4)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p is before[n] for n, p in module.named_parameters())
    assert module.rnn._flat_weights is flat
    assert not isinstance(module.norm.running_mean, FakeTensor)


def test_fake_parameters_use_the_local_shape_of_absent_ones() -> None:
    module = nn.Linear(4, 6)
    module.weight.local_shape = (3, 4)
    with FakeParameters(module, CPU):
        assert module.weight.shape == (3, 4)
        assert module.bias.shape == (6,)


def test_fake_parameters_are_put_back_after_an_error() -> None:
    module = nn.Linear(4, 6)
    weight = module.weight
    with pytest.raises(KeyError), FakeParameters(module, CPU):
        raise KeyError
    assert module.weight is weight


def test_module_state() -> None:
    module = Tied()
    state = ModuleState(module)
    assert state.changed() == []
    module.history.append(3)
    module.table["b"] = 2
    module.norm.extra = torch.zeros(2)
    module.norm.register_forward_hook(lambda *a: None)
    del module.table
    assert state.changed() == [module, module.norm]
    state.restore()
    assert state.changed() == []
    assert module.history == []
    assert module.table == {"a": 1}
    assert not hasattr(module.norm, "extra")
    assert not module.norm._forward_hooks


class Frozen(dict[str, int]):
    """As configurations of diffusers are."""

    def update(self, *args: object, **kwargs: object) -> None:
        raise TypeError("frozen")

    clear = __setitem__ = __delitem__ = update  # type: ignore[assignment]


def test_module_state_with_containers_that_refuse_to_be_written_to() -> None:
    module = Tied()
    module.config = Frozen(width=3, depth=4)
    state = ModuleState(module)
    state.restore()
    assert list(module.config.items()) == [("width", 3), ("depth", 4)]
    dict.update(module.config, width=5)
    assert state.changed() == [module]
    state.restore()
    assert module.config == {"width": 3, "depth": 4}


def test_module_state_of_some_changes_and_some_modules() -> None:
    module = Tied()
    state = ModuleState(module)
    module.cache, module.fake = "keep", "undo"
    state.restore(lambda value: value == "undo")
    assert module.cache == "keep"
    assert not hasattr(module, "fake")
    only = ModuleState(module, [module.norm])
    module.cache, module.norm.extra = "new", 1
    only.restore()
    assert module.cache == "new"
    assert not hasattr(module.norm, "extra")


def test_answers_and_retries() -> None:
    asked: list[list[bool]] = []

    def run(answers: Answers) -> str:
        first, second = (answers(Tensor.__bool__, torch.zeros(())) for _ in range(2))
        asked.append([first, second])
        if not second:
            raise ValueError("needs the second")
        return "done"

    assert retry(run) == "done"
    assert asked == [[False, False], [False, True]]
    answers = Answers()
    assert answers(Tensor.item, torch.zeros((), dtype=torch.long)) == 1
    assert answers(Tensor.tolist, torch.zeros(2, 2)) == [[1.0, 1.0], [1.0, 1.0]]
    assert Tensor.item in VALUE_READS


def test_retries_give_up_with_the_first_error() -> None:
    def run(answers: Answers) -> None:
        raise ValueError(f"attempt with {answers(Tensor.__bool__, torch.zeros(()))}")

    with pytest.raises(ValueError, match="attempt with False"):
        retry(run)

    def fatal(answers: Answers) -> None:
        answers(Tensor.__bool__, torch.zeros(()))
        raise KeyError

    with pytest.raises(KeyError):
        retry(fatal, (KeyError,))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_interception_nests_and_vanishes() -> None:
    seen: list[str] = []

    def handler(name: str) -> Any:
        def handle(proceed: Any, cls: type, args: Any, kwargs: Any) -> Any:
            seen.append(f"{name} {cls.__name__}")
            return proceed(*args, **kwargs)

        return handle

    original = torch.autograd.Function.__dict__["apply"].__func__
    x = torch.ones(2, requires_grad=True)
    with intercept_functions(handler("inner"), 1), intercept_functions(handler("outer"), 0):
        Double.apply(x).sum().backward()
    assert seen == ["outer Double", "inner Double"]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    assert torch.autograd.Function.__dict__["apply"].__func__ is original
    Double.apply(x)
    assert len(seen) == 2


def _agreement() -> None:
    mesh = Mesh(Layout(pp=2), CPU)
    agree("a thing", {"same": 1}, mesh.replica)
    with pytest.raises(ConfigurationError, match=r"a thing differs .* ranks \[1\] disagree"):
        agree("a thing", mesh.rank, mesh.replica)


def test_agreement() -> None:
    agree("alone", object(), Communicator("pp"))
    run_distributed(_agreement, 2, timeout=30)


def test_a_line_that_asks_for_ever_gets_the_other_answer() -> None:
    turns: list[int] = []

    def loop(answers: Answers) -> str:
        turns.append(0)
        while not answers(Tensor.__bool__, torch.zeros(())):
            turns[-1] += 1
        while answers(Tensor.item, torch.zeros(())) > 0.5:
            turns[-1] += 1
        return "done"

    assert retry(loop) == "done"
    assert turns[-1] == 0
    assert len(turns) == 3

    def check(answers: Answers) -> int:
        return sum(not answers(Tensor.__bool__, torch.zeros(())) for _ in range(500))

    assert retry(check) == 500

    def guard(answers: Answers) -> int:
        for _ in range(500):
            if answers(Tensor.__bool__, torch.zeros(())):
                raise ValueError("an answer that is not usual")
        return 500

    assert retry(guard) == 500


def test_a_line_that_never_stops_asking_is_named() -> None:
    def loop(answers: Answers) -> None:
        while True:
            answers(Tensor.__bool__, torch.zeros(()))

    with pytest.raises(ConfigurationError, match=r"test_probe.py, line \d+, loop: answers\("):
        retry(loop)
