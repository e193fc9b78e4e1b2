from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import TensorPlanError
from lightning_3d.tensor import (
    ColumnParallelLinear,
    Decision,
    Placement,
    RowParallelLinear,
    ShardedTensor,
    TensorGroup,
    TensorPlan,
    ThreadCommunicator,
    VocabParallelEmbedding,
    original_class,
    plan_tensor_parallel,
    rewrite,
    run_simulated,
    verify_tensor_plan,
)
from lightning_3d.testing import relative_error
from tests.tensor.models import values


class ByHand(nn.Module):
    """A user who writes the parallel layers himself."""

    def __init__(self, group: Any = None, **options: Any) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(13, 8, group=group)
        self.up = ColumnParallelLinear(8, 32, group=group)
        self.down = RowParallelLinear(32, 8, group=group)
        self.head = ColumnParallelLinear(8, 6, gather_output=True, group=group, **options)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.down(F.gelu(self.up(self.embed(index)))))


INDEX = torch.tensor([[0, 3, 12], [7, 1, 5]])


def hand_step(model: Any) -> Tensor:
    return model(INDEX).pow(2).sum()


def test_cut_at_once_equals_whole_layers() -> None:
    torch.manual_seed(0)
    whole = ByHand().double()
    assert type(whole.up(torch.randn(2, 8).double())) is Tensor, "without a group it is an ordinary layer"
    hand_step(whole).backward()

    def body(comm: ThreadCommunicator) -> Any:
        torch.manual_seed(0)
        model = ByHand(comm).double()
        out = model(INDEX)
        assert type(out) is Tensor
        assert model.up.out_features == 32
        assert model.down.in_features == 32
        assert model.embed.num_embeddings == 13
        assert model.up.weight.shape == (32, 8)
        assert model.up._parameters["weight"].shape == (16, 8)
        out.pow(2).sum().backward()
        return out.detach(), {n: (p.grad, getattr(p, "placement", None)) for n, p in model.named_parameters()}

    ranks = run_simulated(2, body)
    assert all(relative_error(out, whole(INDEX)) < 1e-12 for out, _ in ranks)
    for name, parameter in whole.named_parameters():
        cut = ranks[0][1][name][1]
        grads = [r[1][name][0] for r in ranks]
        for got in [cut.to_global(grads, 2)] if cut else grads:
            assert relative_error(got, parameter.grad) < 1e-12, name


def test_declared_layers_are_followed_by_the_planner() -> None:
    model = ByHand()
    plan = plan_tensor_parallel(model, hand_step, 2)
    kinds = {n: d.kind for n, d in plan.decisions.items()}
    assert kinds == {
        "embed.weight": "vocab",
        "up.weight": "column",
        "up.bias": "column",
        "down.weight": "row",
        "down.bias": "replicated",
        "head.weight": "column",
        "head.bias": "column",
    }
    assert verify_tensor_plan(model, plan, hand_step).worst < 1e-9
    with pytest.raises(TensorPlanError, match=r"contradicts up\.weight, which is declared as 'column'"):
        plan_tensor_parallel(model, hand_step, 2, overrides={"up": "replicate"})


@pytest.mark.parametrize("chunk", [32, 33])
def test_a_row_layer_takes_a_whole_input(chunk: int) -> None:
    def body(comm: ThreadCommunicator) -> Any:
        torch.manual_seed(0)
        layer = RowParallelLinear(chunk, 3, group=comm).double()
        x = torch.ones(2, chunk, dtype=torch.float64, requires_grad=True)
        layer(x).pow(2).sum().backward()
        return x.grad

    if chunk % 2:
        with pytest.raises(TensorPlanError, match="in_features is 33, which cannot be cut into 2 equal parts"):
            run_simulated(2, body)
        return
    torch.manual_seed(0)
    x = torch.ones(2, chunk, dtype=torch.float64, requires_grad=True)
    nn.Linear(chunk, 3).double()(x).pow(2).sum().backward()
    assert all(relative_error(g, x.grad) < 1e-12 for g in run_simulated(2, body))


def test_the_bias_of_a_row_layer_is_added_once() -> None:
    """Public reports of bias times tp: Linear(8, 8), bias 100, input 0 must give 100."""

    def body(comm: ThreadCommunicator) -> Any:
        layer = RowParallelLinear(8, 8, group=comm)
        nn.init.constant_(layer._parameters["bias"], 100.0)
        out = layer(torch.zeros(1, 8))
        out.sum().backward()
        return out.detach(), layer._parameters["bias"].grad

    for out, grad in run_simulated(2, body):
        assert torch.equal(out, torch.full((1, 8), 100.0))
        assert torch.equal(grad, torch.ones(8))


def test_collectives_of_a_pair() -> None:
    def body(comm: ThreadCommunicator) -> Any:
        group = TensorGroup(comm)
        up, down = ColumnParallelLinear(8, 32, group=group), RowParallelLinear(32, 8, group=group)
        x = torch.randn(5, 8, requires_grad=True)
        with comm.ledger.during("forward"):
            y = down(up(x))
        with comm.ledger.during("backward"):
            y.sum().backward()
        return comm.ledger.traffic

    traffic = run_simulated(2, body)[0]
    assert {key: (t.calls, t.elements) for key, t in traffic.items()} == {
        ("forward", "tp", "all_reduce"): (1, 5 * 8),
        ("backward", "tp", "all_reduce"): (1, 5 * 8),
    }


class Scaled(nn.Linear):
    """A user's subclass with its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.shape == (self.out_features, self.in_features)
        return F.linear(x, self.weight, self.bias)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(70, 8)
        self.a, self.b = nn.Linear(8, 16), Scaled(16, 8)
        self.c, self.d = Functional(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((x[..., 0] > 0).long()) + x
        x = self.b(F.relu(self.a(x)))
        return self.d(F.gelu(self.c(x)))


def mixed_step(model: Any) -> Tensor:
    return model(values(3, 8).to(model.a.bias.dtype)).pow(2).sum()


def test_classes_after_the_rewrite() -> None:
    model = Mixed()
    plan = plan_tensor_parallel(model, mixed_step, 2)
    assert verify_tensor_plan(model, plan, mixed_step).worst < 1e-9
    comm = ThreadCommunicator.ring(2)[0]
    rewrite(model, plan, comm)
    assert type(model.a) is ColumnParallelLinear
    assert type(model.table) is VocabParallelEmbedding
    assert type(model.b).__name__ == "Scaled"
    assert isinstance(model.b, Scaled)
    assert isinstance(model.b, RowParallelLinear)
    assert isinstance(model.c, Functional)
    assert isinstance(model.c, ColumnParallelLinear)
    assert type(model.d) is RowParallelLinear
    assert original_class(model.a) is nn.Linear
    assert original_class(model.b) is Scaled
    assert type(model).__module__ == Mixed.__module__
    assert "rank 0 of 2" in repr(model.a)
    assert "not cut yet" in repr(ColumnParallelLinear(2, 2))
    assert isinstance(model.a.weight, ShardedTensor)
    assert model.a.weight.shape == (16, 8)
    assert dict(model.named_parameters())["a.weight"] is model.a._parameters["weight"]
    assert list(model.state_dict()) == list(Mixed().state_dict())


@pytest.mark.filterwarnings("ignore:.*no tensor-parallel form")
def test_columns_with_a_bias_cut_otherwise() -> None:
    """Any placements of weight and bias: only slower."""
    cuts = [
        {"weight": Placement(0, (8,))},
        {"bias": Placement(0, (8,))},
        {"weight": Placement(0, (4, 4)), "bias": Placement(0, (8,))},
        {"weight": Placement(1, (6,)), "bias": Placement(0, (8,))},
        {"weight": Placement(1, (2, 4)), "bias": Placement(0, (4, 4))},
        {"weight": Placement(0, (8,)), "bias": Placement(0, (8,))},
    ]

    def step(m: Any) -> Tensor:
        return (m(values(3, 6).to(next(m.parameters()).dtype)) * 3).pow(2).sum()

    for chosen in cuts:
        model = nn.Sequential(nn.Linear(6, 8))
        plan = TensorPlan(2)
        for name, parameter in model.named_parameters():
            cut = chosen.get(name[2:])
            plan.decisions[name] = Decision("column", cut) if cut else Decision("replicated")
            plan.shapes[name] = tuple(parameter.shape)
        assert verify_tensor_plan(model, plan, step).worst < 1e-9
