"""ZeRO 0 to 3 against one process on the global batch: float64, uneven shapes, ties, frozen and unused parameters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.comm import ProcessCommunicator
from lightning_3d.errors import ConfigurationError
from lightning_3d.testing import relative_error, run_distributed
from lightning_3d.zero import Share, Units, Zero, classify, scale_gradients, total_norm

CPU = torch.device("cpu")


@functools.cache
def control() -> ProcessCommunicator:
    """Flags travel while reductions are under way, so they have a group of their own."""
    return ProcessCommunicator("control", dist.new_group(), CPU)


@functools.cache
def gathers() -> ProcessCommunicator:
    return ProcessCommunicator("dp", dist.new_group(), CPU)


def share_of(named: dict[str, nn.Parameter], axis: ProcessCommunicator, **more: Any) -> Share:
    return Share(named, {id(p): n for n, p in named.items()}, set(named), axis, control(), **more)


def units_of(net: nn.Module, whole: bool) -> Units:
    names = {n: [f"{n}.weight", f"{n}.bias"] for n in ("up", "frozen", "sometimes", "norm", "down") if not whole}
    return Units({n: net.get_submodule(n) for n in names}, names.values(), gathers(), control())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.up = nn.Linear(7, 11)
        self.frozen = nn.Linear(11, 11)
        self.frozen.requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.sometimes = nn.Linear(11, 11)
        self.norm = nn.LayerNorm(11)
        self.down = nn.Linear(11, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor, sometimes: Tensor) -> Tensor:
        h = self.norm(self.frozen(torch.tanh(self.up(self.embed(x)))))
        if sometimes.any():
            h = h + self.sometimes(h) * sometimes.view(-1, 1, 1)
        return self.head(self.down(h)) * self.scale


OPTIMIZERS = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
"""All that torch has."""


def make_net() -> Net:
    torch.manual_seed(3)
    net = Net().double()
    for p in net.parameters():
        if p.ndim == 1:
            nn.init.normal_(p, std=0.5)
    return net


def make_optimizer(kind: str, net: Net) -> torch.optim.Optimizer:
    matrices = [p for p in net.parameters() if p.ndim >= 2]
    rest = [p for p in net.parameters() if p.ndim < 2]
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    if kind == "adamw":
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": []}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.05)
    if kind == "adagrad":  # makes its state when it is built
        return torch.optim.Adagrad(net.parameters(), lr=0.05)
    if kind == "muon":
        return torch.optim.Muon(matrices, lr=0.05)
    made: torch.optim.Optimizer = OPTIMIZERS[kind](net.parameters(), lr=0.05)
    return made


def batch(step: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 + step)
    x = torch.randint(0, 13, (size, 5), generator=g)
    y = torch.randint(0, 13, (size, 5), generator=g)
    # the optional layer is used on odd steps, and there by the first samples (so by some ranks) only
    sometimes = (torch.arange(size) < size // 3) & bool(step % 2)
    return x, y, sometimes


def loss_of(net: Net, part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, y, sometimes = part
    return nn.functional.cross_entropy(net(x, sometimes.double()).flatten(0, 1), y.flatten())


def one_process(kind: str, accumulate: int, clip: float | None, set_to_none: bool, size: int, steps: int) -> Any:
    net = make_net()
    optimizer = make_optimizer(kind, net)
    norms = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none)
        for k in range(accumulate):
            (loss_of(net, batch(step * accumulate + k, size)) / accumulate).backward()
        if clip is not None:
            params = [p for g in optimizer.param_groups for p in g["params"]]
            norms.append(float(nn.utils.clip_grad_norm_(params, clip)))
        optimizer.step()
    return dict(net.named_parameters()), norms


def reduced(zero: Zero, forward: Callable[[], Tensor], last: bool) -> None:
    """A forward and its backward, as the strategy runs them without a pipeline."""
    with zero.units.active() if zero.units is not None else nullcontext():
        loss = forward()
    if last or zero.reduces_always:
        zero.start_reducing()
    with zero.gathering_backward(last=True):
        loss.backward()
    if last or zero.reduces_always:
        zero.finish(final=last)
    if last:
        zero.publish()


def parallel(case: tuple[Any, ...], size: int, steps: int) -> float:
    kind, accumulate, clip, set_to_none, stage, pipeline_order = case
    net = make_net()
    optimizer = make_optimizer(kind, net)
    before = dict(net.named_parameters())
    axis = ProcessCommunicator("dp", dist.group.WORLD, CPU)
    windows = {n: {0} for n in before if not n.startswith("scale")}  # what is not known comes at the end
    units = units_of(net, whole=pipeline_order) if stage == 3 else None
    share = share_of(before, axis, windows=windows, units=units)
    zero = Zero([optimizer], share, stage, publish_later=pipeline_order, bucket_bytes=600)
    rank, world = dist.get_rank(), dist.get_world_size()
    norms = []
    for step in range(steps):
        if not pipeline_order:
            optimizer.zero_grad(set_to_none)
        for k in range(accumulate):
            zero.begin()
            if units is not None:
                units.begin(training=True)
            part = tuple(t.chunk(world)[rank] for t in batch(step * accumulate + k, size))
            last = k == accumulate - 1
            if pipeline_order:
                # two microbatches are run before Lightning's zero_grad, gradients published after it
                zero.set_aside(keep=k == 0)
                halves = list(zip(*(t.chunk(2) for t in part), strict=True))
                for i, half in enumerate(halves):
                    if last and i == len(halves) - 1 and not zero.reduces_always:
                        zero.start_reducing()
                    weight = half[0].shape[0] / part[0].shape[0]
                    with zero.backward_of(0) if zero.reduces_always else nullcontext():
                        (loss_of(net, half) * weight / accumulate).backward()
                if last or zero.reduces_always:
                    zero.finish(final=last)
                if units is not None:
                    units.end(close=True)
                zero.put_back()
                if k == 0:
                    optimizer.zero_grad(set_to_none)
                if last:
                    zero.publish(1.0)
            else:
                reduced(zero, lambda part=part: loss_of(net, part) / accumulate, last)
        if clip is not None:
            params = [p for g in optimizer.param_groups for p in g["params"]]
            if stage:
                norm = total_norm([p.grad for p in params if p.grad is not None], axis, CPU)
            else:
                solo = type(axis).__mro__[1]("dp")
                norm = total_norm([p.grad for p in params if p.grad is not None], solo, CPU)
            norms.append(float(norm))
            scale_gradients(params, norm, clip)
        optimizer.step()
    zero.release()  # stage 3: whole again
    after = dict(net.named_parameters())
    assert all(after[n] is before[n] for n in before), "parameter identity was lost"
    want, want_norms = one_process(kind, accumulate, clip, set_to_none, size, steps)
    worst = max(relative_error(after[n], want[n]) for n in want)
    if norms:
        worst = max(worst, relative_error(torch.tensor(norms), torch.tensor(want_norms)))
    flat = torch.cat([p.detach().flatten() for p in after.values()])
    everybody = axis.all_gather(flat)
    assert all(torch.equal(e, flat) for e in everybody), "replicas differ"
    return worst


CASES = [
    case
    for case in product(
        ["sgd", "adamw", "adagrad", "muon", "adafactor"],
        [1, 3],
        [None, 0.3],
        [True, False],
        [0, 1, 2, 3],
        [False, True],
    )
    if (case[1] == 3) == (case[2] is not None)
]


REFUSED = {"lbfgs", "sparseadam"}
"""What re-evaluates the model, and what takes sparse gradients only (below)."""
REST = [
    (kind, 1, None, True, stage, False)
    for kind in sorted(OPTIMIZERS.keys() - REFUSED - {case[0] for case in CASES})
    for stage in (1, 3)
]


def run_cases(cases: list[Any], size: int, steps: int) -> dict[str, float]:
    return {repr(case): parallel(case, size, steps) for case in cases}


ODD = [case for case in CASES if case[0] in ("adamw", "muon")]


@pytest.mark.parametrize(("world", "cases"), [(2, CASES), (3, ODD), (2, REST)], ids=["2", "3", "all of torch"])
def test_equals_one_process(world: int, cases: list[Any]) -> None:
    results = run_distributed(run_cases, world, cases, 12, 4, timeout=120)
    assert len(results[0]) == len(cases)
    bad = {case: error for result in results for case, error in result.items() if not error <= 1e-12}
    assert not bad


def make_tables() -> nn.ModuleDict:
    """Tables of which a batch uses some rows, some replica none of one of them."""
    torch.manual_seed(5)
    tables = {name: nn.Embedding(17, 6, sparse=True) for name in ("user", "item", "rare")}
    return nn.ModuleDict(tables).double()


def loss_of_tables(tables: nn.ModuleDict, users: Tensor, items: Tensor, step: int) -> Tensor:
    error = (tables["user"](users) * tables["item"](items)).sum(-1) - 1.0
    if step % 3 == 1 and bool((users == users.max()).any()) and int(users[0]) % 2:
        error = error + tables["rare"](items).sum(-1)
    return error.square().mean()


def samples_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 17, (3,), generator=g), torch.randint(0, 17, (3,), generator=g)


SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sparseadam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def sparse_case(kind: str, stage: int, accumulate: int) -> float:
    axis, rank = ProcessCommunicator("dp", dist.group.WORLD, CPU), dist.get_rank()
    alone, tables = make_tables(), make_tables()
    reference, optimizer = SPARSE[kind](alone.parameters()), SPARSE[kind](tables.parameters())
    named = dict(tables.named_parameters())
    units = Units({}, [], gathers(), control()) if stage == 3 else None
    zero = Zero([optimizer], share_of(named, axis, units=units), stage, bucket_bytes=900)
    for step in range(6):
        reference.zero_grad()
        optimizer.zero_grad()
        for k in range(accumulate):
            number, last = step * accumulate + k, k == accumulate - 1
            losses = [loss_of_tables(alone, *samples_of(number, r), step=number) for r in range(axis.size)]
            (torch.stack(losses).mean() / accumulate).backward()
            zero.begin()
            if units is not None:
                units.begin(training=True)
            mine = samples_of(number, rank)
            reduced(zero, lambda m=mine, n=number: loss_of_tables(tables, *m, step=n) / accumulate, last)
        reference.step()
        optimizer.step()
    zero.release()
    want = dict(alone.named_parameters())
    return max(relative_error(p, want[n]) for n, p in named.items())


def sparse_cases() -> dict[str, float]:
    cases = product(SPARSE, range(4), (1, 2))
    return {repr(case): sparse_case(*case) for case in cases}


def test_sparse_gradients() -> None:
    """Rows that no replica used are left alone where the optimizer does that; others see what dense gradients give."""
    for found in run_distributed(sparse_cases, 2, timeout=60):
        assert not {case: error for case, error in found.items() if not error <= 1e-12}


def unequal_optional_use() -> bool:
    """A layer no rank uses keeps `grad is None`, so that AdamW neither decays nor ages it."""
    net = make_net()
    optimizer = make_optimizer("adamw", net)
    axis = ProcessCommunicator("dp", dist.group.WORLD, CPU)
    named = dict(net.named_parameters())
    start = copy.deepcopy({n: p.detach() for n, p in named.items()})
    zero = Zero([optimizer], share_of(named, axis), 1)
    zero.begin()
    zero.start_reducing()
    loss_of(net, batch(0, 4)).backward()
    zero.finish()
    zero.publish()
    optimizer.step()
    return all(torch.equal(named[n], start[n]) for n in named if n.startswith(("never", "sometimes", "frozen")))


def test_unused_parameters_do_not_move() -> None:
    assert all(run_distributed(unequal_optional_use, 2))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "elementwise"),
        (lambda p: torch.optim.AdamW(p, lr=0.0), "elementwise"),
        (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), "elementwise"),
        (lambda p: torch.optim.Rprop(p, lr=0.1), "elementwise"),
        (lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5), "elementwise"),
        (lambda p: Drawn(p, {"lr": 0.1, "norm": False}), "elementwise"),
        (lambda p: Drawn(p, {"lr": 0.1, "norm": True}), "whole"),
        (lambda p: torch.optim.Muon(p, lr=0.1), "whole"),
        (lambda p: torch.optim.Adafactor(p, lr=0.1), "whole"),
        (lambda p: torch.optim.LBFGS(p, lr=0.1), "coupled"),
        (lambda p: torch.optim.SparseAdam(p, lr=0.1), "rows"),
    ],
)
def test_optimizers_are_classified_by_experiment(make: Any, kind: str) -> None:
    optimizer = make([nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4, 4))])
    before = copy.deepcopy(list(optimizer.state.values()))
    assert classify(optimizer) == kind
    assert repr(list(optimizer.state.values())) == repr(before)


class Drawn(torch.optim.Optimizer):
    """Drawn back to where the weights were when it was made."""

    def __init__(self, params: Any, defaults: Any) -> None:
        super().__init__(params, defaults)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"anchor": p.detach().clone(), "steps": [0]}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                away = p.data - self.state[p]["anchor"]
                self.state[p]["steps"][0] += 1
                p.data.sub_(group["lr"] * (p.grad + (away / (1 + away.norm()) if group["norm"] else away)))


class GlobalNorm(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:
        params = [p for g in self.param_groups for p in g["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.data.sub_(p.grad / norm)


def test_an_optimizer_that_mixes_parameters_is_coupled() -> None:
    assert classify(GlobalNorm([nn.Parameter(torch.randn(3, 3))], {"lr": 0.1})) == "coupled"


def refuse(kind: str) -> str:
    axis = ProcessCommunicator("dp", dist.group.WORLD, CPU)
    net = nn.Embedding(4, 3)
    loose = nn.Parameter(torch.ones(7, 2))
    named = dict(net.named_parameters())
    params = [*net.parameters(), loose] if kind == "loose" else list(net.parameters())
    optimizer = torch.optim.LBFGS(params) if kind == "coupled" else torch.optim.SGD(params, lr=0.1)
    try:
        for _ in range(2 if kind == "again" else 1):
            Zero([optimizer], share_of(named, axis), 1).start_reducing()
        net(torch.tensor([1, 2])).sum().backward()
    except ConfigurationError as error:
        return str(error)
    return ""


def refuse_all() -> list[str]:
    return [refuse(kind) for kind in ("coupled", "loose", "again")]


def test_refusals_name_the_culprit() -> None:
    for coupled, loose, again in run_distributed(refuse_all, 2):
        assert "LBFGS" in coupled
        assert "zero_stage=0" in coupled
        assert "(7, 2)" in loose
        assert "SGD of an earlier fit" in again
