"""The proof must see what is wrong, say where, and leave the user's module alone."""

from __future__ import annotations

import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_3d.tensor.collectives as collectives
from lightning_3d.comm import DONE
from lightning_3d.errors import ParityError, TensorPlanError
from lightning_3d.tensor import Placement, TensorGroup, plan_tensor_parallel, register_rule, verify_tensor_plan
from lightning_3d.tensor.registry import RULES, cached_handlers
from lightning_3d.tensor.replica import exact_copy
from lightning_3d.tensor.sharded import ShardedTensor
from tests.tensor.models import MLP, Block, Gated, NanoGPT, mean_square, next_token, values


def no_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return grad, None, None


def no_forward(ctx: Any, x: Tensor, group: TensorGroup, fresh: bool) -> Tensor:
    ctx.group = group
    return x.clone()


BROKEN: list[tuple[Any, ...]] = [
    # what comes before the layer gets partial gradients; the layer itself is right
    (collectives._Copy, "backward", staticmethod(no_backward), Gated, mean_square, "norm.weight"),
    (TensorGroup, "all_reduce_start", lambda self, x: DONE, NanoGPT, next_token, "transformer.wte.weight"),
    # partial values
    (collectives._Reduce, "forward", staticmethod(no_forward), MLP, mean_square, "a.weight"),
]
"""(owner, attribute, what replaces it, model, its step, the first parameter that differs)."""


@pytest.mark.parametrize(("where", "name", "broken", "build", "step", "first_wrong"), BROKEN)
def test_a_broken_collective_is_seen(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, broken: Any, build: Any, step: Any, first_wrong: str
) -> None:
    model = build()
    plan = plan_tensor_parallel(model, step, 2)
    assert verify_tensor_plan(model, plan, step).ok
    monkeypatch.setattr(where, name, broken)
    report = verify_tensor_plan(model, plan, step)
    assert not report.ok
    assert report.first_difference == first_wrong
    assert report.worst > 1e-3
    with pytest.raises(ParityError, match=rf"{first_wrong}.*'replicate'"):
        report.raise_if_wrong()


def test_a_doubled_bias_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic: the bias of a row layer enters on every rank. Zero-initialised biases would hide it."""
    from lightning_3d.tensor.layers import RowParallelLinear

    def wrong(self: Any, x: Any) -> Tensor:
        y = F.linear(x.local, self._parameters["weight"], self._parameters["bias"])
        return collectives.reduce_out(y, x.group)

    monkeypatch.setattr(RowParallelLinear, "forward", wrong)
    model = MLP()
    for layer in (model.a, model.b, model.c, model.d):
        nn.init.zeros_(layer.bias)
    report = verify_tensor_plan(model, plan_tensor_parallel(model, mean_square, 2), mean_square)
    assert not report.ok


def test_a_wrong_rule_is_seen() -> None:
    original = RULES["softmax"]
    try:

        @register_rule("softmax")
        def wrong(func: Any, args: Any, kwargs: Any) -> Any:  # normalises over this rank's part only
            x = args[0]
            return ShardedTensor(F.softmax(x.local, -1), x.placement, x.group, x.sources)

        model = nn.Sequential(nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 8))

        def step(m: Any) -> Tensor:
            return m(values(3, 8)).pow(2).sum()

        plan = plan_tensor_parallel(model, step, 2)
        assert plan.decisions["0.weight"].kind == "column"
        report = verify_tensor_plan(model, plan, step)
        assert report.first_difference == "0.weight"
    finally:
        RULES["softmax"] = original
        cached_handlers.clear()


def test_code_that_fails_only_on_shards() -> None:
    class Storage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)))

    def step(m: Any) -> Tensor:
        y = m.a(values(3, 8))
        if not isinstance(y, ShardedTensor) or y.group.on_gather is None:
            y.as_strided((1,), (1,))  # not while planning
        return m.b(F.relu(y)).sum()

    model = Storage()
    with pytest.raises(ParityError, match=r"as_strided on a tensor-parallel activation.*a\.weight"):
        verify_tensor_plan(model, plan_tensor_parallel(model, step, 2), step)


class Lit(pl.LightningModule):
    """float32 inside, dropout, random numbers, a running statistic, an uncopyable attribute, logging."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm, self.head = Block(32, 4, None, True, 0.3), nn.BatchNorm1d(5), nn.Linear(32, 5)
        self.lock = threading.Lock()
        self.aliases = [self.block.mlp]
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        noise = torch.randn_like(batch) * 0.1
        y = self.block((batch + noise).to(torch.float32)) * self.scale
        assert self.aliases[0] is self.block.mlp
        loss = F.mse_loss(self.head(self.norm(y)).float(), torch.rand(batch.shape[0], 5, 5))
        self.log("loss", loss)
        assert self.trainer.max_epochs == 7
        return loss


def test_a_module_with_a_trainer_attached(tmp_path: Any) -> None:
    model, batch = Lit(), values(2, 5, 32)
    trainer = pl.Trainer(
        max_epochs=7, logger=False, enable_checkpointing=False, accelerator="cpu", default_root_dir=tmp_path
    )
    model.trainer = trainer

    def step(m: Any) -> Tensor:
        return m.training_step(batch, 0)

    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = dict(model.__dict__)
    state = torch.get_rng_state()
    plan = plan_tensor_parallel(model, step, 2)
    report = verify_tensor_plan(model, plan, step)
    assert report.worst < 1e-9, str(report)
    assert plan.decisions["block.attn.c_attn.weight"].placement == Placement(0, (32, 32, 32))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert dict(model.__dict__) == attributes
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert model.trainer is trainer


def test_a_model_on_meta_is_proved_with_drawn_weights() -> None:
    real = NanoGPT()
    with torch.device("meta"):
        model = NanoGPT()
    plan = plan_tensor_parallel(real, next_token, 2)
    with pytest.raises(TensorPlanError, match=r"buffer transformer.h.0.attn.bias is on the meta device"):
        verify_tensor_plan(model, plan, next_token)
    for block, source in zip(model.transformer.h, real.transformer.h, strict=True):
        block.attn.bias = source.attn.bias
    assert verify_tensor_plan(model, plan, next_token).worst < 1e-9
    assert next(model.parameters()).is_meta


def test_a_step_without_a_loss() -> None:
    model = MLP()
    plan = plan_tensor_parallel(model, mean_square, 2)
    with pytest.raises(TensorPlanError, match="returned NoneType without a loss"):
        verify_tensor_plan(model, plan, lambda m: None)
    assert verify_tensor_plan(model, plan, lambda m: {"loss": mean_square(m), "other": 1}).ok


def test_copies_keep_ties_and_nested_references() -> None:
    model = NanoGPT()
    model.again = [model.transformer.h[0]]
    twin = exact_copy(model)
    assert twin.transformer.wte.weight is twin.lm_head.weight
    assert twin.lm_head.weight is not model.lm_head.weight
    assert twin.again[0] is twin.transformer.h[0]
    assert {p.dtype for p in twin.parameters()} == {torch.float64}


def test_the_report_reads_well() -> None:
    model = MLP()
    report = verify_tensor_plan(model, plan_tensor_parallel(model, mean_square, 2), mean_square)
    assert str(report).startswith("tensor-parallel proof over 2 ranks: equal, largest relative error")
    report.errors["b.weight"] = float("nan")
    assert not report.ok
    assert "the gradient of b.weight is off by nan" in str(report)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_stays_off_in_what_a_checkpoint_recomputes(reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.inner = nn.Sequential(
                nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 32), nn.Dropout(0.5)
            )

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = Recomputed()
    plan = plan_tensor_parallel(model, mean_square, 2)
    assert plan.sharded_fraction > 0.5
    report = verify_tensor_plan(model, plan, mean_square)
    assert report.worst < 1e-12, str(report)
