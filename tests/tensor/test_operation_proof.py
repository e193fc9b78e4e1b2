"""The proof by operations: it sees every fault the proof by running sees, and it needs no values of the model."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.errors import ParityError
from lightning_3d.tensor import plan_tensor_parallel, prove_operations, register_rule
from lightning_3d.tensor.registry import RULES, cached_handlers
from lightning_3d.tensor.sharded import ShardedTensor
from tests.tensor.hf_models import HF
from tests.tensor.models import PLAIN, NanoGPT, next_token
from tests.tensor.test_models import GATHERS, random_plan
from tests.tensor.test_verify import BROKEN


@pytest.mark.parametrize("name", [*PLAIN, *HF])
def test_all_operations_are_proved(name: str) -> None:
    build, step, _ = {**PLAIN, **HF}[name]
    size = 4 if name in ("nanogpt", "nanogpt_gqa", "timm", "llama", "gpt2", "t5", "mixtral") else 2
    torch.manual_seed(0)
    model = build()
    plan = plan_tensor_parallel(model, step, size)
    report = prove_operations(model, plan, step)
    assert report.worst < 1e-12, str(report)
    assert not report.unproved
    assert bool(report.errors) == bool(plan.sharded_fraction)


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize("name", ["nanogpt", "timm", "lora", "llama", "t5"])
def test_any_placement_of_parameters_and_the_sequence_cut(name: str) -> None:
    build, step, _ = {**PLAIN, **HF}[name]
    torch.manual_seed(0)
    model = build()
    plans = [random_plan(model, 2, seed) for seed in range(3)]
    plans.append(plan_tensor_parallel(model, step, 2, sequence=True))
    for plan in plans:
        report = prove_operations(model, plan, step)
        assert report.worst < 1e-12, str(report)
        assert len(report.unproved) <= len(report.errors) // 10, report.unproved


@pytest.mark.parametrize(("where", "name", "broken", "build", "step"), [case[:5] for case in BROKEN])
def test_a_broken_collective_is_seen(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, broken: Any, build: Any, step: Any
) -> None:
    model = build()
    plan = plan_tensor_parallel(model, step, 2)
    assert prove_operations(model, plan, step).ok
    monkeypatch.setattr(where, name, broken)
    report = prove_operations(model, plan, step)
    assert not report.ok
    assert report.worst > 1e-3
    with pytest.raises(ParityError, match=r"FAILED.*'replicate'"):
        report.raise_if_wrong()


@pytest.fixture
def rules_restored() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)
    cached_handlers.clear()


@pytest.mark.usefixtures("rules_restored")
def test_a_wrong_rule_is_named() -> None:
    @register_rule("gelu")
    def _wrong(func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        return ShardedTensor(F.gelu(x.local) * (1 + x.group.rank * 1e-3), x.placement, x.group, x.sources)

    model = NanoGPT()
    plan = plan_tensor_parallel(model, next_token, 2)
    report = prove_operations(model, plan, next_token)
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.startswith("gelu(")


def test_a_large_model_on_meta() -> None:
    """Seven billion parameters: nothing of their size is made."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, vocab_size=32003)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    index = torch.randint(0, 1000, (1, 8))

    def step(m: Any) -> Tensor:
        loss: Tensor = m(input_ids=index, labels=index).loss
        return loss

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = plan_tensor_parallel(model, step, 8)
    report = prove_operations(model, plan, step)
    assert plan.sharded_fraction > 0.99
    assert report.worst < 1e-12, str(report)
    assert report.calls > 32 * 30
    assert not report.unproved
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kB
    assert all(p.is_meta for p in model.parameters())
