"""What a step may do between its blocks and be cut all the same, and what it is told otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_3d.errors import DivergedError, PipelineError
from lightning_3d.pipeline import probe_atom, probe_run
from lightning_3d.pipeline.simulate import simulate
from lightning_3d.testing import relative_error

Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Six blocks and a head; cases override `body` or replace the blocks."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.inp, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList(block() for _ in range(6)), nn.Linear(8, 5)

    def log(self, name: str, value: Any, **_: Any) -> None:
        pass

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.inp(batch["x"]), batch)), batch["y"])


def batch_of(*size: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*(size or (6, 8)), generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.arange(len(x)) % 5, "lengths": torch.tensor([4, 1, 3, 2, 4, 1])}


def made(kind: Callable[[], Net]) -> Net:
    torch.manual_seed(0)
    return kind().double()


def equal(kind: Callable[[], Net], batch: Batch | None = None, stages: int = 3) -> None:
    """The stages give the gradients of the step itself."""
    batch = batch or batch_of()
    plain = made(kind)
    loss = plain.training_step(batch, 0)
    loss.backward()
    found = simulate(made(kind), stages, batch)
    assert len({w.stage for w in found.partitions[0].windows}) == stages
    assert found.result.loss is not None
    assert relative_error(found.result.loss, loss.detach()) <= 1e-12
    for name, parameter in plain.named_parameters():
        got = found.gradients[name]
        if parameter.grad is None:
            assert got is None or not got.any(), name
        else:
            assert got is not None, name
            assert relative_error(got, parameter.grad) <= 1e-12, name


def refused(kind: Callable[[], Net], *words: str, error: type[Exception] = PipelineError) -> str:
    with pytest.raises(error) as caught:
        simulate(made(kind), 2, batch_of())
    for word in (*words, "test_followed.py"):
        assert word in str(caught.value)
    return str(caught.value)


# -- backward hooks
class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_hook(lambda m, given, out: (given[0] * 0.9,))
            block.register_full_backward_pre_hook(lambda m, out: (out[0].clamp(-0.1, 0.1),))


class HookedWhole(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body_ = nn.Sequential(*self.blocks)
        del self.blocks
        self.body_.register_full_backward_hook(lambda m, given, out: None)

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        return self.body_(x)  # type: ignore[no-any-return]


def test_full_backward_hooks_on_a_block() -> None:
    equal(Hooked)
    refused(HookedWhole, "full backward hooks", "Put the hook on modules inside of it", "body_.0")


# -- weights of others
class Weighed(Net):
    def body(self, x: Tensor, batch: Batch) -> Tensor:
        x = super().body(x, batch)
        block, first = self.blocks[3], dict(self.blocks[0].named_parameters())
        changed = {name: p * 1.1 + 0.1 * first[name] for name, p in block.named_parameters()}
        x = functional_call(block, changed, (x,))
        return functional_call(block, {"linear.weight": torch.eye(8, dtype=x.dtype)}, (x,))  # type: ignore[no-any-return]


def test_a_block_with_other_weights() -> None:
    equal(Weighed)


# -- mutable arguments and results
class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: dict[str, Any]) -> None:
        state["h"] = self.block(state["h"])
        state.setdefault("all", []).append(state["h"])
        state["old"].append(state["h"].std())


class Collects(Net):
    def __init__(self) -> None:
        super().__init__(Collecting)

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        old: list[Tensor] = []
        state: dict[str, Any] = {"h": x, "old": old}
        for block in self.blocks:
            block(state)
        assert state["old"] is old
        assert len(state["all"]) == len(old) == 6
        return state["h"] + torch.stack(state["all"]).mean(0) * torch.stack(old).sum()  # type: ignore[no-any-return]


@dataclass
class State:
    hidden: Tensor
    extra: dict[str, list[Tensor]] = field(default_factory=dict)
    depth: int = 0


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: State) -> State:
        x = self.block(state.hidden)
        return State(x, {"std": [*state.extra.get("std", []), x.std()]}, state.depth + 1)


class Returns(Net):
    def __init__(self) -> None:
        super().__init__(Returning)

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state)
        assert state.depth == 6
        return state.hidden * torch.stack(state.extra["std"]).sum()


def test_a_list_a_block_makes_in_a_dict_it_is_given() -> None:
    equal(Collects)


def test_a_dataclass_from_a_block() -> None:
    equal(Returns)


class Yielding(Block):
    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        yield super().forward(x)


class Yields(Net):
    def __init__(self) -> None:
        super().__init__(Yielding)

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        for block in self.blocks:
            (x,) = block(x)
        return x


def test_a_generator_from_a_block() -> None:
    refused(Yields, "atom:blocks.0 returns a generator", "Return a list")


# -- packed sequences
class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__(lambda: nn.GRU(8, 8, batch_first=True))

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        packed: Any = pack_padded_sequence(x, batch["lengths"], batch_first=True, enforce_sorted=False)
        for rnn in self.blocks:
            packed, last = rnn(packed)
        out, lengths = pad_packed_sequence(packed, batch_first=True, padding_value=0.5, total_length=5)
        assert torch.equal(lengths, batch["lengths"])
        return out[:, 3:].sum(1) + last[-1]


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 4, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.rnn(pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False))
        return pad_packed_sequence(out)[0]


class PacksInside(Net):
    def __init__(self) -> None:
        super().__init__(Packing)

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        x = x.transpose(0, 1)
        for rnn in self.blocks:
            x = rnn(x, batch["lengths"])
        return x.sum(0)


@pytest.mark.parametrize("kind", [Recurrent, PacksInside])
def test_packed_sequences(kind: Callable[[], Net]) -> None:
    """Broken before: the lengths were zeros while the step was planned."""
    equal(kind, batch_of(6, 4, 8))


# -- refusals
class Mapped(Net):
    def body(self, x: Tensor, batch: Batch) -> Tensor:
        return torch.vmap(self.blocks[0])(super().body(x, batch))  # type: ignore[no-any-return]


class Averaging(Net):
    of_data = False

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8)

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        with torch.no_grad():
            teacher, student = self.teacher.weight, self.inp.weight
            if self.of_data:
                teacher.data.mul_(0.9).add_(student.data, alpha=0.1)
            else:
                teacher.mul_(0.9).add_(student, alpha=0.1)
        return super().body(x, batch) + self.teacher(x)  # type: ignore[no-any-return]


class AveragingData(Averaging):
    of_data = True


class Talking(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.root[0].log("train/size", x.abs().mean())  # type: ignore[index]
        return super().forward(x)


class Talks(Net):
    def __init__(self) -> None:
        super().__init__(Talking)
        for block in self.blocks:
            block.root = [self]  # type: ignore[assignment]


def test_a_transform_over_blocks() -> None:
    refused(Mapped, "vmap", "write the batch dim out")


@pytest.mark.parametrize("kind", [Averaging, AveragingData])
def test_weights_changed_in_the_step(kind: Callable[[], Net]) -> None:
    refused(kind, "mul_ changes the parameter 'teacher.weight' in place", "on_train_batch_end", "one module")


def test_a_block_that_logs() -> None:
    """Broken before: what blocks of all stages but the last logged was dropped."""
    refused(Talks, "atom:blocks.0 logs 'train/size'", "call self.log in training_step")


# -- whose error
class Wrong(Net):
    def body(self, x: Tensor, batch: Batch) -> Tensor:
        x = super().body(x, batch)
        if batch["y"].max() == 4:
            raise KeyError("mine")
        return x


class Misshapen(Net):
    def body(self, x: Tensor, batch: Batch) -> Tensor:
        return super().body(x, batch) @ torch.ones(3, 3, dtype=x.dtype)


class MisshapenBlock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].linear = nn.Linear(7, 8)


def test_errors_of_the_user_stay_what_they_are() -> None:
    with pytest.raises(KeyError, match="mine"):
        simulate(made(Wrong), 2, batch_of())
    for kind, shapes in ((Misshapen, "6x8 and 3x3"), (MisshapenBlock, "6x8 and 7x8")):
        with pytest.raises(RuntimeError, match=shapes):
            simulate(made(kind), 2, batch_of())


@pytest.mark.parametrize("error", [KeyError(1), RecursionError("deep"), NotImplementedError("no"), ValueError("zip")])
def test_errors_of_the_plan_name_the_event_and_the_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    code = (
        "def failing(run, event, *args, **kwargs):\n"
        "    if event.name == 'atom:blocks.2': raise error\n"
        "    return plain(run, event, *args, **kwargs)"
    )
    space: dict[str, Any] = {"plain": probe_run.describe, "error": error}
    exec(compile(code, probe_run.__file__, "exec"), space)  # as lines of the package
    monkeypatch.setattr(probe_run, "describe", space["failing"])
    text = refused(Net, "'blocks.2', which training_step calls, cannot be followed", type(error).__name__)
    assert re.search(r"line \d+, body: x = block\(x\)", text)
    assert "pipeline_parallel_size=1" in text


# -- loops until a value says stop
class Converges(Net):
    """The loop is on the last stage, which may do what it wants."""

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        x = super().body(x, batch)
        while not bool(x.abs().mean() < 0.2):
            x = self.blocks[-1](x) * 0.1
        return x


class ConvergesInNumbers(Net):
    def body(self, x: Tensor, batch: Batch) -> Tensor:
        x = super().body(x, batch)
        while x.abs().mean().item() > 0.2:
            x = self.blocks[-1](x) * 0.1
        return x


class Checked(Net):
    """A check in a loop that ends by itself: its other answer is an error."""

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        for _ in range(150):
            x = x * 1.001
            if x.isnan().any():
                raise ValueError("not a number")
        return super().body(x, batch)


class CallsAgain(Net):
    def body(self, x: Tensor, batch: Batch) -> Tensor:
        x = super().body(x, batch)
        while not bool(x.abs().mean() < 0.2):
            x = self.blocks[0](x) * 0.1
        return x


class Counts(Net):
    def body(self, x: Tensor, batch: Batch) -> Tensor:
        x = super().body(x, batch)
        count = (x * 0).sum()
        while count.item() < 5:
            count = count + 1
        return x * count


@pytest.mark.parametrize("kind", [Converges, ConvergesInNumbers, Checked])
def test_a_loop_that_ends_with_another_answer(kind: Callable[[], Net]) -> None:
    equal(kind, stages=2)


def test_a_loop_that_no_answer_ends() -> None:
    refused(Counts, "a loop never ends", "while count.item() < 5:", "range(n)")


class Shrinks(Net):
    """Its shapes decide, which ones would give: no line asks for a value."""

    def body(self, x: Tensor, batch: Batch) -> Tensor:
        x = super().body(x, batch)
        while len(x[x.sum(1) > 0]) == len(x):
            x = x - 1
        return x


class Doubling(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        while x.abs().max() < 1:
            x = x * 2
        return x


def test_loops_without_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_run, "_MOST_EVENTS", 500)
    refused(Shrinks, "has made 500 calls while it is planned", "fixed number of iterations")
    monkeypatch.setattr(probe_atom, "_MOST_OPERATIONS", 500)
    refused(lambda: Net(Doubling), "were zeros while the step is planned", "Bound the loop")


def test_a_loop_that_needs_the_first_stage_again() -> None:
    refused(CallsAgain, "calls 'blocks.0' where the planned path does not", "eos_token_id=None", error=DivergedError)
