"""A cut model in everyday use: evaluation, inference mode, autocast, hooks, conversion, second derivatives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_3d.tensor.collectives as collectives
from lightning_3d.probe import intercept_functions
from lightning_3d.tensor import (
    Placement,
    ShardedTensor,
    TensorGroup,
    ThreadCommunicator,
    function_guard,
    plan_tensor_parallel,
    rewrite,
    run_simulated,
    verify_tensor_plan,
    whole,
)
from lightning_3d.tensor.exact import Exactly
from lightning_3d.testing import relative_error
from tests.tensor.models import MLP, PLAIN, Gated, NanoGPT, mean_square, next_token, values


def on_ranks(model: nn.Module, step: Any, use: Any, size: int = 2) -> list[Any]:
    """`use(cut copy of the model)` on every rank."""
    plan = plan_tensor_parallel(model, step, size)

    def body(comm: ThreadCommunicator) -> Any:
        twin = copy.deepcopy(model)
        rewrite(twin, plan, TensorGroup(comm))
        return use(twin)

    with intercept_functions(function_guard, 1):
        return run_simulated(size, body)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", PLAIN)
def test_evaluation(name: str, mode: Any) -> None:
    build, step, _ = PLAIN[name]
    torch.manual_seed(0)
    model = build().double()

    def use(m: Any) -> Tensor:
        m.eval()
        with mode():
            return step(m).clone()

    want = use(copy.deepcopy(model))
    for got in on_ranks(model, step, use):
        assert relative_error(got, want) < 1e-9


@pytest.mark.parametrize("name", ["nanogpt", "gated", "encoder", "timm"])
def test_autocast_is_as_exact_as_on_one_process(name: str) -> None:
    build, step, _ = PLAIN[name]
    torch.manual_seed(0)
    model = build()

    def use(m: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(m)
        loss.float().backward()
        return loss.detach(), {n: p.grad for n, p in m.named_parameters()}

    exact = step(copy.deepcopy(model).double()).item()
    want, grads = use(copy.deepcopy(model))
    for got, own in on_ranks(model, step, use):
        assert got.dtype == want.dtype
        assert abs(got.item() - exact) <= 2 * abs(want.item() - exact) + 0.01 * abs(exact)
        assert all(own[n].dtype == grads[n].dtype for n in grads)
        assert all(torch.isfinite(g).all() for g in own.values())


def test_half_precision_parameters() -> None:
    model = NanoGPT()
    want = next_token(model).item()

    def use(m: Any) -> tuple[float, torch.dtype]:
        m.bfloat16()
        loss = next_token(m)
        loss.backward()
        assert all(hasattr(p, "placement") == (n in cut) for n, p in m.named_parameters())
        return loss.item(), m.lm_head._parameters["weight"].grad.dtype

    cut = {n for n, d in plan_tensor_parallel(model, next_token, 2).decisions.items() if d.placement is not None}
    for got, dtype in on_ranks(model, next_token, use):
        assert abs(got - want) < 0.05
        assert dtype == torch.bfloat16


def test_hooks_see_the_global_shape() -> None:
    def use(m: Any) -> list[Any]:
        seen: list[Any] = []
        m.a.register_forward_hook(lambda module, inputs, output: seen.append((type(output), tuple(output.shape))))
        m.d.register_full_backward_hook(lambda module, gi, go: seen.append((tuple(gi[0].shape), tuple(go[0].shape))))
        mean_square(m).backward()
        return seen

    # a full backward hook is a custom autograd.Function on inputs and outputs: it gets whole tensors
    with pytest.warns(UserWarning, match="BackwardHookFunction has no tensor-parallel form"):
        ranks = on_ranks(MLP(), mean_square, use)
    for seen in ranks:
        assert seen == [(ShardedTensor, (2, 6, 128)), ((2, 6, 64), (2, 6, 10))]


def test_a_gradient_penalty() -> None:
    """Second derivatives through a whole cut model."""

    def penalty(m: Any) -> Tensor:
        x = values(2, 6, 32).to(next(m.parameters()).dtype).requires_grad_()
        loss = m(x).pow(2).mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.pow(2).sum()

    model = nn.Sequential(Gated(), Gated())
    plan = plan_tensor_parallel(model, lambda m: m(values(2, 6, 32)).pow(2).mean(), 2)
    assert plan.sharded_fraction > 0.99
    report = verify_tensor_plan(model, plan, penalty)
    assert report.worst < 1e-9, str(report)


def test_one_rank() -> None:
    model = NanoGPT()
    report = verify_tensor_plan(model, plan_tensor_parallel(model, next_token, 1), next_token)
    assert report.worst < 1e-9
    assert report.ledger.total().calls == 0


@pytest.mark.parametrize("how", ["wrapper", "method"])
def test_a_compiled_module_is_planned_and_cut_uncompiled(how: str) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise AssertionError("nothing may be compiled")

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    if how == "wrapper":
        model[1] = torch.compile(model[1], backend=refuse)
    else:
        model[1].compile(backend=refuse)

    def step(m: Any) -> Tensor:
        return m(values(2, 4)).sum()

    plan = plan_tensor_parallel(model, step, 2)
    assert plan.sharded_fraction > 0.9
    assert verify_tensor_plan(model, plan, step).worst < 1e-9


@pytest.mark.filterwarnings("ignore:.*no tensor-parallel form")  # the final sum, where ranks hold copies
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_gradient_hooks_see_and_change_the_whole_gradient(copies: int) -> None:
    """Also where ranks hold copies, each with a part of the gradient."""
    x, weight = torch.randn(6, 8).double(), torch.randn(6, 8).double()

    def run(wrap: Any) -> tuple[float, Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = wrap(leaf * 2)
        norms: list[float] = []
        y.register_hook(lambda g: norms.append(float(g.norm())))
        y.register_hook(lambda g: g * g.sum(0, keepdim=True).abs())
        y.retain_grad()
        (y.square() * wrap(weight)).sum().backward()
        return norms[0], whole(y.grad), leaf.grad

    norm, kept, gradient = run(lambda t: t)
    cut = Placement(1, (8,), copies=copies)

    def body(comm: ThreadCommunicator) -> Any:
        group = TensorGroup(comm)
        return run(lambda t: ShardedTensor(collectives.scatter(t, cut, group), cut, group))

    for got in run_simulated(4, body):
        assert abs(got[0] - norm) < 1e-12
        assert relative_error(got[1], kept) < 1e-12
        assert relative_error(got[2], gradient) < 1e-12


@pytest.mark.parametrize("name", ["timm", "nanogpt", "encoder"])
def test_small_parameters_share_one_all_reduce(name: str) -> None:
    """Norms under sequence parallelism, norms of heads: from the second forward on one all-reduce for all of them."""
    build, step, _ = PLAIN[name]
    torch.manual_seed(0)
    model = build().double()
    with Exactly():
        step(model).backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    plan = plan_tensor_parallel(model, step, 2, sequence=True)

    def use(comm: ThreadCommunicator) -> Any:
        twin, group = copy.deepcopy(model), TensorGroup(comm)
        rewrite(twin, plan, group)
        calls, gradients = [], []
        for _ in range(3):
            twin.zero_grad()
            with Exactly(), group.shared_entries.one_forward():
                loss = step(twin)
            comm.ledger.reset()
            loss.backward()
            calls.append(comm.ledger.total(op="all_reduce").calls)
            gradients.append({n: p.grad.clone() for n, p in twin.named_parameters()})
        with Exactly():  # nobody says where a forward begins
            step(twin).backward()
        gradients.append({n: p.grad / 2 for n, p in twin.named_parameters()})
        return calls, gradients

    with intercept_functions(function_guard, 1):
        ranks = run_simulated(2, use)
    for rank, (calls, gradients) in enumerate(ranks):
        assert calls[1] == calls[2]
        assert calls[1] <= calls[0] - 3, calls
        for got in gradients:
            for parameter, gradient in want.items():
                cut = plan.decisions[parameter].placement
                shard = gradient if cut is None else cut.to_local(gradient, rank, 2)
                assert relative_error(got[parameter], shard) < 1e-9, parameter
