from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_3d.comm import Pending
from lightning_3d.tensor import ColumnParallelLinear, TensorGroup, ThreadCommunicator, run_simulated
from lightning_3d.tensor.collectives import column_linear, copy_in, reduce_out
from lightning_3d.testing import relative_error

X = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
B = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def column_gradients(
    function: Callable[..., Tensor],
    *,
    frozen: bool = False,
    bias: bool = True,
    backward: Callable[[Tensor], None] | None = None,
) -> list[ThreadCommunicator]:
    """`function(layer, x)` with a column layer of 12 outputs against F.linear; x has a producer (as in a model)."""
    run = backward or (lambda y: y.backward())

    def reference() -> list[Tensor | None]:
        x, w, b = (t.clone().requires_grad_() for t in (X, W, B))
        w.requires_grad_(not frozen)
        run(function(lambda z: F.linear(z, w, b if bias else None), x * 1.0).pow(2).sum())
        return [x.grad, w.grad, b.grad if bias else None]

    def body(comm: ThreadCommunicator) -> Any:
        group = TensorGroup(comm)
        x = X.clone().requires_grad_()
        w, b = (t.chunk(2)[comm.rank].clone().requires_grad_() for t in (W, B))
        w.requires_grad_(not frozen)
        run(
            reduce_out(function(lambda z: column_linear(z, w, b if bias else None, group), x * 1.0).pow(2).sum(), group)
        )
        return [x.grad, w.grad, b.grad if bias else None], comm

    want, ranks = reference(), run_simulated(2, body)
    for rank, (got, _) in enumerate(ranks):
        assert relative_error(got[0], want[0]) < 1e-12
        for g, w in zip(got[1:], want[1:], strict=True):
            assert relative_error(g, None if w is None else w.chunk(2)[rank]) < 1e-12
    return [comm for _, comm in ranks]


def backward_reduces(ranks: list[ThreadCommunicator]) -> int:
    return ranks[0].ledger.total(op="all_reduce").calls - 1  # one for the loss


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_one_reader(frozen: bool, bias: bool) -> None:
    ranks = column_gradients(lambda layer, x: layer(x), frozen=frozen, bias=bias)
    assert backward_reduces(ranks) == 1


def test_readers_share_the_all_reduce() -> None:
    ranks = column_gradients(lambda layer, x: layer(x) * 2 + layer(x) + layer(x))
    assert backward_reduces(ranks) == 1


def test_a_reader_whose_output_is_not_used() -> None:
    def function(layer: Any, x: Tensor) -> Tensor:
        layer(x)
        return layer(x)

    assert backward_reduces(column_gradients(function)) == 1


def test_a_layer_used_twice_in_a_chain_of_other_operations() -> None:
    column_gradients(lambda layer, x: layer(x) + layer(torch.tanh(x)))


def test_an_input_changed_in_place_between_two_readers() -> None:
    def function(layer: Any, x: Tensor) -> Tensor:
        y = torch.sin(layer(x.clone()))
        x = x.mul_(2)
        return y + layer(x)

    column_gradients(function)


def test_stale_values_are_noticed() -> None:
    """As in plain PyTorch: changing in place what a layer saved for its backward is an error, not a wrong gradient."""

    def body(comm: ThreadCommunicator) -> None:
        x = X.clone().requires_grad_() * 1.0
        y = column_linear(x, W.chunk(2)[comm.rank].clone().requires_grad_(), None, TensorGroup(comm))
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    run_simulated(1, body)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_readers(reentrant: bool) -> None:
    def once(layer: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda z: torch.tanh(layer(z)), x, use_reentrant=reentrant)

    def twice(layer: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda z: torch.tanh(layer(z)) + layer(z), x, use_reentrant=reentrant)

    column_gradients(once)
    column_gradients(twice)


def test_a_graph_that_is_walked_twice() -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    column_gradients(lambda layer, x: layer(x), backward=twice)
    column_gradients(lambda layer, x: layer(x) + layer(x).sin(), backward=twice)


def test_second_derivatives() -> None:
    """A gradient penalty: the backward of every collective is differentiable."""

    def step(layer: Any, total: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        loss = total(torch.tanh(layer(x)).pow(2).sum())
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.pow(2).sum()

    for readers in (1, 2):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        step(lambda z: sum(F.linear(z, w) for _ in range(readers)), lambda t: t, x * 1.0).backward()  # noqa: B023

        def body(comm: ThreadCommunicator, readers: int = readers) -> Any:
            group = TensorGroup(comm)
            x, w = X.clone().requires_grad_(), W.chunk(2)[comm.rank].clone().requires_grad_()
            step(
                lambda z: sum(column_linear(z, w, None, group) for _ in range(readers)),
                lambda t: reduce_out(t, group),
                x * 1.0,
            ).backward()
            return x.grad, w.grad

        for rank, (dx, dw) in enumerate(run_simulated(2, body)):
            assert relative_error(dx, x.grad) < 1e-12
            assert relative_error(dw, w.grad.chunk(2)[rank]) < 1e-12


class Spy(ThreadCommunicator):
    """Notes when an all-reduce starts and when it is waited for."""

    events: list[str]

    def all_reduce_start(self, tensor: Tensor, op: Any = "sum") -> Pending:
        super().all_reduce_start(tensor, op).wait()
        self.events.append("start")
        return self

    def wait(self) -> None:
        self.events.append("wait")


def test_the_all_reduce_overlaps_the_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy.ring(1)[0]
    spy.events = []
    matmul = torch.matmul

    def noted(*args: Tensor) -> Tensor:
        spy.events.append("matmul")
        return matmul(*args)

    def body(_: ThreadCommunicator) -> None:
        spy._meeting.baton.acquire()
        y = column_linear(X.clone().requires_grad_() * 1.0, W.clone().requires_grad_(), None, TensorGroup(spy))
        monkeypatch.setattr(torch, "matmul", noted)
        y.sum().backward()

    run_simulated(1, body)
    assert spy.events == ["matmul", "start", "matmul", "wait"]


def test_the_memo_does_not_keep_activations_alive() -> None:
    group = TensorGroup(ThreadCommunicator.ring(1)[0], dry=True)
    gc.disable()
    try:
        x = X.clone().requires_grad_() * 1.0
        copy_in(x, group)
        alive = weakref.ref(x)
        del x
        assert alive() is None
    finally:
        gc.enable()


def test_a_leaf_gets_no_memo() -> None:
    group = TensorGroup(ThreadCommunicator.ring(1)[0], dry=True)
    parameter = torch.nn.Parameter(X.clone())
    copy_in(parameter, group)
    assert not parameter.__dict__


def test_results_allow_in_place_operations() -> None:
    """`y = proj(x); y += residual` is ordinary user code."""

    def body(comm: ThreadCommunicator) -> Tensor:
        y = reduce_out((X.clone().requires_grad_() * 2), TensorGroup(comm), fresh=True)
        y += 1
        y.sum().backward()
        return y.detach()

    for got in run_simulated(2, body):
        torch.testing.assert_close(got, X * 4 + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = torch.nn.Linear(8, 12)

    def run(layer: Any, group: TensorGroup | None) -> list[Tensor]:
        x = X.float().clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = layer(x * 1.0)
        out = y if group is None else y.local
        assert out.dtype == dtype
        out.float().pow(2).sum().backward()
        return [x.grad, layer._parameters["weight"].grad, layer._parameters["bias"].grad]

    def body(comm: ThreadCommunicator) -> list[Tensor]:
        group = TensorGroup(comm)
        torch.manual_seed(0)
        return run(ColumnParallelLinear(8, 12, group=group), group)

    want = run(whole, None)
    for rank, got in enumerate(run_simulated(2, body)):
        assert got[0].dtype == got[1].dtype == torch.float32
        assert relative_error(got[0], want[0]) < 0.02
        assert relative_error(got[1], want[1].chunk(2)[rank]) < 0.02
        assert relative_error(got[2], want[2].chunk(2)[rank]) < 0.02
