"""Dropout and noise: different inside a sharded region, equal outside, in step, replayed by recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.tensor import (
    Placement,
    ShardedTensor,
    TensorGroup,
    ThreadCommunicator,
    plan_tensor_parallel,
    rewrite,
    run_simulated,
)
from lightning_3d.testing import relative_error
from tests.models import LiftToDouble
from tests.tensor.hf_models import bert, gpt2, language_model, t5
from tests.tensor.models import NanoGPT, mean_square, next_token

CUT = Placement(1, (64,))


def test_masks_differ_between_ranks_and_the_default_generator_stays_in_step() -> None:
    def body(comm: ThreadCommunicator) -> Any:
        torch.manual_seed(1)
        x = ShardedTensor(torch.ones(8, 32), CUT, TensorGroup(comm))
        first, second = F.dropout(x, 0.5).local, F.dropout(x, 0.5).local
        outside = F.dropout(torch.ones(8, 64), 0.5)
        noise = torch.rand_like(x).local
        return first, second, outside, noise, torch.get_rng_state()

    a, b = run_simulated(2, body)
    assert not torch.equal(a[0], b[0])
    assert not torch.equal(a[0], a[1])
    assert torch.equal(a[2], b[2])
    assert not torch.equal(a[3], b[3])
    assert torch.equal(a[4], b[4])
    assert abs(a[0].mean().item() - 1) < 0.2
    assert set(a[0].unique().tolist()) == {0.0, 2.0}


def test_no_dropout_in_evaluation() -> None:
    def body(comm: ThreadCommunicator) -> Any:
        state = torch.get_rng_state()
        x = ShardedTensor(torch.ones(8, 32), CUT, TensorGroup(comm))
        assert F.dropout(x, 0.5, training=False) is x
        assert F.dropout(x, 0.0) is x
        return torch.equal(torch.get_rng_state(), state)

    assert all(run_simulated(2, body))


def test_in_place_dropout() -> None:
    def body(comm: ThreadCommunicator) -> Any:
        x = ShardedTensor(torch.ones(8, 32), CUT, TensorGroup(comm))
        y = nn.Dropout(0.5, inplace=True)(x)
        return y is x, (x.local == 0).float().mean().item()

    assert all(same and 0.2 < dropped < 0.8 for same, dropped in run_simulated(2, body))


def encoder(p: float) -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, dropout=p, batch_first=True), 2, enable_nested_tensor=False
    )


CASES: list[tuple[Any, Any]] = [
    (lambda: NanoGPT(p=0.3), next_token),
    (lambda: NanoGPT(p=0.3, flash=False), next_token),
    (lambda: NanoGPT(p=0.3, kv_heads=2), next_token),
    (lambda: encoder(0.3), mean_square),
    (lambda: gpt2(0.3), language_model),
    (lambda: bert(0.3), language_model),
    (lambda: t5(0.3), language_model),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_exact_mode_equals_one_process(case: int) -> None:
    build, step = CASES[case]
    torch.manual_seed(0)
    want = build().double()
    plan = plan_tensor_parallel(want, step, 2)
    torch.manual_seed(5)
    with LiftToDouble():  # Hugging Face models compute their loss in float32
        loss = step(want)
    loss.backward()

    def body(comm: ThreadCommunicator) -> Any:
        torch.manual_seed(0)
        model = build().double()
        rewrite(model, plan, TensorGroup(comm, exact_dropout=True))
        torch.manual_seed(5)
        with LiftToDouble():
            value = step(model)
        value.backward()
        return value.detach(), {n: p.grad for n, p in model.named_parameters()}

    ranks = run_simulated(2, body)
    for rank, (value, grads) in enumerate(ranks):
        assert relative_error(value, loss) < 1e-12
        for name, parameter in want.named_parameters():
            cut = plan.decisions[name].placement
            gradient = parameter.grad if cut is None else cut.to_local(parameter.grad, rank, 2)
            assert relative_error(grads[name], gradient) < 1e-9, name


def test_fast_mode_is_repeatable_and_recomputation_replays_the_masks() -> None:
    def body(comm: ThreadCommunicator) -> Any:
        torch.manual_seed(0)
        model = NanoGPT(p=0.3).double()
        rewrite(model, plan_tensor_parallel(model, next_token, 2), comm)

        def run() -> tuple[Tensor, dict[str, Tensor]]:
            model.zero_grad()
            torch.manual_seed(7)
            loss = next_token(model)
            loss.backward()
            return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}

        plain, again = run(), run()
        for block in model.transformer.h:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        recomputed = run()
        whole = {n: g for n, g in plain[1].items() if not hasattr(dict(model.named_parameters())[n], "placement")}
        return plain, again, recomputed, whole, torch.get_rng_state()

    ranks = run_simulated(2, body)
    for plain, again, recomputed, _, _ in ranks:
        for other in (again, recomputed):
            assert torch.equal(plain[0], other[0])
            assert all(torch.equal(plain[1][n], other[1][n]) for n in plain[1])
    assert torch.equal(ranks[0][0][0], ranks[1][0][0]), "the loss differs between ranks"
    assert all(torch.equal(ranks[0][3][n], ranks[1][3][n]) for n in ranks[0][3]), "replicated gradients drift apart"
    assert torch.equal(ranks[0][4], ranks[1][4])
