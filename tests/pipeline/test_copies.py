"""What is taken for a copy of weights that are trained, and what is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_3d.pipeline.atoms import find_atoms
from lightning_3d.pipeline.copies import copies_beside_trained
from lightning_3d.pipeline.trace import trace


def net(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))


class Two(nn.Module):
    """`model` is trained, `other` computes a target."""

    def __init__(self, other: nn.Module, graph: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.graph = net(), graph
        self.other = other

    def step(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.graph):
            target = self.other(x)
        return (self.model(x) - target).square().mean()


def copied() -> nn.Module:
    torch.manual_seed(0)
    return net()


def found(module: Two) -> dict[str, str]:
    step = lambda: module.step(torch.ones(2, 4))  # noqa: E731
    return copies_beside_trained(module, trace(module, find_atoms(module, 2), step))


@pytest.mark.parametrize(
    ("module", "copies"),
    [
        (Two(copied()), 4),
        (Two(net().requires_grad_(False)), 4),  # read from a checkpoint: beside the model, and alike
        (Two(AveragedModel(copied())), 4),
        (Two(nn.Sequential(copied(), nn.Tanh())), 4),
        (Two(nn.Sequential(net(), nn.Tanh())), 0),
        (Two(net(5)), 0),
        (Two(copied(), graph=True), 0),
    ],
)
def test_what_is_a_copy(module: Two, copies: int) -> None:
    got = found(module)
    assert len(got) == copies
    assert all(name.startswith("other.") and original.startswith("model.") for name, original in got.items())
    assert all(module.get_parameter(a).shape == module.get_parameter(b).shape for a, b in got.items())


def test_equal_blocks_of_one_stack_are_no_copies() -> None:
    """`nn.TransformerEncoder` copies its layer; some may be frozen, or left out of a step."""
    block = nn.Linear(4, 4)
    module = Two(net(5))
    module.model = nn.Sequential(*(copy.deepcopy(block) for _ in range(4)))
    module.model[0].requires_grad_(False)
    assert found(module) == {}
