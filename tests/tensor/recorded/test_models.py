"""Whole models: steps by recorded programs equal the rules bit for bit, and one process up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tensor_overhead import Alone, blocks
from lightning_3d.tensor import TensorGroup, plan_tensor_parallel, rewrite
from lightning_3d.tensor.recorded.recording import Recording
from tests.tensor.models import PLAIN, NanoGPT, encoder, mean_square, next_token
from tests.tensor.recorded.helpers import both, check_against_one_process, check_against_rules, reasons, replays

BLOCKS = ["nanogpt", "nanogpt_manual", "nanogpt_gqa", "timm", "encoder", "decoder"]
GATHERS = "ignore:.*no tensor-parallel form"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", BLOCKS)
def test_plain_models(name: str, size: int) -> None:
    build, step, _ = PLAIN[name]
    model, plan, recorded, rules = both(build, step, size)
    check_against_rules(recorded, rules)
    check_against_one_process(model, plan, step, recorded, 1e-6)  # torch's encoder computes some of it in float32
    assert replays(recorded) >= 4, reasons(recorded)


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize("name", BLOCKS)
def test_with_sequence_parallelism(name: str) -> None:
    build, step, _ = PLAIN[name]
    _, _, recorded, rules = both(build, step, sequence=True)
    check_against_rules(recorded, rules)
    assert replays(recorded) >= 4, reasons(recorded)


@pytest.mark.parametrize(
    ("build", "step"),
    [
        (lambda: NanoGPT(p=0.3), next_token),
        (lambda: NanoGPT(p=0.3, flash=False), next_token),
        (lambda: nn.Sequential(encoder(), encoder()), mean_square),
    ],
)
def test_dropout_draws_what_the_rules_draw(build: Callable[[], nn.Module], step: Any) -> None:
    _, _, recorded, rules = both(build, step)
    check_against_rules(recorded, rules)
    assert replays(recorded)


@pytest.mark.parametrize("name", ["llama", "llama_kv1", "gpt2", "bert", "vit", "qwen3"])
def test_hugging_face_models(name: str) -> None:
    from tests.tensor.hf_models import HF

    build, step, _ = HF[name]

    def without_cache() -> nn.Module:
        model = build()
        model.config.use_cache = False  # a cache object would be handed to every layer
        return model

    model, plan, recorded, rules = both(without_cache, step)
    check_against_rules(recorded, rules, 1e-6)
    check_against_one_process(model, plan, step, recorded, 1e-5)  # their norms compute in float32
    assert replays(recorded) >= 4, reasons(recorded)


class _Copies(TorchDispatchMode):
    """Counts copies of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_gradients_that_matmuls_make_are_reduced_where_they_are() -> None:
    """Nobody else has them, so a block's backward copies none before its all-reduces."""
    model, step = blocks(2)
    group = TensorGroup(Alone("tp", 0, 2))
    rewrite(model, plan_tensor_parallel(model, step, 2), group)
    recording, copies = Recording(model, group), _Copies()
    for _ in range(3):
        with recording.running(begins=True):
            loss = step(model)
            with copies:
                copies.count = 0
                loss.backward()
    assert all(block.replays for block in recording.blocks.values())
    assert copies.count == 0
