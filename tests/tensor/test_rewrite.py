from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import TensorPlanError
from lightning_3d.probe import FakeParameters
from lightning_3d.tensor import (
    ShardedTensor,
    ThreadCommunicator,
    dry_group,
    plan_tensor_parallel,
    rewrite,
    run_simulated,
)
from lightning_3d.testing import relative_error
from tests.tensor.models import MLP, PLAIN, Adapted, CrossAttention, NanoGPT, mean_square, next_token


def test_parameters_stay_the_same_objects() -> None:
    model = NanoGPT()
    before = dict(model.named_parameters())
    weights = {n: p.detach().clone() for n, p in before.items()}
    plan = plan_tensor_parallel(model, next_token, 2)
    rewrite(model, plan, dry_group(2))
    assert list(dict(model.named_parameters())) == list(before)
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert type(parameter) is nn.Parameter
        cut = plan.decisions[name].placement
        if cut is None:
            assert not hasattr(parameter, "placement")
            assert torch.equal(parameter, weights[name])
        else:
            assert parameter.placement == cut
            assert parameter.global_shape == tuple(weights[name].shape)
            assert torch.equal(parameter, cut.to_local(weights[name], 0, 2))
            assert parameter.is_contiguous()
            assert parameter.untyped_storage().nbytes() == parameter.nbytes, "the whole weight is kept alive"
    assert model.transformer.wte._parameters["weight"] is model.lm_head._parameters["weight"]


def test_optimizers_built_before_train_the_shards() -> None:
    """Five AdamW steps with weight decay, optimizer made on the whole model; weights equal one process."""

    def train(model: Any, optimizer: Any) -> None:
        for _ in range(5):
            optimizer.zero_grad()
            next_token(model).backward()
            optimizer.step()

    def fresh() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = NanoGPT().double()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    want, optimizer = fresh()
    plan = plan_tensor_parallel(want, next_token, 2)
    train(want, optimizer)

    def body(comm: ThreadCommunicator) -> dict[str, Tensor]:
        model, optimizer = fresh()
        rewrite(model, plan, comm)
        train(model, optimizer)
        return {n: p.detach() for n, p in model.named_parameters()}

    ranks = run_simulated(2, body)
    for name, parameter in want.named_parameters():
        cut = plan.decisions[name].placement
        if cut is None:
            assert torch.equal(ranks[0][name], ranks[1][name]), f"{name} drifted apart"
        got = ranks[0][name] if cut is None else cut.to_global([r[name] for r in ranks], 2)
        assert relative_error(got, parameter) < 1e-9, name
        if cut is not None and cut.padding:
            assert not ranks[1][name][-cut.padding :].any(), "padding rows moved"


def test_a_second_rewrite_and_a_second_plan_are_refused() -> None:
    model = MLP()
    plan = plan_tensor_parallel(model, mean_square, 2)
    rewrite(model, plan, dry_group(2))
    with pytest.raises(TensorPlanError, match=r"a\.weight is already cut"):
        rewrite(model, plan, dry_group(2))
    with pytest.raises(TensorPlanError, match=r"a\.weight is already cut"):
        plan_tensor_parallel(model, mean_square, 2)


def test_the_wrong_plan_is_refused() -> None:
    plan = plan_tensor_parallel(MLP(), mean_square, 2)
    with pytest.raises(TensorPlanError, match="for 2 tensor-parallel ranks, the group has 4"):
        rewrite(MLP(), plan, dry_group(4))
    with pytest.raises(TensorPlanError, match="another model"):
        rewrite(CrossAttention(), plan, dry_group(2))
    with pytest.raises(TensorPlanError, match=r"a\.weight has shape \(64, 16\), the plan is for \(128, 32\)"):
        rewrite(MLP(16), plan, dry_group(2))
    model = NanoGPT()
    tied = plan_tensor_parallel(model, next_token, 2)
    tied.decisions["lm_head.weight"] = tied.decisions["transformer.ln_f.weight"]
    with pytest.raises(TensorPlanError, match="are one tied parameter"):
        rewrite(model, tied, dry_group(2))


def test_frozen_weights_stay_frozen() -> None:
    model = nn.Sequential(Adapted(8, 16), nn.ReLU(), Adapted(16, 8))

    def step(m: Any) -> Tensor:
        return m(torch.ones(2, 8)).sum()

    rewrite(model, plan_tensor_parallel(model, step, 2), dry_group(2))
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        f"{i}.base.{leaf}" for i in (0, 2) for leaf in ("weight", "bias")
    ]


def test_a_gradient_accumulator_made_before() -> None:
    """A hook, or a kept graph, pins the accumulator to the old shape."""
    model = MLP()
    kept = mean_square(model)
    calls = []
    model.a.weight.register_post_accumulate_grad_hook(lambda p: calls.append(tuple(p.grad.shape)))
    plan = plan_tensor_parallel(model, mean_square, 2)
    with pytest.warns(UserWarning, match="a.weight has a hook by register_post_accumulate_grad_hook"):
        rewrite(model, plan, dry_group(2))
    mean_square(model).backward()
    assert calls == [(64, 32)]
    assert kept.requires_grad


def test_a_copy_talks_to_the_same_ranks() -> None:
    def body(comm: ThreadCommunicator) -> Any:
        torch.manual_seed(0)
        model = NanoGPT()
        rewrite(model, plan_tensor_parallel(model, next_token, 2), comm)
        twin = copy.deepcopy(model)
        assert twin.lm_head.tensor_group is model.lm_head.tensor_group
        assert twin.lm_head._parameters["weight"] is not model.lm_head._parameters["weight"]
        return next_token(model).item(), next_token(twin).item()

    assert all(a == b for a, b in run_simulated(2, body))


def test_parameters_of_another_stage_are_shown_as_they_are() -> None:
    model = MLP()
    rewrite(model, plan_tensor_parallel(model, mean_square, 2), dry_group(2))
    model.a._parameters["weight"].is_absent = True
    assert model.a.weight is model.a._parameters["weight"]
    assert isinstance(model.c.weight, ShardedTensor)


def test_a_cut_model_can_be_probed() -> None:
    model = NanoGPT()
    group = dry_group(2)
    rewrite(model, plan_tensor_parallel(model, next_token, 2), group)
    group.dry = False  # fake tensors alone keep it quiet
    with FakeParameters(model, torch.device("cpu")):
        assert model.lm_head.weight.shape == (101, 32)
        loss = next_token(model)
    assert loss.shape == ()
    assert group.comm.ledger.total().calls == 0


@pytest.mark.parametrize("name", ["nanogpt", "encoder", "gated", "timm"])
def test_copies_and_pickles_are_what_the_module_is(name: str) -> None:
    """EMA by deepcopy, `torch.save(module)`: same classes, names, cuts and results."""
    build, step, _ = PLAIN[name]

    def body(comm: ThreadCommunicator) -> Any:
        torch.manual_seed(0)
        model = build()
        rewrite(model, plan_tensor_parallel(model, step, 2), comm)
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False)]
        own = dict(model.named_parameters())
        loss = step(model)
        for twin in twins:
            assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
            found = dict(twin.named_parameters())
            assert list(found) == list(own)
            assert list(twin.state_dict()) == list(model.state_dict())
            for key, parameter in found.items():
                assert parameter is not own[key]
                assert torch.equal(parameter, own[key])
                assert getattr(parameter, "placement", None) == getattr(own[key], "placement", None)
                assert getattr(parameter, "global_shape", None) == getattr(own[key], "global_shape", None)
            assert torch.equal(step(twin), loss)
        return True

    assert all(run_simulated(2, body))


def test_a_pickle_in_another_process_says_what_it_is() -> None:
    def body(comm: ThreadCommunicator) -> bytes:
        torch.manual_seed(0)
        model = MLP()
        rewrite(model, plan_tensor_parallel(model, mean_square, 2), comm)
        return pickle.dumps(model)

    data = run_simulated(2, body)[1]
    gc.collect()  # the group is gone, as it is in another process
    model = pickle.loads(data)
    assert model.a.weight.shape == (128, 32)
    assert "rank 1 of 2" in repr(model.a)
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 .*save_checkpoint"):
        mean_square(model).backward()


def test_repr_says_how_a_layer_is_cut() -> None:
    for name, wanted in {
        "nanogpt": [
            "VocabParallelEmbedding(101, 32, rank 0 of 2, weight 101 (+1 padding) along dim 0)",
            "ColumnParallelLinear(in_features=32, out_features=96, bias=True, rank 0 of 2, weight 32+32+32 along",
            "RowParallelLinear(in_features=32, out_features=32, bias=True, rank 0 of 2, weight 32 along dim 1)",
        ],
        "encoder": ["rank 0 of 2, in_proj_weight 32+32+32 along dim 0, in_proj_bias 32+32+32 along dim 0"],
    }.items():
        build, step, _ = PLAIN[name]
        model = build()
        rewrite(model, plan_tensor_parallel(model, step, 2), dry_group(2))
        for text in wanted:
            assert text in repr(model), repr(model)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_share_of_the_parameters(size: int) -> None:
    """Within two percent of (whole + cut / size), measured in storages; the rest is padding of the vocabulary."""
    for name in ("mlp", "gated", "nanogpt", "timm", "encoder", "decoder"):
        build, step, _ = PLAIN[name]
        model = build()
        plan = plan_tensor_parallel(model, step, size)
        whole = sum(p.numel() for p in model.parameters())
        rewrite(model, plan, dry_group(size))
        stored = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        held = sum(stored.values()) / next(model.parameters()).element_size()
        assert held == round(plan.held_fraction * whole)
        ideal = 1 - plan.sharded_fraction + plan.sharded_fraction / size
        assert plan.held_fraction == pytest.approx(ideal, rel=0.02), name
