"""A backward in two halves gives what one backward gives, and leaves the products' weights for the second half."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.comm import Communicator, Ledger
from lightning_3d.pipeline.split_backward import edge_of, input_half
from lightning_3d.tensor import TensorGroup
from lightning_3d.tensor.collectives import column_linear
from lightning_3d.testing import relative_error


class Net(nn.Module):
    """Attention, tied and loose weights, hooks on activations, a convolution, weight norm, a side output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.one, self.tied = nn.Linear(16, 16), nn.Linear(16, 16)
        self.table, self.loose = nn.Parameter(torch.randn(5, 16)), nn.Parameter(torch.randn(16, 16))
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h = self.tied(F.gelu(self.one(self.encoder(x))))
        h = self.tied(h) + self.table[torch.tensor([1, 1, 2])]
        h = self.normed(self.conv(h.transpose(1, 2)).transpose(1, 2))
        side = (self.loose @ self.loose).sum() * self.table.sum()
        h = h @ self.loose + y @ self.loose
        h.register_hook(lambda g: g * 3)
        out = self.one(h)
        out.register_hook(lambda g: g * 2)
        return out, side, y * 2


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, False)])
def test_two_halves_are_one_backward(given: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    net, inputs = Net().double(), [torch.randn(2, 3, 16).double() for _ in range(2)]
    factors: list[Tensor] = []

    def pairs() -> tuple[list[Any], list[Tensor]]:
        leaves = [x.clone().requires_grad_(wants) for x, wants in zip(inputs, given, strict=True)]
        outputs = [x for x in net(*leaves) if x.requires_grad]
        factors.extend(torch.randn_like(x) for x in outputs[len(factors) :])
        return [(edge_of(x), g) for x, g in zip(outputs, factors, strict=True)], leaves

    starts, leaves = pairs()
    torch.autograd.backward([e for e, _ in starts], [g for _, g in starts])
    want = {n: p.grad for n, p in net.named_parameters()}
    net.zero_grad()
    starts, again = pairs()
    half = input_half(starts, again)
    first = {n for n, p in net.named_parameters() if p.grad is not None}
    for leaf, other in zip(leaves, again, strict=True):
        assert (leaf.grad is None) == (other.grad is None)
        assert leaf.grad is None or relative_error(other.grad, leaf.grad) <= 1e-12
    half.run()
    for name, parameter in net.named_parameters():
        assert relative_error(parameter.grad, want[name]) <= 1e-12, name
    waits = {"encoder.linear1.weight", "encoder.linear2.weight", "encoder.self_attn.in_proj_weight", "conv.weight"}
    assert first.isdisjoint(waits), first
    if not any(given):
        assert not first


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.group = TensorGroup(Communicator("tp", 0, 1, Ledger()))

    def layer(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return column_linear(x, linear.weight, linear.bias, self.group)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x * 1, self.a).tanh()
        x = self.layer(x, self.b) + self.layer(x, self.c)  # two readers of one value
        return self.layer(x, self.b).sin() * self.c.weight.sum()  # b is used twice, c otherwise as well


def test_column_layers_leave_their_weights() -> None:
    torch.manual_seed(0)
    net, x = Columns().double(), torch.randn(3, 8).double().requires_grad_()
    net(x).sum().backward()
    want, wanted = {n: p.grad for n, p in net.named_parameters()}, x.grad
    net.zero_grad()
    x.grad = None
    out = net(x)
    half = input_half([(edge_of(out), torch.ones_like(out))], [x])
    assert {n for n, p in net.named_parameters() if p.grad is None} == {"a.weight", "a.bias"}
    assert relative_error(x.grad, wanted) <= 1e-12
    half.run()
    for name, parameter in net.named_parameters():
        assert relative_error(parameter.grad, want[name]) <= 1e-12, name


class Hooked(nn.Module):
    """Every way a product meets a weight: itself, transposed, an expression of it, and both at once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(8, 8), nn.Conv1d(1, 1, 3, padding=1)
        self.plain, self.masked, self.twice, self.split = (nn.Parameter(torch.randn(8, 8)) for _ in range(4))
        self.calls: dict[str, int] = {}
        for name, parameter in self.named_parameters():
            parameter.register_hook(self.clamp(name))

    def clamp(self, name: str) -> Any:
        """Not linear, so that a hook on a part of a gradient is seen."""

        def hook(gradient: Tensor) -> Tensor:
            self.calls[name] = self.calls.get(name, 0) + 1
            return gradient.clamp(-0.3, 0.4) * 3

        return hook

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.linear(x.tanh())[:, None])[:, 0] @ self.plain
        masked, shared = self.masked * torch.ones(8, 8).triu(), self.split * 2
        for expression in (masked, shared):
            expression.register_hook(lambda g: g.clamp(-0.2, 0.3) * 2)
        x = x @ masked + (x @ self.twice) @ self.twice.T
        return x @ shared + (x @ (shared + 1)).sin()


def test_hooks_on_weights_fire_once_on_the_whole_gradient() -> None:
    """Broken before: on a weight that is itself an operand (a bias, `x @ w`, a kernel) a hook ran twice."""
    torch.manual_seed(0)
    net, x = Hooked().double(), torch.randn(3, 8).double().requires_grad_()
    net(x).sum().backward()
    want, calls = {n: p.grad for n, p in net.named_parameters()}, dict(net.calls)
    net.zero_grad()
    net.calls.clear()
    x.grad = None
    out = net(x)
    half = input_half([(edge_of(out), torch.ones_like(out))], [x])
    assert net.plain.grad is None
    half.run()
    for name, parameter in net.named_parameters():
        assert relative_error(parameter.grad, want[name]) <= 1e-12, name
    assert net.calls == calls
