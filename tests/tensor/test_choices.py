"""Which cut a weight gets, in small nets: one idea each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.tensor import Placement, plan_tensor_parallel, verify_tensor_plan
from tests.tensor.helpers import EXACT
from tests.tensor.models import Step, like, mean_square, tokens, values


def planned(model: nn.Module, step: Step, size: int = 2) -> Any:
    plan = plan_tensor_parallel(model, step, size)
    report = verify_tensor_plan(model, plan, step)
    assert report.worst <= EXACT, str(report)
    assert report.gathers == 0
    return plan.decisions


@pytest.mark.parametrize(("classes", "kind"), [(101, "column"), (10, "replicated")])
def test_a_head_is_known_by_the_loss_that_takes_its_logits(classes: int, kind: str) -> None:
    """Whatever its shape, and though another layer is used after it."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, classes), nn.Linear(64, classes)

        def forward(self, x: Tensor) -> Tensor:
            target = tokens(classes, 6)
            return F.cross_entropy(self.first(x), target) + F.cross_entropy(self.second(x), target)

    decisions = planned(TwoHeads(), lambda m: m(like(m, values(6, 64))))
    assert decisions["first.weight"].kind == kind
    assert decisions["second.weight"].kind == kind


def test_rows_of_a_table_are_cut_as_the_activation_they_meet() -> None:
    """Biases of experts, picked by the expert of each token."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.bias = nn.Linear(32, 64, bias=False), nn.Parameter(torch.randn(3, 64))
            self.down = nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x) + self.bias[tokens(3, 2, 6)]
            return self.down(hidden.relu())

    decisions = planned(Experts(), mean_square)
    assert decisions["bias"].placement == Placement(1, (64,))
    assert "its rows meet the cut output of up.weight" in decisions["bias"].reason


def test_a_piece_that_is_split_again_refines_the_segments() -> None:
    """A fused projection as in state-space blocks: (gate | values and keys | step), the middle one split later."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(32, 24 + 32 + 8), nn.Linear(16, 32)
            self.conv = nn.Conv1d(32, 32, 3, padding=1, groups=32)

        def forward(self, x: Tensor) -> Tensor:
            gate, middle, step = self.enter(x).split([24, 32, 8], -1)
            middle = self.conv(middle.transpose(1, 2)).transpose(1, 2)
            value, key = middle.split([16, 16], -1)
            mixed = value * key.sigmoid() * gate[..., :16].tanh() + step.repeat_interleave(2, -1)
            return self.leave(mixed)

    decisions = planned(Fused(), mean_square)
    assert decisions["enter.weight"].kind == "column"
    assert decisions["enter.weight"].placement.segments == (16, 8, 16, 16, 8)
    assert decisions["conv.weight"].placement == Placement(0, (16, 16))
    assert decisions["leave.weight"].kind == "row"


def test_a_vector_made_of_parameters_may_scale_a_cut_activation() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.scale = nn.Linear(32, 64), nn.Linear(64, 32), nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x) * (self.scale * 3).square())

    assert planned(Scaled(), mean_square)["up.weight"].kind == "column"


def test_a_convolution_pair_is_cut_over_its_channels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 3, 1))
    decisions = planned(model, lambda m: m(like(m, values(2, 3, 8, 8))).pow(2).mean())
    assert decisions["0.weight"].kind == decisions["0.bias"].kind == "column"
    assert decisions["4.weight"].kind == "row"
    assert decisions["4.bias"].kind == "replicated"
