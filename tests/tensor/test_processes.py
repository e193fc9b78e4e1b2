"""The same over real processes: gloo, two and four ranks, several models in one launch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.comm import Communicator, ProcessCommunicator
from lightning_3d.probe import agree, intercept_functions
from lightning_3d.tensor import TensorGroup, function_guard, plan_tensor_parallel, rewrite, whole
from lightning_3d.tensor.verify import Exactly
from lightning_3d.testing import preload, relative_error, run_distributed
from tests.tensor.models import PLAIN, NanoGPT, next_token, tokens

preload("transformers")


def communicator() -> ProcessCommunicator:
    assert dist.group.WORLD is not None
    return ProcessCommunicator("tp", dist.group.WORLD, torch.device("cpu"))


def errors_of(build: Any, step: Any, comm: Communicator, *, sequence: bool = False, lift: bool = False) -> float:
    """Largest relative error of loss and gradients, cut model over processes against the original in this process."""
    torch.manual_seed(0)
    original = build().double()
    plan = plan_tensor_parallel(original, step, comm.size, sequence=sequence)
    agree("the plan", plan.to_dict(), comm)
    model = copy.deepcopy(original)
    rewrite(model, plan, comm)
    with intercept_functions(function_guard, 1), Exactly() if lift else nullcontext():
        want, got = step(original), step(model)
        want.backward()
        got.backward()
    worst = relative_error(got, want)
    mine = dict(model.named_parameters())
    for name, parameter in original.named_parameters():
        cut, grad = plan.decisions[name].placement, mine[name].grad
        if parameter.grad is None:
            assert grad is None or not grad.any(), name
            continue
        if grad is None:
            grad = torch.zeros_like(mine[name])
        full = grad if cut is None else cut.to_global(comm.all_gather(grad), comm.size)
        worst = max(worst, relative_error(full, parameter.grad))
    return worst


def plain_models() -> dict[str, float]:
    comm = communicator()
    out = {name: errors_of(build, step, comm) for name, (build, step, _) in PLAIN.items()}
    for name in ("nanogpt", "gated", "timm"):
        build, step, _ = PLAIN[name]
        out[f"{name}, sequence"] = errors_of(build, step, comm, sequence=True)
    return out


@pytest.mark.parametrize("size", [2, 4])
def test_plain_models(size: int) -> None:
    for errors in run_distributed(plain_models, size, timeout=60):
        assert max(errors.values()) <= 1e-9, errors


def hf_models() -> dict[str, float]:
    from tests.tensor.hf_models import HF

    comm = communicator()
    return {n: errors_of(*HF[n][:2], comm, lift=True) for n in ("llama", "gpt2", "t5", "bert")}


def test_hugging_face_models() -> None:
    for errors in run_distributed(hf_models, 2, timeout=90):
        assert max(errors.values()) <= 1e-9, errors


def counts_and_dtypes() -> Any:
    """Collectives of one step by phase; bfloat16, masks and bools over the wire."""
    comm = communicator()
    model = NanoGPT()
    plan = plan_tensor_parallel(model, next_token, 2)
    rewrite(model, plan, comm)
    with comm.ledger.during("forward"):
        loss = next_token(model)
    with comm.ledger.during("backward"):
        loss.backward()
    counts = {key: t.calls for key, t in comm.ledger.traffic.items()}
    with torch.autocast("cpu", torch.bfloat16):
        low = next_token(model)
    logits = model(tokens(101, 2, 8))[0]
    largest = logits.abs().max().item()
    return counts, loss.item(), low.item(), str(low.dtype), bool((logits > largest).any()), whole(logits).shape


def test_collectives_by_phase() -> None:
    results = run_distributed(counts_and_dtypes, 2)
    assert results[0] == results[1], "ranks must see the same values, to the last bit"
    counts, loss, low, dtype, any_larger, shape = results[0]
    assert counts == {
        ("forward", "tp", "all_reduce"): 1 + 2 * 2 + 2,  # embedding, two per block, two of the loss
        ("backward", "tp", "all_reduce"): 2 * 2 + 1,  # two per block, the head
    }
    assert dtype == "torch.float32"
    assert abs(low - loss) < 0.01 * loss
    assert any_larger is False
    assert tuple(shape) == (2, 8, 101)


def dropout_step() -> Any:
    comm = communicator()
    torch.manual_seed(0)
    model = NanoGPT(p=0.2)
    rewrite(model, plan_tensor_parallel(model, next_token, 2), TensorGroup(comm))
    torch.manual_seed(5)
    loss = next_token(model)
    loss.backward()
    replicated = [p.grad for p in model.parameters() if not hasattr(p, "placement")]
    noise = F.dropout(torch.ones(4), 0.5)
    digest: list[Tensor] = [torch.stack([g.double().sum() for g in replicated]), noise.double()]
    return loss.item(), [d.tolist() for d in digest], torch.get_rng_state().sum().item()


def test_replicated_gradients_are_bit_equal_under_dropout() -> None:
    first, second = run_distributed(dropout_step, 2)
    assert first == second
