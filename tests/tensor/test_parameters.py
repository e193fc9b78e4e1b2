"""Steps that read parameters themselves: penalties, gradients of gradients, functional calls; planning ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_3d.errors import TensorPlanError
from lightning_3d.probe import call_step, intercept_functions, own_parameters
from lightning_3d.probe.step import parameters_as_read
from lightning_3d.tensor import (
    Placement,
    ShardedTensor,
    TensorGroup,
    ThreadCommunicator,
    dry_group,
    function_guard,
    plan_tensor_parallel,
    rewrite,
    run_simulated,
    verify_tensor_plan,
)
from lightning_3d.tensor.follow import Follow
from lightning_3d.tensor.replica import exact_copy
from lightning_3d.testing import relative_error
from tests.tensor.helpers import compare
from tests.tensor.models import MLP, NanoGPT, next_token, values

Penalty = Callable[[Any, Tensor], Any]


class Penalised(nn.Module):
    """Blocks, and a loss with a term that reads parameters."""

    def __init__(self, penalty: Penalty) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(MLP(8) for _ in range(3)), nn.Linear(10, 5)
        self.penalty = penalty

    def forward(self, x: Tensor) -> Tensor:
        out = sum(block(x) for block in self.blocks)
        return self.head(out)

    def training_step(self, x: Tensor, index: int) -> Tensor:
        loss = self(x.to(self.head.weight.dtype)).square().mean()
        extra: Tensor = self.penalty(self, loss)
        return loss + extra


def step(module: Any) -> Any:
    return call_step(module, "training_step", values(3, 8), 0)


def through_call(m: Any, loss: Tensor) -> Any:
    return functional_call(m, {n: 1.1 * p for n, p in m.named_parameters()}, (values(3, 8).double(),)).square().mean()


def inner_step(m: Any, loss: Tensor) -> Any:
    weights = dict(m.named_parameters())
    grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {n: p - 0.1 * g for (n, p), g in zip(weights.items(), grads, strict=True)}
    return functional_call(m, moved, (values(3, 8).double(),)).square().mean()


def gradient_penalty(m: Any, loss: Tensor) -> Any:
    return sum(g.square().sum() for g in torch.autograd.grad(loss, list(m.parameters()), create_graph=True))


PENALTIES: dict[str, Penalty] = {
    "bias and weight": lambda m, _: m.blocks[0].a.bias.square().sum() + m.blocks[0].a.weight.square().sum(),
    "all": lambda m, _: sum(p.square().sum() for p in m.parameters()),
    "matrices": lambda m, _: 0.1 * sum(p.abs().sum() for n, p in m.named_parameters() if p.ndim == 2),
    "biases": lambda m, _: sum(p.square().sum() for n, p in m.named_parameters() if n.endswith("bias")),
    "of a submodule": lambda m, _: sum(p.square().sum() for p in m.blocks[1].a.parameters()),
    "norms": lambda m, _: sum(p.norm() + torch.linalg.vector_norm(p, 1) for p in m.parameters()),
    "largest": lambda m, _: max(p.abs().max() for p in m.parameters()),
    "one vector": lambda m, _: nn.utils.parameters_to_vector(m.parameters()).square().mean(),
    "functional call": through_call,
    "inner step": inner_step,
    "gradient penalty": gradient_penalty,
}


@pytest.mark.parametrize("penalty", list(PENALTIES))
def test_penalties_are_exact(penalty: str) -> None:
    torch.manual_seed(0)
    model = Penalised(PENALTIES[penalty]).double()
    plan = plan_tensor_parallel(model, step, 2)
    if penalty != "one vector":  # `cat` of cut and whole ones: all stay whole
        assert plan.sharded_fraction > 0.9, str(plan)
    report = verify_tensor_plan(model, plan, step)
    assert report.worst < 1e-9, str(report)


def test_what_parameters_yields_in_a_step_and_outside() -> None:
    model = exact_copy(MLP(8))
    rewrite(model, plan_tensor_parallel(model, lambda m: m(values(3, 8)).sum(), 2), dry_group(2))
    original = nn.Module.named_parameters
    with parameters_as_read():
        shown = dict(model.named_parameters())
        assert isinstance(shown["a.weight"], ShardedTensor)
        assert tuple(shown["a.weight"].shape) == (32, 8)
        assert [n for n, _ in model.a.named_parameters("x")] == ["x.weight", "x.bias"]
        assert all(isinstance(p, ShardedTensor) for p in model.a.parameters())
        # our own code looks parameters up by identity
        assert {id(p) for p in own_parameters(model)} == {
            id(p) for m in model.modules() for p in m._parameters.values()
        }
    assert nn.Module.named_parameters is original
    assert {n: tuple(p.shape) for n, p in model.named_parameters()}["a.weight"] == (16, 8)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_gradients_and_flags_through_the_view() -> None:
    """What a step with manual optimization does to its gradients before the optimizer's step."""
    model = exact_copy(MLP(8))
    plan = plan_tensor_parallel(model, lambda m: m(values(3, 8)).sum(), 2)

    def change(m: Any) -> None:
        m(values(3, 8).double()).square().sum().backward()
        nn.utils.clip_grad_norm_(m.parameters(), 0.01)
        m.a.weight.grad.mul_(0.5)
        for p in m.b.parameters():
            p.grad = p.grad + 1
        m.c.weight.grad = torch.ones(m.c.weight.shape, dtype=torch.float64)
        m.d.zero_grad()
        for p in m.d.parameters():
            p.requires_grad_(False)

    reference = exact_copy(model)
    change(reference)

    def body(comm: ThreadCommunicator) -> nn.Module:
        m = exact_copy(model)
        rewrite(m, plan, TensorGroup(comm))
        with parameters_as_read():
            change(m)
        return m

    with intercept_functions(function_guard, 1):
        ranks = [dict(m.named_parameters()) for m in run_simulated(2, body)]
    for name, parameter in reference.named_parameters():
        cut = plan.decisions[name].placement
        grads = [rank[name].grad for rank in ranks]
        if parameter.grad is None:
            assert all(g is None and not rank[name].requires_grad for g, rank in zip(grads, ranks, strict=True))
            continue
        got = grads[0] if cut is None else cut.to_global([g for g in grads if g is not None], 2)
        assert relative_error(got, parameter.grad) < 1e-12, name


@pytest.mark.parametrize("order", [1, 2, 3.0, float("inf"), "fro"])
def test_norms_of_cut_tensors(order: Any) -> None:
    x = values(6, 8).double()
    for cut in (Placement(0, (6,)), Placement(1, (4, 4))):
        compare(lambda t: t.norm(p=order), [x], [cut], 2)
        if order != "fro":
            compare(lambda t: torch.linalg.vector_norm(t, order), [x], [cut], 2)
    compare(lambda t: t.norm() + t.sum(), [torch.zeros(6, 8, dtype=torch.float64)], [Placement(0, (6,))], 2)


def test_second_order_through_a_column_layer() -> None:
    """Its weight gradient reads the input, too: the early all-reduce of dX is not the whole of it then."""

    def penalised(x: Tensor, weight: Tensor) -> Tensor:
        loss = F.linear(x.sin(), weight).square().sum()  # sin: not a leaf, whose consumers are not counted
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        return gradient.square().sum() + loss

    compare(penalised, [values(3, 8).double(), values(16, 8).double()], [None, Placement(0, (16,))], 2)


def test_a_refuted_bias_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that is refuted is not cut with its weight again in the next run."""
    monkeypatch.setattr("lightning_3d.tensor.search._MOST_EXTRA", 0)
    plan = plan_tensor_parallel(Penalised(PENALTIES["biases"]), step, 2)
    assert plan.decisions["blocks.0.a.bias"].placement is None
    assert "collectives" in plan.decisions["blocks.0.a.bias"].reason
    assert plan.decisions["blocks.0.a.weight"].kind == "column"


def test_a_planner_that_contradicts_itself_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a parameter that is to stay whole is cut again, the search ends with a way out."""
    start = Follow._start

    def believes(self: Follow, key: str) -> Any:
        saved, self.beliefs.replicated = self.beliefs.replicated, {}
        try:
            return start(self, key)
        finally:
            self.beliefs.replicated = saved

    monkeypatch.setattr(Follow, "_start", believes)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
    with pytest.raises(
        TensorPlanError, match=r"0\.weight should stay whole.*tensor_parallel_plan=\{'0': 'replicate'\}"
    ):
        plan_tensor_parallel(model, lambda m: m[2](torch.cumsum(m[0](values(3, 8)), -1)).sum(), 2)


def test_a_vocabulary_in_a_penalty() -> None:
    """A padded table is gathered: its padding rows are not part of the sum."""

    def penalised(m: Any) -> Tensor:
        with parameters_as_read():
            return next_token(m) + 0.01 * sum((p.square() + 0.1).sum() for p in m.parameters())

    model = NanoGPT()
    with pytest.warns(UserWarning, match="are gathered"):
        report = verify_tensor_plan(model, plan_tensor_parallel(model, penalised, 2), penalised)
    assert report.worst < 1e-9, str(report)


def test_softmax_of_a_weight() -> None:
    """A read that has no sharded form is right, too."""

    def entropy(m: Any, loss: Tensor) -> Any:
        return sum(F.log_softmax(p.flatten(), 0).exp().square().sum() for p in m.blocks[0].parameters())

    model = Penalised(entropy)
    report = verify_tensor_plan(model, plan_tensor_parallel(model, step, 2), step)
    assert report.worst < 1e-9, str(report)
