"""What user code does between the modules: what works, and what is refused with which words (3 stages, one process)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import DivergedError, PipelineError
from lightning_3d.pipeline import simulate
from lightning_3d.pipeline.microbatch import split_with_sizes
from tests.pipeline import reference
from tests.pipeline.zoo import Reverse, batch_of, build

Body = Callable[["Net", Tensor], Tensor]


class Net(pl.LightningModule):
    """Linear in, six blocks, linear out; `body` is the glue code."""

    def __init__(self, body: Body, block: Callable[[], nn.Module], step: Any = None) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.register_buffer("ema", torch.zeros(16))
        self.body, self.step = body, step

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.step is not None:
            return self.step(self, batch, batch_idx)
        return F.cross_entropy(self(batch[0]), batch[1])


def _linear() -> nn.Module:
    return nn.Linear(16, 16)


def _each(f: Callable[[Net, Tensor, nn.Module, int], Tensor]) -> Body:
    def body(net: Net, x: Tensor) -> Tensor:
        x = net.inp(x)
        for j, block in enumerate(net.blocks):
            x = f(net, x, block, j)
        return net.out(x)

    return body


_plain = _each(lambda net, x, block, j: torch.tanh(block(x)))


class AppendsToList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        y = torch.tanh(self.f(x))
        losses.append(y.pow(2).mean())
        return y


def _list_argument(net: Net, x: Tensor) -> Tensor:
    x, losses = net.inp(x), []
    for block in net.blocks:
        x = block(x, losses)
    return net.out(x) * (1 + sum(losses))


class State:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden, self.count, self.history = hidden, 0, []


class ChangesObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, state: State) -> None:
        state.hidden = torch.tanh(self.f(state.hidden))
        state.count += 1
        state.history.append(state.hidden.mean())


def _object_argument(net: Net, x: Tensor) -> Tensor:
    state = State(net.inp(x))
    for block in net.blocks:
        block(state)
    return net.out(state.hidden) * (1 + sum(state.history) / state.count)


def _ema_buffer(net: Net, x: Tensor) -> Tensor:
    x = net.inp(x)
    for j, block in enumerate(net.blocks):
        x = torch.tanh(block(x))
        if j == 2:
            with torch.no_grad():
                net.ema.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            x = x - net.ema
    return net.out(x)


def _view_changed_in_place(net: Net, x: Tensor) -> Tensor:
    first = net.inp(x) * 1
    view, y = first[:, :8], x
    for j, block in enumerate(net.blocks):
        y = torch.tanh(block(y))
        if j == 3:
            view.mul_(0.5)
    return net.out(y + first)


def _overwritten_after_it_was_read(net: Net, x: Tensor) -> Tensor:
    """The value a later stage reads again is the one before the change."""
    scale = net.inp(x).sum() * 0.01
    before = scale.item()
    scale += 1.0
    for block in net.blocks:
        x = torch.tanh(block(x)) * scale
    return net.out(x) * (1 + before)


def _segments(net: Net, x: Tensor) -> Tensor:
    def run(first: int, last: int) -> Callable[[Tensor], Tensor]:
        def segment(x: Tensor) -> Tensor:
            for block in net.blocks[first:last]:
                x = torch.tanh(block(x))
            return F.dropout(x, 0.5)

        return segment

    x = net.inp(x)
    for first in (0, 3):
        x = checkpoint(run(first, first + 3), x, use_reentrant=False)
    return net.out(x)


def _set_item(net: Net, x: Tensor, block: nn.Module, j: int) -> Tensor:
    y = torch.tanh(block(x)).clone()
    y[:, 0] = 0.0
    return y


def _chunks(net: Net, x: Tensor, block: nn.Module, j: int) -> Tensor:
    if j % 2:
        return torch.stack([part * 2 for part in torch.tanh(block(x)).chunk(2, -1)], -1).flatten(1)
    return torch.einsum("bi,bi->bi", x, torch.stack(list(block(x))))


def _integer(net: Net, x: Tensor) -> Tensor:
    x, factor = net.inp(x), 1
    for j, block in enumerate(net.blocks):
        x = torch.tanh(block(x))
        if j == 1:
            factor = int((x > 0).sum().item() % 2) + 1
    return net.out(x) * factor


def _noise(net: Net, x: Tensor) -> Tensor:
    """Random numbers that depend on no parameter must be the same on all stages."""
    noise = torch.randn_like(x)
    keep = torch.rand(len(x)) > 0.3
    return _plain(net, x + noise) * keep[:, None] + net.out(noise)


def _tail(net: Net, batch: Any, batch_idx: int) -> Tensor:
    """Shapes and branches that depend on values, after the last module: only the last stage runs them."""
    out = net(batch[0])
    confident = out[out.softmax(-1).amax(-1) > 0.3]
    loss = F.cross_entropy(out, batch[1])
    if len(confident) and confident.mean() > -1e9:
        loss = loss + 0.1 * confident.pow(2).mean()
    return loss + torch.unique(out.argmax(-1)).numel() * 0.01


def _layer_drop(net: Net, x: Tensor) -> Tensor:
    x = net.inp(x)
    for block in net.blocks:
        if torch.rand(()).item() < 0.5:
            x = torch.tanh(block(x))
    return net.out(x)


class HookedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.g(torch.tanh(self.f(x)))


class Features(Net):
    """Forward hooks on modules inside the blocks collect features (a common way to get them)."""

    def __init__(self) -> None:
        super().__init__(_plain, HookedInside)
        self.found: list[Tensor] = []
        for block in self.blocks:
            block.f.register_forward_hook(lambda module, args, out: self.found.append(out))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.found.clear()
        loss = super().training_step(batch, batch_idx)
        assert len(self.found) == 6
        return loss + 0.1 * torch.stack(self.found).pow(2).mean()


class Recurrent(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Linear(16, 8), nn.LSTM(8, 12, 2, batch_first=True), nn.Linear(12, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h, _ = self.rnn(self.embed(batch[0].unflatten(-1, (1, 16)).expand(-1, 3, -1)))
        return F.cross_entropy(self.out(h[:, -1]), batch[1])


def net(body: Body = _plain, block: Callable[[], nn.Module] = _linear, step: Any = None) -> Callable[[], nn.Module]:
    return lambda: Net(body, block, step)


class Methods(nn.Module):
    """A block that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Parameter(torch.tensor(1.1))

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def _twice(net: Net, batch: Any, batch_idx: int) -> Tensor:
    return (net(batch[0]) - net(batch[0].flip(0))).pow(2).mean()


def _checkpoint_of_changed(given: bool) -> Body:
    """A plain tensor is changed in place by a value of the model, and a checkpoint uses it."""

    def body(net: Net, x: Tensor) -> Tensor:
        h = net.inp(x)
        for block in net.blocks:
            t = torch.full((len(x), 16), 0.3, dtype=x.dtype)
            t.add_(h)
            f = lambda t, block=block: torch.tanh(block(t)) * t  # noqa: E731
            h = checkpoint(f, t, use_reentrant=False) if given else checkpoint(lambda: f(t), use_reentrant=False)  # noqa: B023
        return net.out(h)

    return body


def _part_of_plain(again: Callable[[Tensor, Tensor], Tensor]) -> Body:
    """Values of the model are put into a part of a plain tensor, and `again` uses the tensor and that part."""

    def body(net: Net, x: Tensor) -> Tensor:
        h = net.inp(x)
        plain = torch.full((len(x), 16), 0.3, dtype=x.dtype)
        part = plain[:, 2:6]
        part.mul_(h[:, :4])
        for block in net.blocks:
            h = torch.tanh(block(h)) + again(plain, part)
        return net.out(h)

    return body


def _part_put_elsewhere(net: Net, x: Tensor) -> Tensor:
    h, plain, other = net.inp(x), torch.ones(len(x), 16, dtype=x.dtype), torch.ones(len(x), 16, dtype=x.dtype)
    part = plain[:, 2:6]
    part.mul_(h[:, :4])
    other[:, 2:6] = part
    for block in net.blocks:
        h = block(h) + other + plain
    return net.out(h)


def _nested_checkpoints(net: Net, x: Tensor) -> Tensor:
    """The outer one goes on with its argument after the inner one."""
    h = net.inp(x)
    for block in net.blocks:
        t = torch.full((len(x), 16), 0.3, dtype=x.dtype)
        t.add_(h)

        def outer(t: Tensor, block: nn.Module = block) -> Tensor:
            return checkpoint(torch.tanh, block(t), use_reentrant=False) * t

        h = checkpoint(outer, t, use_reentrant=False)
    return net.out(h)


def _part_put_back(net: Net, x: Tensor) -> Tensor:
    h, plain = net.inp(x), torch.full((len(x), 16), 0.3, dtype=x.dtype)
    plain[:, 2:6] *= h[:, :4]
    for block in net.blocks:
        h = torch.tanh(block(h)) + plain
    return net.out(h)


def _view_under_no_grad(net: Net, x: Tensor) -> Tensor:
    h = net.inp(x)
    with torch.no_grad():
        view = h[:, :1]
    for block in net.blocks:
        h = torch.tanh(block(h)) * view
    return net.out(h)


WORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": net(),
    "list_argument": net(_list_argument, AppendsToList),
    "object_argument": net(_object_argument, ChangesObject),
    "ema_buffer": net(_ema_buffer),
    "view_under_no_grad": net(_view_under_no_grad),
    "view_changed_in_place": net(_view_changed_in_place),
    "overwritten_after_it_was_read": net(_overwritten_after_it_was_read),
    "checkpoint_closure": net(
        _each(lambda net, x, block, j: checkpoint(lambda: torch.tanh(block(x)) + x, use_reentrant=False))
    ),
    "checkpoint_of_what_was_changed_in_place": net(_checkpoint_of_changed(given=True)),
    "checkpoint_in_a_checkpoint_of_what_was_changed": net(_nested_checkpoints),
    "checkpoint_segments_with_dropout": net(_segments),
    "where": net(_each(lambda net, x, block, j: torch.where(x > 0, block(x), x))),
    "untaken_branch": net(_each(lambda net, x, block, j: x if x.norm() > 1e6 else torch.tanh(block(x)))),
    "set_item": net(_each(_set_item)),
    "part_of_a_plain_tensor": net(_part_of_plain(lambda plain, part: part.repeat(1, 4) + plain[:, 6:7])),
    "part_of_a_plain_tensor_put_back": net(_part_put_back),
    "chunks_iteration_einsum": net(_each(_chunks)),
    "in_place": net(_each(lambda net, x, block, j: block(x).mul_(0.9).add_(x))),
    "integer_from_values": net(_integer),
    "detached_data": net(_each(lambda net, x, block, j: torch.tanh(block(x)) - block(x).data.mean())),
    "local_noise": net(_noise),
    "dropout": net(block=lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4))),
    "dropout_in_glue": net(_each(lambda net, x, block, j: F.dropout(torch.tanh(block(x)), 0.3))),
    "value_shapes_after_the_last_module": net(step=_tail),
    "weight_norm": net(block=lambda: parametrizations.weight_norm(nn.Linear(16, 16))),
    "hooks_inside_blocks": Features,
    "custom_function": net(_each(lambda net, x, block, j: Reverse.apply(torch.tanh(block(x))))),
    "autocast": net(
        step=lambda net, b, i: F.cross_entropy(
            torch.autocast("cpu", torch.bfloat16)(lambda: net(b[0]))().double(), b[1]
        )
    ),
    "recurrent": Recurrent,
    "layer_drop": net(_layer_drop),
    "two_walks": net(step=_twice),
    "blocks_used_by_methods": net(_each(lambda net, x, block, j: block.encode(x)), Methods),  # type: ignore[operator]
    "compiled_blocks": net(block=lambda: torch.compile(nn.Linear(16, 16), backend="eager")),
}
SAME_NUMBERS_AS_PLAIN = set(WORKS) - {
    "layer_drop", "checkpoint_segments_with_dropout", "local_noise", "dropout", "dropout_in_glue", "compiled_blocks"
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it itself
def test_works(name: str) -> None:
    """Equal to the uncut step with the same random numbers, and (without random numbers) to plain PyTorch."""
    batch = batch_of("mlp", 7)
    batch = (batch[0], batch[1] % 4)
    module = build(WORKS[name])
    state = {n: x.clone() for n, x in module.state_dict().items()}
    cut = simulate(module, 3, batch, num_microbatches=2)
    for n, x in module.state_dict().items():
        assert torch.equal(x, state[n]), f"{n} was changed"
    assert "forward" not in module.inp.__dict__ if hasattr(module, "inp") else True
    assert len(cut.held) == 3
    uncut = simulate(build(WORKS[name]), 1, batch, num_microbatches=2)
    assert cut.result.loss is not None
    assert uncut.result.loss is not None
    assert float(cut.result.loss) == pytest.approx(float(uncut.result.loss), rel=1e-12)
    other = build(WORKS[name])
    for n, p in other.named_parameters():
        p.grad = uncut.gradients[n]
    worst, where = reference.worst_gradient(cut.gradients, other)
    assert worst <= 1e-9, where
    if name in SAME_NUMBERS_AS_PLAIN:
        plain = build(WORKS[name])
        parts, sizes = split_with_sizes(batch, 2)
        loss, _ = reference.train(plain, parts, [s / sum(sizes) for s in sizes])
        assert float(loss) == pytest.approx(float(cut.result.loss), rel=1e-9)
        worst, where = reference.worst_gradient(cut.gradients, plain)
        assert worst <= 1e-9, where


def test_compiled_functions_of_the_step_run_as_written() -> None:
    """Broken before: the compiler followed the interpreter, anew in every step."""
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def written(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y) + 0.1 * x.square().mean()

    loss = torch.compile(written, backend=backend)
    x, y = batch_of("mlp", 6)
    batch = (x, y % 4)
    cut = simulate(build(net(step=lambda net, b, i: loss(net(b[0]), b[1]))), 3, batch, num_microbatches=2)
    assert not compiled
    plain = build(net(step=lambda net, b, i: written(net(b[0]), b[1])))
    parts, sizes = split_with_sizes(batch, 2)
    reference.train(plain, parts, [s / sum(sizes) for s in sizes])
    assert reference.worst_gradient(cut.gradients, plain)[0] <= 1e-9
    loss(x[:, :4], batch[1])
    assert compiled, "the compiler is on again"


KEPT: list[Tensor] = []


class LeaksToGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.f(x))
        KEPT.append(y.pow(2).mean())
        return y


def _global(net: Net, x: Tensor) -> Tensor:
    KEPT.clear()
    for block in net.blocks:
        x = block(x)
    return net.out(net.inp(x)) * (1 + sum(KEPT))


class ReturnsNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.f(x))
        return y, y.mean().item()


def _numbers(net: Net, x: Tensor) -> Tensor:
    total, x = 0.0, net.inp(x)
    for block in net.blocks:
        x, number = block(x)
        total += number
    return net.out(x) * total


def _penalty(net: Net, batch: Any, batch_idx: int) -> Tensor:
    x = batch[0].clone().requires_grad_()
    y = net(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + gradient.pow(2).mean()


def _backward(net: Net, batch: Any, batch_idx: int) -> Tensor:
    loss = net(batch[0]).mean()
    loss.backward()
    return loss


def _alternating(net: Net, batch: Any, batch_idx: int) -> Tensor:
    x = net.inp(batch[0])
    return F.cross_entropy(net.out(x if batch_idx % 2 else net.blocks[0](x)), batch[1])


def _taken_branch(net: Net, x: Tensor, block: nn.Module, j: int) -> Tensor:
    return x if x.norm() > 0 and j == 3 else torch.tanh(block(x))


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "global": (net(_global, LeaksToGlobal), PipelineError, "global variable or a closure"),
    "python_number": (net(_numbers, ReturnsNumber), PipelineError, "Python number"),
    "gradient_penalty": (net(step=_penalty), PipelineError, r"calls grad\(\) itself"),
    "manual_backward": (net(step=_backward), PipelineError, r"calls backward\(\) itself"),
    "reentrant_checkpoint": (
        net(_each(lambda net, x, block, j: checkpoint(block, x, use_reentrant=True))),
        PipelineError,
        "use_reentrant=False",
    ),
    "checkpoint_over_what_was_changed_in_place": (
        net(_checkpoint_of_changed(given=False)),
        PipelineError,
        "Give it as an argument",
    ),
    "plain_tensor_of_which_a_part_was_changed": (
        net(_part_of_plain(lambda plain, part: plain * 2)),
        PipelineError,
        "elements in common with one which mul_ changed",
    ),
    "part_put_elsewhere": (net(_part_put_elsewhere), PipelineError, "elements in common with one which mul_ changed"),
    "value_shape_before_a_cut": (
        net(_each(lambda net, x, block, j: block(F.pad(x[:, x.mean(0) > 0], (0, 16))[:, :16]))),
        PipelineError,
        "shape that depends on values",
    ),
    "one_piece": (lambda: Net(lambda n, x: n.out(x[:, :16]), _linear), PipelineError, "only 1 piece: out"),
    "branch_on_values": (net(_each(_taken_branch)), DivergedError, r"blocks\.3"),
    "no_loss": (net(step=lambda net, b, i: {"los": net(b[0]).mean()}), PipelineError, r"\['los'\]"),
}


NO_LINE = {"one_piece", "no_loss"}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, kind, words = REFUSED[name]
    batch = batch_of("mlp", 8)
    with pytest.raises(kind, match=words) as error:
        simulate(build(make), 3, (batch[0], batch[1] % 4), num_microbatches=4)
    if name not in NO_LINE:  # nothing in the code is to blame
        assert re.search(r"test_edges\.py, line \d+, \S+:", str(error.value)), str(error.value)


def test_buffer_read_and_written_in_two_stages() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        x = net.inp(x) - net.ema
        for block in net.blocks:
            x = torch.tanh(block(x))
        with torch.no_grad():
            net.ema.add_(x.detach().mean(0))
        return net.out(x)

    with pytest.raises(PipelineError, match="buffer 'ema' is read in stage 0 and written in stage 2"):
        simulate(build(net(body)), 3, (torch.randn(4, 16).double(), torch.zeros(4).long()))


def test_shared_layer_is_one_piece() -> None:
    """ALBERT: one block called again and again is cut between its calls, its weights shared by the stages."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    from tests.pipeline.zoo import HuggingFace

    def make() -> nn.Module:
        config = AlbertConfig(
            vocab_size=50, embedding_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=6,
            num_attention_heads=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )  # fmt: skip
        return HuggingFace(AlbertForMaskedLM(config))

    ids = torch.randint(1, 50, (4, 6))
    batch = {"input_ids": ids, "labels": ids}
    cut = simulate(build(make), 2, batch, num_microbatches=2)
    layer = [n for n in cut.partitions[0].trace.call_names() if n.endswith("albert_layers.0")]
    assert len(layer) == 6
    plain = build(make)
    parts, sizes = split_with_sizes(batch, 2)
    reference.train(plain, parts, [s / sum(sizes) for s in sizes])
    worst, where = reference.worst_gradient(cut.gradients, plain)
    assert worst <= 1e-6, where  # Hugging Face rounds some of it to float32


@pytest.mark.parametrize("name", ["gpt", "hidden_states", "unet", "batch_norm", "masks"])
@pytest.mark.parametrize("stages", [2, 5])
def test_simulation_equals_the_uncut_step(name: str, stages: int) -> None:
    batch = batch_of(name, 5)
    cut = simulate(build(name), stages, batch, num_microbatches=2)
    plain = build(name)
    parts, sizes = split_with_sizes(batch, 2)
    loss, logs = reference.train(plain, parts, [s / sum(sizes) for s in sizes])
    assert float(cut.result.loss) == pytest.approx(float(loss), rel=1e-12)
    worst, where = reference.worst_gradient(cut.gradients, plain)
    assert worst <= 1e-9, where
    assert set().union(*cut.held) == {n for n, _ in plain.named_parameters()}
    assert {e.name for e in cut.result.logs} == {n for n, _ in logs}
