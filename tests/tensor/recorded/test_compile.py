"""Blocks the user compiled: planned and followed eagerly, their recorded programs compiled as the user asked."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tensor.models import PLAIN, NanoGPT, TimmBlock, mean_square, next_token, tokens
from tests.tensor.recorded.helpers import both, check_against_one_process, check_against_rules, reasons, replays
from tests.tensor.test_cases import Separate
from tests.tensor.test_fused_heads import Fused

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute of a Tensor"
)


def by_wrapper(blocks: Any, **options: Any) -> None:
    for index in range(len(blocks)):
        blocks[index] = torch.compile(blocks[index], **options)


def in_place(blocks: Any, **options: Any) -> None:
    for block in blocks:
        block.compile(**options)


class Counting:
    """The backend aot_eager; how many graphs it got."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("way", [by_wrapper, in_place])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_compiled_blocks_of_a_language_model(way: Callable[..., None], p: float) -> None:
    backend = Counting()

    def build() -> nn.Module:
        model = NanoGPT(p=p, flash=False)
        way(model.transformer.h, backend=backend, fullgraph=True)
        return model

    model, plan, recorded, rules = both(build, next_token)
    check_against_rules(recorded, rules)
    if not p:
        check_against_one_process(model, plan, next_token, recorded, 1e-9)
    assert replays(recorded), reasons(recorded)
    assert backend.graphs == 2, "one graph per rank: equal blocks share it"


@pytest.mark.parametrize("name", ["nanogpt", "nanogpt_gqa", "timm", "encoder"])
def test_other_blocks(name: str) -> None:
    build, step, _ = PLAIN[name]
    backend = Counting()

    def compiled() -> nn.Module:
        model: Any = build()
        blocks = model if name == "timm" else model.layers if name == "encoder" else model.transformer.h
        in_place(blocks, backend=backend, fullgraph=True)
        return model

    _, _, recorded, rules = both(compiled, step)
    check_against_rules(recorded, rules)
    # equal blocks share a graph; the input of the first one needs no gradient, unless an embedding made it
    assert backend.graphs == (2 if name.startswith("nanogpt") else 4)
    assert replays(recorded)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_heads_that_ranks_share(kv_heads: int | None) -> None:
    """Two key/value heads on four ranks: the gradient of the weight is summed over those that share it.

    With a number `kv_heads` they are fused with the queries, and the ranks that share one gather it.
    """
    backend = Counting()
    width = 64 if kv_heads is None else 32

    def build() -> nn.Module:
        attention = [Separate(64, 8, 2) if kv_heads is None else Fused(4, kv_heads, "split") for _ in range(2)]
        blocks = [Wrapped(a) for a in attention]
        in_place(blocks, backend=backend, fullgraph=True)
        return nn.Sequential(nn.Embedding(101, width), *blocks, nn.Linear(width, 101))

    def step(model: Any) -> Tensor:
        index = tokens(101, 2, 8)
        return F.cross_entropy(model(index).flatten(0, 1), index.flatten())

    model, plan, recorded, rules = both(build, step, 4)
    cut = plan.decisions["1.inner.k.weight" if kv_heads is None else "1.inner.qkv.weight"].placement
    assert cut is not None
    assert (cut.copies, cut.shares) == ((2, ()) if kv_heads is None else (1, (1, 4 // kv_heads, 4 // kv_heads)))
    check_against_rules(recorded, rules)
    check_against_one_process(model, plan, step, recorded, 1e-9)
    assert replays(recorded), reasons(recorded)
    assert backend.graphs


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


@pytest.mark.filterwarnings("ignore:.*no tensor-parallel form")
def test_with_sequence_parallelism() -> None:
    backend = Counting()

    def build() -> nn.Module:
        model = nn.Sequential(TimmBlock(), TimmBlock())
        in_place(model, backend=backend)
        return model

    _, _, recorded, rules = both(build, mean_square, sequence=True)
    check_against_rules(recorded, rules)
    assert backend.graphs


class Whole(nn.Module):
    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.net = torch.compile(nn.Sequential(TimmBlock(), nn.LayerNorm(32), TimmBlock()), backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_a_whole_model() -> None:
    backend = Counting()
    _, _, recorded, rules = both(lambda: Whole(backend), mean_square)
    check_against_rules(recorded, rules)
    assert list(recorded[0].recording.blocks) == ["net._orig_mod"]
    assert replays(recorded) == 2
    assert backend.graphs == 2


class ReadsAValue(TimmBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean().item() < 1e9 else x


def failing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("this backend fails")


@pytest.mark.parametrize(
    ("block", "backend", "why"),
    [(ReadsAValue, "aot_eager", "it reads a value"), (TimmBlock, failing, "this backend fails")],
)
def test_what_cannot_be_compiled_runs_uncompiled_with_a_warning(block: Any, backend: Any, why: str) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(block(), block())
        in_place(model, backend=backend)
        return model

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _, _, recorded, rules = both(build, mean_square, steps=6)
    check_against_rules(recorded, rules)
    told = [str(w.message) for w in found if "runs uncompiled" in str(w.message)]
    assert len(told) == 2, found  # one for each block, on the first rank
    assert all(why in text for text in told), told


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_inductor() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(TimmBlock(), TimmBlock())
        in_place(model)
        return model

    _, _, recorded, rules = both(build, mean_square)
    for ours, theirs in zip(recorded, rules, strict=True):
        for a, b in zip(ours.losses, theirs.losses, strict=True):
            torch.testing.assert_close(a, b)
    assert replays(recorded)
