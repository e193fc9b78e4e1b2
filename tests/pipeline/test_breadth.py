"""Unmodified modules of every kind train equal to one process: loss and every gradient (float64, 1e-9)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import PipelineError
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline import PipelineRunner, is_absent, simulate
from lightning_3d.pipeline.microbatch import split_with_sizes
from lightning_3d.pipeline.training_schedule import TrainingSchedule
from lightning_3d.tensor import TensorGroup, plan_tensor_parallel, rewrite
from lightning_3d.testing import preload, relative_error, run_distributed
from tests.pipeline import reference
from tests.pipeline.breadth import BREADTH, RANDOM, Kind
from tests.pipeline.zoo import Lift, Module, build, vectors

preload("transformers", "tests.pipeline.zoo", "tests.pipeline.breadth", "lightning_3d.pipeline", "lightning_3d.tensor")
TOLERANCE = 1e-9
SINGLE = 1e-6

Choice = tuple[str, int]
SCHEDULES: list[Choice] = [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2), ("gpipe", 1)]
Case = tuple[str, Choice]


def _built(kind: Kind) -> Any:
    module = build(kind.make)
    return module.float() if kind.single else module


def _batch(kind: Kind, samples: int) -> Any:
    torch.manual_seed(5)
    return kind.batch(samples)


@contextmanager
def _without_lift() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "Lift", nullcontext)
        yield


def _tensor_group(mesh: Mesh, module: nn.Module, part: Any, exact: bool = False) -> TensorGroup | None:
    if mesh.layout.tp == 1:
        return None
    with Lift():
        plan = plan_tensor_parallel(module, lambda m: m.training_step(part, 0), mesh.layout.tp)
    assert plan.sharded_fraction > 0.3
    group = TensorGroup(mesh.tensor, exact_dropout=exact)
    rewrite(module, plan, group)
    return group


def _worst(runner: PipelineRunner, mesh: Mesh, want: dict[str, Any]) -> tuple[float, str]:
    """Largest error of a gradient this rank holds."""
    worst = (0.0, "")
    for name, parameter in runner.parameters.items():
        gradient, placement = want[name], getattr(parameter, "placement", None)
        if placement is not None and gradient is not None:
            gradient = placement.to_local(gradient, mesh.tensor.rank, mesh.tensor.size)
        worst = max(worst, (relative_error(parameter.grad, gradient), name))
    return worst


def _compare(mesh: Mesh, kind: Kind, choice: Choice, samples: int = 7, microbatches: int = 3) -> dict[str, Any]:
    module, plain = _built(kind), _built(kind)
    batch = _batch(kind, samples)
    cut, sizes = split_with_sizes(batch, microbatches)
    group = _tensor_group(mesh, module, cut[0])
    runner = PipelineRunner(
        module, mesh, schedule=TrainingSchedule(choice[0], mesh.layout.pp, choice[1]), num_microbatches=microbatches,
        tensor_group=group, forward_context=nullcontext if kind.single else Lift,
    )  # fmt: skip
    runner.setup("training_step", batch)
    result = runner.train_step(batch, 0)
    runner.reduce_shared()
    with _without_lift() if kind.single else nullcontext():
        loss, logs = reference.train(plain, cut, [s / sum(sizes) for s in sizes])
    worst = _worst(runner, mesh, {n: p.grad for n, p in plain.named_parameters()})
    out = {"gradient": worst, "loss": 0.0, "held": sorted(runner.parameters), "names": runner.names}
    for name, parameter in module.named_parameters():
        assert is_absent(parameter) == (name not in runner.parameters)
    if mesh.is_last_stage:
        out["loss"] = relative_error(result.loss, loss)
        for entry in result.logs:
            want = [v for n, v in logs if n == entry.name]
            assert [float(v) for v in entry.values] == pytest.approx(want, rel=1e-6 if kind.single else 1e-9, abs=1e-12)
        assert {e.name for e in result.logs} == {n for n, _ in logs}
    return out


def _rank(tp: int, pp: int, cases: list[Case]) -> list[dict[str, Any]]:
    mesh = Mesh(Layout(tp=tp, pp=pp), torch.device("cpu"))
    out = []
    for name, choice in cases:
        try:
            out.append(_compare(mesh, BREADTH[name], choice))
        except Exception as error:
            raise AssertionError(f"{name} tp={tp} pp={pp} {choice}: {type(error).__name__}: {error}") from error
    return out


def _check(tp: int, pp: int, cases: list[Case], timeout: float = 150) -> None:
    ranks = run_distributed(_rank, tp * pp, tp, pp, cases, timeout=timeout)
    for k, (name, choice) in enumerate(cases):
        label = f"{name} tp={tp} pp={pp} {choice}"
        results = [rank[k] for rank in ranks]
        for result in results:
            limit = SINGLE if BREADTH[name].single else TOLERANCE
            assert result["gradient"][0] <= limit, f"{label}: {result['gradient'][1]} {result['gradient'][0]:.1e}"
            assert result["loss"] <= limit, f"{label}: {result['loss']:.1e}"
        held = {n for result in results for n in result["held"]}
        assert sorted(held) == sorted(results[0]["names"]), f"{label}: a parameter is lost"


def _cases(pp: int, turn: int = 0, tensor: bool = False) -> list[Case]:
    """Every kind with one schedule, the next one for the next kind."""
    cases = []
    for index, (name, kind) in enumerate(BREADTH.items()):
        if kind.tensor or not tensor:
            choice = SCHEDULES[(index + turn) % len(SCHEDULES)]
            if pp * choice[1] > max(kind.stages, 4):
                choice = SCHEDULES[2 * (index % 2)]
            cases.append((name, choice))
    return cases


FAST_AT_FOUR = ["nanogpt", "mixtral", "albert", "resnet", "auxiliary", "generative", "u_shape"]
FAST_WITH_TENSOR = ["nanogpt", "mixtral"]


def test_every_kind_on_two_stages() -> None:
    _check(1, 2, _cases(2))


def test_kinds_on_four_stages() -> None:
    _check(1, 4, [case for case in _cases(4, 1) if case[0] in FAST_AT_FOUR])


def test_kinds_with_tensor_parallelism() -> None:
    _check(2, 2, [case for case in _cases(2, 2, tensor=True) if case[0] in FAST_WITH_TENSOR])


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(len(SCHEDULES)))
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 4), (2, 2)])
def test_every_kind_with_every_schedule(tp: int, pp: int, turn: int) -> None:
    _check(tp, pp, _cases(pp, turn, tensor=tp > 1), timeout=290)


class Graph:
    """Nodes and edges of all samples: its tensors disagree about the number of samples."""

    def __init__(self) -> None:
        self.x, self.edges = torch.zeros(9, 3), torch.zeros(2, 12)

    def to(self, device: Any) -> Graph:
        return self


def test_a_class_whose_tensors_disagree_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"Graph with tensors inside.*one entry per sample"):
        split_with_sizes({"y": torch.zeros(4), "graph": Graph()}, 2)


# -- with random numbers
def _random(mesh: Mesh, kind: Kind, choice: Choice) -> dict[str, Any]:
    """One step in training mode with dropout: the uncut step that draws the same numbers gives the same gradients."""
    module, plain = _built(kind), _built(kind)
    batch = _batch(kind, 7)
    cut, _ = split_with_sizes(batch, 3)
    group = _tensor_group(mesh, module, cut[0], exact=True)
    runner = PipelineRunner(
        module, mesh, schedule=TrainingSchedule(choice[0], mesh.layout.pp, choice[1]), num_microbatches=3,
        tensor_group=group, forward_context=Lift, seed=3,
    )  # fmt: skip
    runner.setup("training_step", batch)
    state = torch.get_rng_state()
    result = runner.train_step(batch, 0)
    assert torch.equal(state, torch.get_rng_state()), "the default generator must stay in step"
    runner.reduce_shared()
    # the pieces are those of the layout (a stream of random numbers is one piece's), all of them on one stage
    owners = [0] * mesh.layout.pp * choice[1]
    uncut, other = (
        simulate(plain, 1, batch, num_microbatches=3, seed=seed, forward_context=Lift, owners=owners) for seed in (3, 4)
    )
    assert float(uncut.result.loss) != float(other.result.loss)
    loss = relative_error(result.loss, uncut.result.loss) if mesh.is_last_stage and mesh.at.dp == 0 else 0.0
    worst = _worst(runner, mesh, uncut.gradients) if mesh.at.dp == 0 else (0.0, "")  # others draw other masks
    return {"gradient": worst, "loss": loss, "held": sorted(runner.parameters), "names": runner.names}


def _random_rank(tp: int, pp: int, dp: int, cases: list[Case]) -> list[dict[str, Any]]:
    mesh = Mesh(Layout(tp=tp, pp=pp, dp=dp), torch.device("cpu"))
    return [_random(mesh, RANDOM[name], choice) for name, choice in cases]


def _random_cases(tp: int, pp: int, turns: int) -> list[Case]:
    """As many schedules for every model, other ones for the next."""
    names = ["gpt"] if tp > 1 else list(RANDOM)
    cases = []
    for index, name in enumerate(names):
        fitting = [choice for choice in SCHEDULES if pp * choice[1] <= RANDOM[name].stages]
        cases += [(name, fitting[(index + turn) % len(fitting)]) for turn in range(min(turns, len(fitting)))]
    return cases


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "turns"),
    [
        (1, 2, 1, 1),
        (2, 2, 1, 1),
        pytest.param(1, 2, 1, 5, marks=pytest.mark.slow),
        pytest.param(1, 4, 1, 5, marks=pytest.mark.slow),
        pytest.param(1, 2, 2, 5, marks=pytest.mark.slow),
        pytest.param(2, 2, 1, 5, marks=pytest.mark.slow),
    ],
)
def test_dropout_draws_what_the_uncut_step_draws(tp: int, pp: int, dp: int, turns: int) -> None:
    """In blocks, in glue code, on attention weights, between recurrent layers; with every schedule."""
    cases = _random_cases(tp, pp, turns)
    ranks = run_distributed(_random_rank, tp * pp * dp, tp, pp, dp, cases, timeout=200)
    for k, case in enumerate(cases):
        for result in (rank[k] for rank in ranks):
            assert result["gradient"][0] <= TOLERANCE, (case, result["gradient"])
            assert result["loss"] <= TOLERANCE, case


# -- in one process: how shared layers are cut, and what is refused
class Repeated(Module):
    """One layer, or one stack of layers, again and again on its own output."""

    def __init__(self, stack: int) -> None:
        super().__init__()

        def layer() -> nn.Module:
            return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        self.enter, self.head = nn.Linear(16, 16), nn.Linear(16, 5)
        self.shared = nn.Sequential(*(layer() for _ in range(stack))) if stack > 1 else layer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(6):
            x = x + self.shared(x)
        return self.head(x)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("stack", [1, 4])
def test_what_is_called_again_and_again_is_cut_sensibly(stack: int, stages: int) -> None:
    """A shared layer is cut between its calls and held by every stage; a stack is divided, and walked through again."""
    module, batch = build(lambda: Repeated(stack)), vectors(6)
    cut = simulate(module, stages, batch, num_microbatches=2)
    plain = build(lambda: Repeated(stack))
    parts, sizes = split_with_sizes(batch, 2)
    reference.train(plain, parts, [s / sum(sizes) for s in sizes])
    assert reference.worst_gradient(cut.gradients, plain)[0] <= TOLERANCE
    windows = [w.stage for w in cut.partitions[0].windows]
    shared = [{n for n in held if n.startswith("shared")} for held in cut.held]
    if stack == 1:
        assert windows == list(range(stages))
        assert sum(len(s) == 4 for s in shared) >= stages - 1
    else:
        assert len(windows) > stages
        assert sum(map(len, shared)) == len(set().union(*shared)) == 4 * stack


class Leaky(Module):
    """Blocks of a kind whose result also leaves by another way."""

    kept: list[Tensor] = []

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 5)
        if way == "hook":
            blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
            self.blocks = nn.ModuleList(blocks)
            for block in blocks:
                block[0].register_forward_hook(lambda module, args, out: self.kept.append(out.square().mean()))
        elif way in ("global", "closure"):
            self.blocks = nn.ModuleList(_Writes(None if way == "global" else self.kept) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.kept.clear()
        WRITTEN.clear()
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss = F.cross_entropy(self.head(x), y)
        if self.way == "backward":
            loss.backward()
        elif self.way == "method":
            self.manual_backward(loss)
        elif self.way == "grad":
            loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().mean()
        elif self.way == "jacobian":
            loss = loss + torch.autograd.functional.jacobian(self.head, x).square().mean()
        return loss + sum(self.kept) + sum(WRITTEN)


WRITTEN: list[Tensor] = []


class _Writes(nn.Module):
    def __init__(self, kept: list[Tensor] | None) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)
        self.write = lambda x: (WRITTEN if kept is None else kept).append(x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        self.write(y.square().mean())
        return y


class OneLayer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


REFUSED: dict[str, tuple[Any, list[str], str]] = {
    "one_layer": (OneLayer, ["2 pipeline stages", "only 1 piece: layer", "a smaller pipeline_parallel_size"], ""),
    "backward": (lambda: Leaky("backward"), ["calls backward() itself", "pipeline_parallel_size=1"], "loss.backward()"),
    "grad": (lambda: Leaky("grad"), ["calls grad() itself", "pipeline_parallel_size=1"], "torch.autograd.grad("),
    "jacobian": (lambda: Leaky("jacobian"), ["grad() itself", "pipeline_parallel_size=1"], "jacobian("),
    "global": (lambda: Leaky("global"), ["global variable or a closure", "attribute of that module"], "sum(WRITTEN)"),
    "closure": (lambda: Leaky("closure"), ["global variable or a closure", "return it"], "sum(self.kept)"),
    "hook": (lambda: Leaky("hook"), ["forward hook", "atom:blocks.0", "in the step"], "out.square()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_at_set_up(name: str) -> None:
    """With the numbers, the way out, and the line of user code that is to blame."""
    make, words, code = REFUSED[name]
    with pytest.raises(PipelineError) as error:
        simulate(build(make), 2, vectors(4), num_microbatches=2)
    message = str(error.value)
    for word in words:
        assert word in message, message
    if code:
        assert re.search(r"test_breadth\.py, line \d+, .*: .*" + re.escape(code), message), message
