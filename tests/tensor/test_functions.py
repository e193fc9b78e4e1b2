from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_3d.probe import FakeParameters, intercept_functions
from lightning_3d.tensor import (
    Placement,
    ShardedTensor,
    TensorGroup,
    ThreadCommunicator,
    function_guard,
    map_local,
    register_rule,
    run_simulated,
)
from lightning_3d.tensor.functions import is_pointwise
from lightning_3d.tensor.registry import OWN_RULES
from tests.tensor.helpers import compare
from tests.tensor.models import MLP, Square

CUT = Placement(1, (8,))
X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Standardize(torch.autograd.Function):
    """Needs whole rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(-1, keepdim=True)


class Mixing(torch.autograd.Function):
    """Its values are pointwise, its gradient is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.cumsum(-1)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class ClippedAt(torch.autograd.Function):
    """The norm of the gradient counts, but only if it is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * torch.clamp(ctx.most / (grad.norm() + 1e-12), max=1.0), None


class ForMany(torch.autograd.Function):
    """Another thing for many elements than for few."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if x.numel() > 500 else x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 if grad.numel() > 500 else grad * 3


class Quantized(torch.autograd.Function):
    """Small values never meet the maximum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.abs().amax().clamp(min=8.0)
        return (x / scale * 127).round() * scale / 127

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(max=1e9) if bool(x.max() > 1e8) else x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Swish(torch.autograd.Function):
    """The usual kind, with temporaries and in-place operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x).copy_(x)
        out.sigmoid_().mul_(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return torch.where(x.isfinite(), grad * s * (1 + x * (1 - s)), 0.0)


def test_what_counts_only_for_large_values_or_many_of_them() -> None:
    """Broken before: one magnitude and 60 elements were tried, where these look pointwise."""
    for function, rest in ((ClippedAt, (10.0,)), (ClippedAt, (1e12,)), (Quantized, ()), (Branching, ())):
        assert not is_pointwise(function, rest)
    few, many = ((4, 8), (4, 4)), ((64, 16), (64, 8))
    assert is_pointwise(ForMany, (), None, few)
    assert is_pointwise(ForMany, (), None, many)  # both are many
    assert not is_pointwise(ForMany, (), None, ((64, 8), (64, 4)))
    assert is_pointwise(Swish, ())


def test_the_experiment() -> None:
    assert is_pointwise(Square, ())
    assert is_pointwise(Scale, (3.0,))
    assert not is_pointwise(Standardize, ())
    assert not is_pointwise(Mixing, ())
    assert not is_pointwise(Product, ())


def test_the_experiment_works_inside_a_probe() -> None:
    class Fresh(Square):
        pass

    with FakeParameters(MLP(), torch.device("cpu")):
        assert is_pointwise(Fresh, ())


@pytest.mark.parametrize("function", [Square.apply, lambda x: Scale.apply(x, 2.5)])
def test_pointwise_functions_run_on_the_shard(function: Any) -> None:
    ranks = compare(function, [X], [CUT], 2)
    assert ranks[0].ledger.total(op="all_gather").calls == 0


@pytest.mark.parametrize("function", [Standardize.apply, Mixing.apply, lambda x: Product.apply(x, x)])
def test_other_functions_gather(function: Any) -> None:
    with pytest.warns(UserWarning, match="not proved to act on each element alone"):
        compare(function, [X], [CUT], 2)


def test_a_function_named_like_an_operation_gathers_both_axes() -> None:
    """Broken before: of an activation cut along the sequence and another it was taken for that operation."""

    class add(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x + y.sum(-1, keepdim=True)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad, grad.sum(-1, keepdim=True).expand_as(grad)

    with pytest.warns(UserWarning, match="not proved to act on each element alone"):
        compare(add.apply, [X, X * 2], [Placement(0, (4,), axis="sequence"), CUT], 2)


def test_a_rule_for_a_function() -> None:
    @register_rule(Product)
    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        x, y = args
        return map_local(lambda t: func(t, y.local), x)

    try:
        ranks = compare(lambda x: Product.apply(x, x), [X], [CUT], 2)
        assert ranks[0].ledger.total(op="all_gather").calls == 0
    finally:
        del OWN_RULES[Product]


square = Square.apply


def test_an_apply_looked_up_before_is_guarded_too() -> None:
    """`swiglu = SwiGLU.apply` at import time is usual."""

    def body(comm: ThreadCommunicator) -> Tensor:
        leaf = X.chunk(2, 1)[comm.rank].clone().requires_grad_()
        with intercept_functions(function_guard, 1):
            square(ShardedTensor(leaf, CUT, TensorGroup(comm))).local.sum().backward()
        return leaf.grad

    assert torch.equal(torch.cat(run_simulated(2, body), 1), 2 * X)
