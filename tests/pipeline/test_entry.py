"""Received values in a window's graph: where their gradients go, and what they must not share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_3d.pipeline.entry import Arrivals, entry
from lightning_3d.pipeline.split_backward import backward_from, edge_of

FIRST, SECOND = (0, 0), (1, 0)


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


class Delivered:
    """Keeps what a message keeps: the memory, not the tensor."""

    def __init__(self) -> None:
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.calls = 0

    def __call__(self, gradients: dict[tuple[int, int], Tensor]) -> None:
        self.calls += 1
        self.gradients = {vid: gradient.detach() for vid, gradient in gradients.items()}


def _backward(value: Tensor, arrivals: Arrivals, received: dict[tuple[int, int], Tensor]) -> Delivered:
    delivered = Delivered()
    arrivals.expect(received, delivered)
    backward_from([edge_of(value)], [torch.ones_like(value)])
    arrivals.finish()
    return delivered


def test_a_weight_that_gets_the_same_gradient_does_not_share_its_memory() -> None:
    """Microbatches add to the weight's gradient while the message is still on its way."""
    leaf, arrivals, weight = _leaf(2, 3), Arrivals(), nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    delivered = _backward(((entry(leaf, arrivals, FIRST) + weight.view(2, 3)) * 2).sum(), arrivals, {FIRST: leaf})
    assert weight.grad is not None
    weight.grad.add_(100)
    assert torch.equal(delivered.gradients[FIRST], torch.full_like(leaf, 2))
    assert leaf.grad is None


def test_what_is_read_without_gradients_first_may_be_used_with_them() -> None:
    leaf, arrivals = _leaf(3), Arrivals()
    with torch.no_grad():
        value = entry(leaf, arrivals, FIRST)
        scale = value.abs().max()
    delivered = _backward((value / scale).sum(), arrivals, {FIRST: leaf})
    assert torch.allclose(delivered.gradients[FIRST], 1 / scale.expand(3))


def test_a_change_in_place_is_followed() -> None:
    leaf, arrivals = _leaf(3), Arrivals()
    value = entry(leaf, arrivals, FIRST)
    value.mul_(3)
    delivered = _backward((value**2).sum(), arrivals, {FIRST: leaf})
    assert torch.allclose(delivered.gradients[FIRST], 6 * value.detach())


def test_what_is_not_used_gets_zeros_after_the_backward_and_all_go_in_one_message() -> None:
    used, unused, arrivals = _leaf(3), _leaf(2), Arrivals()
    value = entry(used, arrivals, FIRST)
    entry(unused, arrivals, SECOND)
    delivered = _backward((value * value).sum(), arrivals, {FIRST: used, SECOND: unused})
    assert delivered.calls == 1
    assert torch.allclose(delivered.gradients[FIRST], 2 * used.detach())
    assert torch.equal(delivered.gradients[SECOND], torch.zeros(2, dtype=torch.float64))


def test_the_last_use_decides_when_the_gradient_is_complete() -> None:
    leaf, arrivals = _leaf(4), Arrivals()
    value = entry(leaf, arrivals, FIRST)
    delivered = _backward((value.sin() + value.cos() * 2).sum(), arrivals, {FIRST: leaf})
    assert delivered.calls == 1
    assert torch.allclose(delivered.gradients[FIRST], leaf.detach().cos() - 2 * leaf.detach().sin())
