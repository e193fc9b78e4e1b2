"""In-place operations on cut activations and on views of them: whatever shares the storage must see them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.probe import intercept_functions
from lightning_3d.tensor import (
    TensorGroup,
    function_guard,
    plan_tensor_parallel,
    rewrite,
    run_simulated,
    verify_tensor_plan,
)
from lightning_3d.tensor.placement import Placement
from lightning_3d.testing import relative_error
from tests.tensor.helpers import compare

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda h: h,
    "view": lambda h: h.view(3, 5, 4, 4),
    "flat": lambda h: h.view(15, 16),
    "reshape": lambda h: h.reshape(3, 5, 8, 2),
    "unflatten": lambda h: h.unflatten(-1, (4, 4)),
    "transpose": lambda h: h.transpose(0, 2),
    "permute": lambda h: h.permute(2, 0, 1),
    "mT": lambda h: h.mT,
    "unsqueeze": lambda h: h.unsqueeze(1),
    "rows": lambda h: h[:, :3],
    "row": lambda h: h[1],
    "ellipsis": lambda h: h[..., :],
    "every other": lambda h: h[:, ::2],
    "features": lambda h: h[..., 4:12],
    "narrow": lambda h: h.narrow(1, 1, 2),
    "select": lambda h: h.select(0, 1),
    "chunk": lambda h: h.chunk(2, 1)[1],
    "split": lambda h: h.split([2, 3], 1)[0],
    "chunk features": lambda h: h.chunk(2, -1)[1],
    "unbind": lambda h: h.unbind(0)[2],
    "heads": lambda h: h.view(3, 5, 4, 4)[:, :, 1:3],
    "diagonal": lambda h: h.diagonal(0, 0, 1),
    "squeeze": lambda h: h.unsqueeze(0).squeeze(0),
    "flatten": lambda h: h.flatten(0, 1),
    "movedim": lambda h: h.movedim(-1, 0),
    "view_as": lambda h: h.view_as(h),
    "detached": lambda h: h.detach(),
    "alias": lambda h: h[:],
}
REFUSED = {
    *("chunk", "split", "chunk features", "unbind"),  # by torch: views of a function with several results
    *("features", "heads", "diagonal"),  # they are gathered
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda v: v.mul_(0.5),
    "add_": lambda v: v.add_(1.0),
    "clamp_": lambda v: v.clamp_(-0.5, 0.5),
    "relu": lambda v: F.relu(v, inplace=True),
    "leaky": lambda v: F.leaky_relu_(v, 0.1),
    "celu": lambda v: F.celu(v, 1.0, True),
    "rrelu": lambda v: F.rrelu(v, 0.1, 0.1, True, True),
    "setitem": lambda v: v.__setitem__(0, 2.0),
    "setitem all": lambda v: v.__setitem__(Ellipsis, v * v),
    "setitem mask": lambda v: v.__setitem__(v > 0, 0.0),
    "imul": lambda v: v.__imul__(2.0),
    "iadd whole": lambda v: v.__iadd__(torch.ones(v.shape[-1]).double()),
    "masked_fill_": lambda v: v.masked_fill_(v > 0, 0.0),
    "fill_": lambda v: v.fill_(0.3),
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(v * 3),
    "sigmoid_": lambda v: v.sigmoid_(),
    "cumsum_": lambda v: v.cumsum_(-1),
    "addcmul_": lambda v: v.addcmul_(v.detach().clone(), v.detach().clone()),
    "lerp_": lambda v: v.lerp_(torch.zeros(v.shape).double(), 0.3),
    "index_fill_": lambda v: v.index_fill_(0, torch.tensor([0]), 0.0),
    "bernoulli": lambda v: v.bernoulli_(1.0),
    "uniform": lambda v: v.uniform_(0.5, 0.5 + 1e-15),
    "dropout": lambda v: F.dropout(v, 1.0, True, True),
    "dropout_": lambda v: torch.dropout_(v, 1.0, True),
    "alpha": lambda v: F.alpha_dropout(v, 1.0, True, True),
    "feature": lambda v: F.feature_alpha_dropout(v, 1.0, True, True),
    "nan_to_num_": lambda v: v.nan_to_num_(),
    "tril_": lambda v: v.tril_(),
    "renorm": lambda v: v.div_(v.detach().norm()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", VIEWS)
def test_what_shares_the_storage_sees_it(view: str) -> None:
    """Broken before: dropout in place on a view made another tensor, and the activation stayed as it was."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 16).double()
    wrong, right = [], 0
    for (name, write), cut in itertools.product(WRITES.items(), (Placement(2, (16,)), Placement(2, (8, 8)))):

        def body(x: Tensor, write: Callable[[Tensor], Any] = write) -> Tensor:
            h = x * 1.0  # not a leaf
            write(VIEWS[view](h))
            return h * h

        try:
            body(x.clone().requires_grad_()).sum().backward()
        except RuntimeError:  # torch itself refuses it
            continue
        try:
            compare(body, [x], [cut], 2)
            right += 1
        except Exception as error:
            if "inside a custom Function" in str(error):
                continue  # the view had to be gathered: what is written into it would be lost, so autograd refuses it
            wrong.append(f"{name} on {cut.segments}: {type(error).__name__} {str(error)[:200]}")
    assert not wrong
    assert (right == 0) == (view in REFUSED)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        F.dropout(h.view(*h.shape[:-1], 4, 8), 0.5, True, True)
        F.dropout(h[:, :2], 0.5, True, True)
        self.zeros = float((h == 0).double().mean())
        y: Tensor = self.down(h)
        return y


class Logits(nn.Module):
    """A part of the logits that has to be gathered is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 80)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        logits.unfold(-1, 8, 8).mul_(0.5)
        y: Tensor = logits
        return y


def test_dropout_in_place_drops() -> None:
    """By its result: about five eighths of the activation are zero, on every rank."""
    torch.manual_seed(0)
    model, x = Dropping().double(), torch.randn(4, 4, 8).double()

    def step(m: Any) -> Tensor:
        return m(x).square().mean()

    plan = plan_tensor_parallel(model, step, 2)
    assert plan.decisions["up.weight"].kind == "column"

    def body(comm: Any) -> float:
        cut = Dropping().double()
        rewrite(cut, plan, TensorGroup(comm))
        step(cut)
        return cut.zeros

    with intercept_functions(function_guard, 1):
        for zeros in run_simulated(2, body):
            assert 0.5 < zeros < 0.75


def test_a_write_into_a_gathered_part_leaves_the_layer_whole() -> None:
    torch.manual_seed(0)
    model, x = Logits().double(), torch.randn(4, 8).double()

    def step(m: Any) -> Tensor:
        return F.cross_entropy(m(x), torch.arange(4))

    plan = plan_tensor_parallel(model, step, 2)
    assert plan.decisions["head.weight"].kind == "replicated"
    assert "in place" in plan.decisions["head.weight"].reason
    original = copy.deepcopy(model)
    step(original).backward()

    def body(comm: Any) -> Any:
        cut = copy.deepcopy(model)
        rewrite(cut, plan, TensorGroup(comm))
        step(cut).backward()
        return cut.head.weight.grad

    with intercept_functions(function_guard, 1):
        for gradient in run_simulated(2, body):
            assert relative_error(gradient, original.head.weight.grad) < 1e-12


class InPlace(nn.Module):
    """Usual code: in place on the output of a layer with a bias, of three dims, and on views of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.mid, self.down = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 32)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        v = h.view(*h.shape[:-1], 4, 8)
        kinds: dict[str, Callable[[], Any]] = {
            "relu": lambda: F.relu(h, inplace=True),
            "view": lambda: v.mul_(0.5),
            "slice": lambda: h[:, 1:].mul_(2.0),
            "setitem": lambda: h.__setitem__((slice(None), 0), 0.0),
            "heads": lambda: v[:, :, :, 2:5].zero_(),
            "iadd": lambda: h.__iadd__(h.detach()),
        }
        kinds[self.kind]()
        out = self.mid(h)
        out += x  # the output of a row layer
        F.relu(out, inplace=True)
        y: Tensor = self.last(F.relu_(self.down(out)))
        return y


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["relu", "view", "slice", "setitem", "heads", "iadd"])
def test_in_place_after_a_layer(kind: str, sequence: bool) -> None:
    """Broken before: "Output 0 of _ColumnLinear is a view and is being modified inplace"."""
    torch.manual_seed(0)
    model, x = InPlace(kind).double(), torch.randn(4, 6, 8).double()

    def step(m: Any) -> Tensor:
        return m(x).square().mean()

    plan = plan_tensor_parallel(model, step, 2, sequence=sequence)
    assert plan.sharded_fraction > 0.8
    verify_tensor_plan(model, plan, step).raise_if_wrong()
