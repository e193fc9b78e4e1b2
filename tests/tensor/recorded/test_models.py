"""Whole models: steps by recorded programs equal the rules bit for bit, and one process up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

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
