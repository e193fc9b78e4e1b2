"""The runner around the schedule: hooks, metrics, logs, evaluation walks, absent parameters, errors on every rank."""

from __future__ import annotations

import copy
import inspect
import io
import weakref
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_3d.errors import ConfigurationError, DivergedError, PipelineError
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline import AbsentParameter, PipelineRunner, is_absent, simulate
from lightning_3d.pipeline.microbatch import split_with_sizes
from lightning_3d.recompute import Recompute
from lightning_3d.testing import preload, relative_error, run_distributed
from tests.pipeline import reference
from tests.pipeline.compiled import Compiled, Counting, no_other_warnings
from tests.pipeline.zoo import GPT, MLP, Lift, batch_of, build

preload("transformers", "tests.pipeline.zoo", "lightning_3d.pipeline", "torchmetrics.classification")


def _mesh(pp: int = 2) -> Mesh:
    return Mesh(Layout(pp=pp), torch.device("cpu"))


def _runner(module: nn.Module, mesh: Mesh, batch: Any, **settings: Any) -> PipelineRunner:
    runner = PipelineRunner(module, mesh, **{"num_microbatches": 3, "evaluation_microbatches": 3, **settings})
    runner.setup("training_step", batch)
    return runner


# -- hooks, weights, recorder
def _hooks() -> None:
    mesh, batch = _mesh(), batch_of("mlp", 8)
    recorded: list[Any] = []
    waits: list[Any] = []
    module, plain = build("mlp"), build("mlp")
    runner = _runner(module, mesh, batch, recorder=lambda *a: recorded.append(a), num_microbatches=4)
    runner.channels.on_wait = waits.append
    before: list[dict[str, Tensor]] = []

    def hook() -> None:
        before.append({n: torch.zeros(()) if p.grad is None else p.grad.clone() for n, p in runner.parameters.items()})

    weights = [0.1, 0.2, 0.3, 1.4]
    result = runner.train_step(batch, 0, scale=torch.tensor(0.5), before_last_backward=hook, weights=weights)
    parts, _ = split_with_sizes(batch, 4)
    reference.train(plain, parts[:-1], [w / 2 for w in weights[:-1]])
    assert len(before) == 1
    assert reference.worst_gradient(before[0], plain)[0] <= 1e-9, "called after all backwards but the last"
    reference.train(plain, parts[-1:], [0.7])
    assert reference.worst_gradient(dict(runner.parameters), plain)[0] <= 1e-9
    plain_loss, _ = reference.train(build("mlp"), parts, weights)
    if mesh.is_last_stage:
        assert relative_error(result.loss, plain_loss) <= 1e-9, "the reported loss is not scaled"
        assert result.logs[0].weights == weights
    actions = [a for a, _, _ in recorded if a.kind != "wait"]
    assert [(a.kind, a.microbatch) for a in actions if a.kind == "F"] == [("F", i) for i in range(4)]
    assert [(a.kind, a.microbatch) for a in actions if a.kind == "B"] == [("B", i) for i in range(4)]
    assert all(a.stage == mesh.at.pp for a in actions)
    assert sum(a.kind == "wait" for a, _, _ in recorded) == 4
    assert all(start <= end for _, start, end in recorded)
    assert [w if w is None else w.message.microbatch for w in waits] == [0, None, 1, None, 2, None, 3, None]


# -- metrics and state
class WithMetric(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(5, sync_on_compute=False)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.accuracy(out.argmax(-1), batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("second", out.mean(), True, on_step=False)
        return F.cross_entropy(out, batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        first, second = self(batch[0]), self(batch[0].flip(1))  # two walks through the stages
        self.accuracy.update(first, batch[1])
        self.seen.append(first + second)
        self.log(f"distance/{dataloader_idx}", (first - second).abs().mean())


def _metrics() -> None:
    mesh, batch = _mesh(), batch_of("mlp", 8)
    module, plain = build(WithMetric), build(WithMetric)
    runner = _runner(module, mesh, batch)
    assert module.accuracy._update_count == 0, "the trace left something in the metric"
    result = runner.train_step(batch, 0)
    parts, _sizes = split_with_sizes(batch, 3)
    reference_log = []
    plain.log = lambda *a, **k: reference_log.append(a)
    for part in parts:
        plain.training_step(part, 0)
    if not mesh.is_last_stage:
        assert module.accuracy._update_count == 0
        assert int(module.accuracy.tp.sum() + module.accuracy.fn.sum()) == 0
    else:
        assert module.accuracy._update_count == plain.accuracy._update_count == 3
        assert torch.equal(module.accuracy.compute(), plain.accuracy.compute())
        names = [e.name for e in result.logs]
        assert names == ["accuracy", "second"]
        assert all(v is module.accuracy for v in result.logs[0].values)
        assert result.logs[1].kwargs == {"prog_bar": True, "on_step": False}
    for m in (module, plain):
        m.eval()
        m.accuracy.reset()
    with torch.no_grad():
        runner.evaluate("validation_step", batch, 0, 1)
        for part in parts:
            plain.validation_step(part, 0, 1)
    if mesh.is_last_stage:
        assert module.accuracy._update_count == 3, "a window that is replayed must not count twice"
        assert torch.equal(module.accuracy.compute(), plain.accuracy.compute())
        assert len(module.seen) == 3
        for got, want in zip(module.seen, plain.seen, strict=True):
            assert relative_error(got, want) <= 1e-9
    else:
        assert [x.shape for x in module.seen] == [x.shape for x in plain.seen]  # sent after every batch
        assert module.accuracy._update_count == 0


# -- evaluation that walks otherwise than training
class Walks(GPT):
    def __init__(self) -> None:
        super().__init__(depth=4)
        self.average = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))  # used in no training step
        self.average.requires_grad_(False)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["tokens"]
        for _ in range(3):
            x = torch.cat([x, self(x)[:, -1:].argmax(-1)], 1)
        return x

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.wte(batch["tokens"])
        for layer in self.average:
            h = layer(h)
        return {"average": h, "early": self.wte(batch["tokens"]).mean()}

    def predict_step(self, batch: Any) -> None:
        return None


def _walks(pp: int) -> None:
    mesh, batch = _mesh(pp), batch_of("gpt", 5)
    module, plain = build(Walks), build(Walks)
    runner = _runner(module, mesh, batch)
    held_average = [n for n in runner.parameters if n.startswith("average")]
    counts = mesh.pipeline.all_gather_object(len(held_average))
    assert sum(counts) == 6
    assert max(counts) < 6, "unused parameters are shared out"
    with torch.inference_mode():
        tokens = runner.evaluate("validation_step", batch).outputs
        again = runner.evaluate("validation_step", batch).outputs
        other = runner.evaluate("test_step", batch).outputs
        nothing = runner.evaluate("predict_step", batch).outputs
    assert nothing is None
    if mesh.is_last_stage:
        with torch.no_grad():
            assert torch.equal(tokens, plain.validation_step(batch, 0))
            want = plain.test_step(batch, 0)
        assert torch.equal(tokens, again)
        assert relative_error(other["average"], want["average"]) <= 1e-9
        assert relative_error(other["early"], want["early"]) <= 1e-9
    runner.train_step(batch, 0)


# -- absent parameters
def _absent() -> None:
    mesh, batch = _mesh(), batch_of("gpt", 4)
    module = build(GPT)
    everything = dict(module.named_parameters())
    shapes = {n: p.shape for n, p in everything.items()}
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.ndim > 1], lr=0.1)
    runner = _runner(module, mesh, batch)
    now = dict(module.named_parameters())
    assert list(now) == list(everything)
    assert all(now[n] is everything[n] for n in now), "every parameter is the object it was"
    assert module.head.weight is module.wte.weight
    name, absent = next((n, p) for n, p in now.items() if is_absent(p))
    assert isinstance(absent, nn.Parameter)
    assert isinstance(absent, AbsentParameter)
    assert absent.is_absent
    assert {n: p.shape for n, p in now.items()} == shapes
    for use in (lambda p: p + 1, lambda p: p.sum(), lambda p: p.norm(), lambda p: torch.zeros(3) * p, float):
        with pytest.raises(PipelineError, match=name):
            use(absent)
    assert absent.requires_grad
    assert absent.device == torch.device("cpu")
    assert absent.grad is None
    assert name in repr(absent)
    module.zero_grad()
    optimizer.zero_grad()
    optimizer.step()
    assert set(module.state_dict(keep_vars=True)) == {*everything, "head.weight"}
    with pytest.raises(PipelineError, match=f"state_dict.*{name}.*save_checkpoint.*checkpoint export"):
        module.state_dict()
    for part in (absent.data, absent.data.norm(), absent.cpu().clone() * 2, torch.stack([absent.data.sum()])):
        with pytest.raises(PipelineError, match=name):
            torch.zeros(part.shape).copy_(part)
        with pytest.raises(PipelineError, match=name):
            part.tolist()
        with pytest.raises(PipelineError, match=name):
            torch.save(part, io.BytesIO())
    absent.data = absent.data * 0.5
    absent.data.clamp_(-1, 1)
    with torch.no_grad():
        assert absent.clamp_(-1, 1) is absent
        absent *= 0.9
        for write in (absent.normal_, lambda: absent.resize_(1), lambda: torch.zeros(absent.shape).copy_(absent)):
            with pytest.raises(PipelineError, match=name):
                write()
    assert absent.untyped_storage().nbytes() == 8
    module.float()
    assert is_absent(module.get_parameter(name))
    assert module.get_parameter(name) is absent
    assert absent.dtype == torch.float32
    assert absent.untyped_storage().nbytes() == 4
    module.double()
    twin = copy.deepcopy(module)
    assert "forward" not in twin.blocks[0].__dict__
    assert is_absent(twin.get_parameter(name))
    assert twin.get_parameter(name).shape == absent.shape
    assert twin.get_parameter(name).untyped_storage().nbytes() == 8
    for thing in (absent, module, twin):
        with pytest.raises(PipelineError, match=r"torch\.save"):
            torch.save(thing, io.BytesIO())
    assert sum(p.numel() for p in module.parameters()) == sum(s.numel() for s in shapes.values())
    stages = mesh.pipeline.all_gather_object(sorted(runner.parameters))
    assert set(stages[0]) | set(stages[1]) == set(everything)
    assert set(stages[0]) & set(stages[1]) == {"wte.weight", "scale"} == set(runner.shared[0, 1])


class Looks(MLP):
    """User code that looks at its own modules while the step runs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert list(inspect.signature(self.net[1].forward).parameters) == ["input"]
        assert next(self.parameters()).device == torch.device("cpu")
        assert sum(p.numel() for p in self.parameters()) > 100
        try:
            return super().training_step(batch, batch_idx)
        finally:
            torch.zeros(3).sum()


def _looks() -> None:
    mesh, batch = _mesh(), batch_of("mlp", 4)
    module, plain = build(Looks), build(Looks)
    runner = _runner(module, mesh, batch)
    runner.train_step(batch, 0)
    parts, sizes = split_with_sizes(batch, 3)
    reference.train(plain, parts, [s / 4 for s in sizes])
    assert reference.worst_gradient(dict(runner.parameters), plain)[0] <= 1e-9


class Dropout(MLP):
    def __init__(self) -> None:
        super().__init__(dropout=0.4)


def _random_numbers() -> None:
    """The same numbers for the same (seed, step), others otherwise; frozen and unfrozen parameters; no grad."""
    mesh, batch = _mesh(), batch_of("mlp", 6)
    gradients = []
    for seed, steps in ((0, 1), (0, 1), (1, 1), (0, 2)):
        module = build(Dropout)
        runner = _runner(module, mesh, batch, seed=seed)
        torch.manual_seed(len(gradients))  # what the process draws elsewhere does not matter
        for _ in range(steps):
            module.zero_grad()
            runner.train_step(batch, 0)
        gradients.append(next(p.grad for n, p in runner.parameters.items() if n.endswith("weight") and p.ndim == 2))
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])
    assert not torch.equal(gradients[0], gradients[3])
    module, plain = build("mlp"), build("mlp")
    runner = _runner(module, mesh, batch)
    parts, sizes = split_with_sizes(batch, 3)
    for m in (module, plain):
        m.net[:4].requires_grad_(False)  # a callback freezes the first layers
    for trainable in (False, True):
        for m in (module, plain):
            m.zero_grad()
            m.requires_grad_(True) if trainable else None
        runner.train_step(batch, 0)
        reference.train(plain, parts, [s / 6 for s in sizes])
        assert reference.worst_gradient(dict(runner.parameters), plain)[0] <= 1e-9
        frozen = [p for n, p in runner.parameters.items() if n.startswith("net.0") and not trainable]
        assert all(p.grad is None for p in frozen)


# -- paths that depend on values all ranks know
class Drops(MLP):
    """LayerDrop, a counter, and a branch on the batch."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.calls: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.calls.append(batch_idx)
        x, y = batch
        for layer in self.net:
            square = isinstance(layer, nn.Sequential)
            if square and torch.rand(()).item() < 0.5:
                continue
            x = layer(x)
        if bool((y == 0).any()):
            x = x * 2
        return F.cross_entropy(x, y)


def _paths() -> None:
    mesh, batch = _mesh(), batch_of("mlp", 6)
    runner = _runner(build(Drops), mesh, batch)
    alone = build(Drops)
    total = {n: torch.zeros_like(p) for n, p in alone.named_parameters()}
    for k in range(3):
        runner.train_step(batch, k)
        uncut = simulate(alone, 1, batch, num_microbatches=3, step_number=k)
        for n, g in uncut.gradients.items():
            total[n] += 0 if g is None else g
    for n, p in alone.named_parameters():
        p.grad = total[n]
    assert reference.worst_gradient(dict(runner.parameters), alone)[0] <= 1e-9
    assert len(next(iter(runner.plans.partitions.values()))) > 1
    assert int(runner.module.steps) == 9
    assert runner.module.calls == [0] * 3 + [1] * 3 + [2] * 3


def _padding() -> None:
    """Hugging Face models make no mask at all when nothing is padded."""
    mesh, batch = _mesh(), batch_of("llama", 6)
    batch["attention_mask"][2:4] = 1
    module, plain = build("llama"), build("llama")
    runner = _runner(module, mesh, batch, forward_context=Lift)
    runner.train_step(batch, 0)
    parts, sizes = split_with_sizes(batch, 3)
    reference.train(plain, parts, [s / 6 for s in sizes])
    assert reference.worst_gradient(dict(runner.parameters), plain)[0] <= 1e-9
    assert sorted(map(len, runner.plans.partitions.values())) == [2], "two paths for one shape"


class ByLoader(MLP):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.net[:-1] if dataloader_idx else self.net:
            x = layer(x)
        if batch_idx == 1:  # after the last module the path may be any
            self.log("extra", x.pow(2).mean())
        return x


def _loaders() -> None:
    mesh, batch = _mesh(), batch_of("mlp", 6)
    module, plain = build(ByLoader), build(ByLoader)
    runner = _runner(module, mesh, batch)
    for args in ((0, 0), (1, 0), (0, 1), (1, 1)):
        with torch.no_grad():
            result = runner.evaluate("validation_step", batch, *args)
            plain.log = lambda *a: None
            want = plain.validation_step(batch, *args)
        if mesh.is_last_stage:
            assert relative_error(result.outputs, want) <= 1e-9
            assert [e.name for e in result.logs] == ["extra"] * args[0]


def _autocast() -> None:
    """Entered around every forward window, not around the backward."""
    mesh, batch = _mesh(), batch_of("mlp", 6)
    batch = (batch[0].float(), batch[1])
    module, plain = build("mlp").float(), build("mlp").float()
    runner = _runner(module, mesh, batch, forward_context=lambda: torch.autocast("cpu", torch.bfloat16))
    runner.train_step(batch, 0)
    meta = next(iter(runner.plans.partitions.values()))[0].trace.meta
    assert {m.dtype for m in meta.values()} == {torch.bfloat16, torch.float32}
    for part in split_with_sizes(batch, 3)[0]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(plain(part[0]), part[1])
        (loss / 3).backward()
    worst, where = reference.worst_gradient(dict(runner.parameters), plain)
    assert worst <= 1e-6, where


# -- errors, the same on every rank, without hanging
class Alternates(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.net[:4](x) if batch_idx % 2 == 0 else self.net[:3](x)
        return F.cross_entropy(self.net[4:](x), y)


class BranchesOnRank(MLP):
    rank = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        if self.rank == 0:
            out.argmax(-1)
        return F.cross_entropy(out, batch[1])


class Curriculum(MLP):
    """Deeper with the epoch, an auxiliary loss from the third step on, another path when a callback says so."""

    depth, auxiliary, calls = 3, False, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.calls += 1
        early = self.net[:3](x)
        x = self.net[3 : self.depth + 3](early)
        loss = F.cross_entropy(self.net[8:](x), y)
        if batch_idx >= 2:
            loss = loss + 0.1 * early.square().mean()
        if self.auxiliary:
            self.log("early", early.mean())
        self.log("loss", loss)
        return loss


class WaitsForLogit(MLP):
    """Its path depends on a value another stage computes: no rank can know it beforehand."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net[:3](batch[0])
        if batch_idx >= 0 and x.sum() > -1e9:
            x = x.tanh()
        return F.cross_entropy(self.net[3:](x), batch[1])


def _changing_paths() -> None:
    """Branches on Python state: every path gets a plan of its own, found again when it comes back."""
    for make, changes in ((Alternates, {}), (Curriculum, {3: ("depth", 5), 4: ("auxiliary", True), 6: ("depth", 3)})):
        mesh, batch = _mesh(), batch_of("mlp", 4)
        runner, plain = _runner(build(make), mesh, batch), build(make)
        for k in range(8):
            for module in (runner.module, plain):
                if k in changes:
                    setattr(module, *changes[k])
            result = runner.train_step(batch, k)
            cut, sizes = split_with_sizes(batch, 3)
            losses = [plain.training_step(m, k) * s / 4 for m, s in zip(cut, sizes, strict=True)]
            sum(losses).backward()
            if mesh.is_last_stage:
                assert float(result.loss) == pytest.approx(float(sum(losses)), rel=1e-9), (make.__name__, k)
                assert [log.name for log in result.logs] == [
                    n for n in ("early", "loss") if hasattr(plain, "calls") and (n == "loss" or plain.auxiliary)
                ]
        assert reference.worst_gradient(dict(runner.parameters), plain)[0] <= 1e-9
        traces = sum(len(known) for known in runner.plans.partitions.values())
        assert traces <= 2 * 5, f"{make.__name__}: {traces} traces"


class Residual(pl.LightningModule):
    """What a block gives is not what its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(x, y)


def _sent_is_freed(pp: int) -> None:
    """1F1B keeps p - s microbatches, but of what was sent only what may still be under way."""
    mesh, batch = _mesh(pp), batch_of("mlp", 12)
    storages: list[Any] = []
    alive: list[int] = []

    def after(action: Any, start: float, end: float) -> None:
        if action.kind != "wait":
            alive.append(sum(reference() is not None for reference in storages))

    runner = _runner(build(Residual), mesh, batch, num_microbatches=12, recorder=after)
    send = runner.channels.send

    def noted(parcel: Any, tensors: list[Tensor]) -> None:
        if parcel.message.kind == "F":
            storages.extend(weakref.ref(x.untyped_storage()) for x in tensors)
        send(parcel, tensors)

    runner.channels.send = noted  # type: ignore[method-assign]
    runner.train_step(batch, 0)
    assert runner.live_peak == pp - mesh.at.pp
    if mesh.is_first_stage:
        assert len(storages) == 12
        assert max(alive[pp:]) <= 2, alive  # before, nothing has come back yet
        assert alive[-1] <= 1


def test_what_was_sent_is_freed() -> None:
    run_distributed(_sent_is_freed, 4, 4, timeout=60)


class Cast(nn.Linear):
    """The gradient of the weight takes a step more than that of the input, as under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 1.0, self.bias)


class Casts(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cast(16, 16) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x + 0.0 * x.sum(), y)


def _sent_at_once() -> None:
    """A value leaves before the glue code behind it runs, a gradient before those of weights are computed."""
    mesh, batch = _mesh(), batch_of("mlp", 4)
    runner = _runner(build(Casts), mesh, batch, num_microbatches=2, split=["blocks.1"])
    order: list[str] = []
    send = runner.channels.send

    def noted(parcel: Any, tensors: list[Tensor]) -> None:
        order.append(parcel.message.kind)
        send(parcel, tensors)

    runner.channels.send = noted  # type: ignore[method-assign]
    block = runner.module.blocks[mesh.at.pp]
    block.weight.register_post_accumulate_grad_hook(lambda _: order.append("weight"))
    block.register_forward_hook(lambda *_: order.append("block"))
    runner.train_step(batch, 0)
    if mesh.is_first_stage:
        assert order == ["F", "block", "F", "block", "weight", "weight"]
    else:
        assert order == ["block", "G", "weight", "block", "G", "weight"]


def test_what_others_wait_for_is_sent_at_once() -> None:
    run_distributed(_sent_at_once, 2, timeout=60)


def _diverged() -> None:
    """A path that no rank knows beforehand: the rank that sees it says so; one that waits ends with the timeout."""
    mesh, batch = Mesh(Layout(pp=2), torch.device("cpu"), timedelta(seconds=2)), batch_of("mlp", 4)
    runner = _runner(build(WaitsForLogit), mesh, batch)
    expected = pytest.raises(DivergedError, match="tanh") if not mesh.is_last_stage else pytest.raises(RuntimeError)
    with expected:
        runner.train_step(batch, 1)


def _errors() -> None:
    mesh, batch = _mesh(), batch_of("mlp", 4)
    module = build(BranchesOnRank)
    module.rank = mesh.rank
    with pytest.raises(ConfigurationError, match="training_step differs between the ranks"):
        _runner(module, mesh, batch)
    assert not any(is_absent(p) for p in module.parameters())
    for split, words in (
        (["net.5", "net.6"], "2 stages have 1 boundary"),
        (["net.55"], r"Did you mean"),
        (["net.0"], "nothing is called before it"),
    ):
        with pytest.raises(PipelineError, match=words):
            _runner(build("mlp"), mesh, batch, split=split)
    with pytest.raises(PipelineError, match="num_microbatches is 5, but the first batch has only 4"):
        _runner(build("mlp"), mesh, batch, num_microbatches=5).check_microbatches(batch)
    with pytest.raises(ConfigurationError, match="pipeline_schedule"):
        _runner(build("mlp"), mesh, batch, schedule="1f1c")


def _named_split() -> None:
    mesh, batch = _mesh(), batch_of("mlp", 4)
    module, plain = build("mlp"), build("mlp")
    runner = _runner(module, mesh, batch, split=["net.7.0"])
    first = {n for n in runner.names if int(n.split(".")[1]) < 7}
    assert set(runner.parameters) == (first if mesh.is_first_stage else set(runner.names) - first)
    runner.train_step(batch, 0)
    parts, sizes = split_with_sizes(batch, 3)
    reference.train(plain, parts, [s / 4 for s in sizes])
    assert reference.worst_gradient(dict(runner.parameters), plain)[0] <= 1e-9


def _compiled_blocks() -> None:
    """Broken before: the compiler gave blocks up for good when it met them while the step was planned."""
    mesh, batch = _mesh(), batch_of("mlp", 8)
    parts, sizes = split_with_sizes(batch, 4)
    plain, counting = build(lambda: Compiled("as_written", Counting())), Counting()
    alone = build(lambda: Compiled("in_place", counting))
    with no_other_warnings():
        for module in (plain, alone):
            for _ in range(2):
                reference.train(module, parts, [s / 8 for s in sizes])
    assert counting.graphs == 1, "in one process all blocks share one graph"
    for way, schedules, recompute, graphs in (
        ("in_place", ("1f1b", "zb_h1"), None, 1),  # compiled for the one, and run in the other
        ("in_place", ("1f1b",), "full", 1),
        ("wrapper", ("interleaved_1f1b",), None, 1),
        ("function", ("zb_h1",), None, 1),
        ("recomputed", ("1f1b",), None, 2),  # one with the user's mode (`Lift`), which is not there in the backward
        ("whole", ("1f1b",), None, 1 + mesh.is_last_stage),  # a block, and there the layer behind them
    ):
        counting = Counting()
        for schedule in schedules:
            module = build(lambda: Compiled(way, counting))  # noqa: B023
            settings = {"schedule": schedule, "num_microbatches": 4, "forward_context": Lift}
            with no_other_warnings():
                runner = _runner(module, mesh, batch, **settings)
                runner.surround(Recompute(module, recompute, mesh.at.pp, 2).active)
                made = [counting.graphs]
                for number in range(2):
                    runner.train_step(batch, number)
                    made.append(counting.graphs)
            assert made[1:] == [graphs] * 2, f"{way} {schedule} {recompute}: {made}"
            runner.reduce_shared()
            found = {name.replace("_orig_mod.", ""): p for name, p in runner.parameters.items()}
            worst, where = reference.worst_gradient(found, plain)
            assert worst <= 1e-9, f"{way} {schedule} {recompute}: {where} off by {worst:.1e}"
        assert made[0] == (graphs if len(schedules) == 2 else 0), "nothing is compiled while the step is planned"
    with torch.no_grad(), no_other_warnings():
        result = runner.evaluate("validation_step", batch)
        want, again = plain.validation_step(batch, 0), counting.graphs
        runner.evaluate("validation_step", batch)
    assert counting.graphs == again > graphs, "and once more without gradients"
    assert result.outputs is None or relative_error(result.outputs, want) <= 1e-9


TWO_STAGES = (
    _hooks,
    _metrics,
    _absent,
    _looks,
    _random_numbers,
    _named_split,
    _paths,
    _padding,
    _loaders,
    _autocast,
    _errors,
    _changing_paths,
    _compiled_blocks,
    _diverged,
)


def _run_all() -> None:
    for check in TWO_STAGES:  # the last one breaks the process group
        check()


def test_two_stages() -> None:
    run_distributed(_run_all, 2, timeout=60)


@pytest.mark.parametrize("pp", [2, 3])
def test_evaluation_walks(pp: int) -> None:
    run_distributed(_walks, pp, pp, timeout=60)


class Validates(pl.LightningModule):
    """Only a validation step: `trainer.validate` without training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def validation_step(self, batch: Any) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()


def _validate_only() -> None:
    mesh, batch = _mesh(), batch_of("mlp", 5)
    module, plain = build(Validates), build(Validates)
    runner = PipelineRunner(module, mesh, num_microbatches=2)
    with torch.inference_mode():
        inside = (batch[0] * 1, batch[1] * 1)
        runner.setup("validation_step", inside)
        result = runner.evaluate("validation_step", inside)
        if mesh.is_last_stage:
            assert relative_error(result.outputs, plain.validation_step(batch)) <= 1e-9


def test_validation_without_training() -> None:
    run_distributed(_validate_only, 2, timeout=60)
