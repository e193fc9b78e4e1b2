"""More Hugging Face models, and adapters of the peft package: exact for 2 and 4 ranks, and for any wrong plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_3d.tensor import plan_tensor_parallel, verify_tensor_plan
from tests.tensor.helpers import EXACT, check_model
from tests.tensor.hf_models import HF, language_model, llama
from tests.tensor.hf_more import MORE, llama_with_adapters
from tests.tensor.test_models import GATHERS, random_plan


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MORE)
def test_equal_to_one_process(name: str, size: int) -> None:
    check_model(MORE[name], size)


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize("name", ["opt", "bloom", "whisper", "clip"])
def test_equal_with_sequence_parallelism(name: str) -> None:
    check_model(MORE[name], 2, sequence=True)


@pytest.mark.parametrize(("heads", "size"), [(1, 2), (1, 4), (2, 4)])
def test_fewer_key_value_heads_than_ranks(heads: int, size: int) -> None:
    check_model((lambda: llama(num_key_value_heads=heads), language_model, 0.85), size)


def is_exact_for_any_plan(build: Any, step: Any, size: int, seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(0)
        model = build()
        report = verify_tensor_plan(model, random_plan(model, size, seed), step)
        assert report.worst <= EXACT, f"seed {seed}: {report}"


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize("name", ["opt", "bloom", "phi3", "qwen2_moe", "deepseek_v3", "whisper", "clip", "lora"])
def test_a_wrong_plan_is_slow_but_never_wrong(name: str) -> None:
    build, step, _ = MORE[name]
    is_exact_for_any_plan(build, step, 2, range(1))


@pytest.mark.slow
@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [*HF, *MORE])
def test_many_wrong_plans_are_slow_but_never_wrong(name: str, size: int) -> None:
    build, step, _ = {**HF, **MORE}[name]
    is_exact_for_any_plan(build, step, size, range(1, 6))


def test_only_adapters_are_trained_and_stay_so() -> None:
    model = llama_with_adapters()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 5  # two matrices, two blocks, five layers
    assert all("lora_" in name for name in trained)
    plan = plan_tensor_parallel(model, language_model, 2)
    report = verify_tensor_plan(model, plan, language_model)
    assert report.worst <= EXACT, str(report)  # also: a frozen parameter that gets a gradient counts as wrong
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    kinds = {name.partition("layers.0.")[2]: plan.decisions[name].kind for name in plan.decisions if "layers.0" in name}
    # an adapter's second matrix is cut as the outputs of a column layer, its first as the inputs of a row layer
    assert kinds["self_attn.q_proj.base_layer.weight"] == kinds["self_attn.q_proj.lora_B.default.weight"] == "column"
    assert kinds["self_attn.o_proj.base_layer.weight"] == kinds["self_attn.o_proj.lora_A.default.weight"] == "row"
    assert kinds["mlp.down_proj.base_layer.weight"] == kinds["mlp.down_proj.lora_A.default.weight"] == "row"


def test_code_that_computes_in_float32_is_proved_in_float64() -> None:
    """HF norms and rotary tables ask for float32 inside: without the proof's lift to float64 the difference is 1e-8."""
    model = llama()
    report = verify_tensor_plan(model, plan_tensor_parallel(model, language_model, 2), language_model)
    assert report.worst < 1e-13
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_classes_of_a_model_are_left_alone() -> None:
    model: nn.Module = MORE["phi3"][0]()
    before = [type(m) for m in model.modules()]
    plan_tensor_parallel(model, language_model, 2)
    assert [type(m) for m in model.modules()] == before
