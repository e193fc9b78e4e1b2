"""Hugging Face models as they come: attention variants, packed weights, ties, masks, loss inside the model."""

from __future__ import annotations

import pytest
import torch

from lightning_3d.tensor import plan_tensor_parallel, verify_tensor_plan
from tests.tensor.helpers import EXACT, check_model
from tests.tensor.hf_models import HF
from tests.tensor.test_models import GATHERS, random_plan


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", HF)
def test_equal_to_one_process(name: str, size: int) -> None:
    check_model(HF[name], size)


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize("name", ["llama", "llama_kv1", "bert", "t5", "mixtral_eager"])
def test_equal_with_sequence_parallelism(name: str) -> None:
    check_model(HF[name], 2, sequence=True)


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "qwen3"])
def test_a_wrong_plan_is_slow_but_never_wrong(name: str) -> None:
    build, step, _ = HF[name]
    for seed in range(3):
        torch.manual_seed(0)
        model = build()
        report = verify_tensor_plan(model, random_plan(model, 2, seed), step)
        assert report.worst <= EXACT, f"seed {seed}: {report}"


def test_collectives_of_llama() -> None:
    build, step, _ = HF["llama"]
    model = build()
    report = verify_tensor_plan(model, plan_tensor_parallel(model, step, 2), step)
    assert {op: t.calls for (_, _, op), t in report.ledger.traffic.items()} == {"all_reduce": 2 * 4 + 1 + 1 + 2}
