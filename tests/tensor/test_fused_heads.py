"""Fused q, k, v with fewer key/value heads than ranks: divided all the same; the ranks that share a head gather it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as T
from torch import Tensor, nn

from lightning_3d.tensor import (
    Placement,
    ShardedTensor,
    TensorGroup,
    TensorPlan,
    ThreadCommunicator,
    local,
    plan_tensor_parallel,
    prove_operations,
    run_simulated,
    verify_tensor_plan,
)
from lightning_3d.testing import relative_error
from tests.tensor.helpers import EXACT, compare
from tests.tensor.hf_models import language_model
from tests.tensor.hf_more import phi3
from tests.tensor.models import VOCABULARY, tokens


def big_code(attention: str) -> nn.Module:
    config = T.GPTBigCodeConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, multi_query=True, attn_pdrop=0.0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_implementation=attention,
    )  # fmt: skip
    return T.GPTBigCodeForCausalLM(config)


class Fused(nn.Module):
    """Grouped-query attention with one projection (and a bias); `way` says how it is taken apart."""

    def __init__(self, heads: int, kv_heads: int, way: str, size: int = 8) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size, self.way = heads, kv_heads, size, way
        self.qkv = nn.Linear(32, (heads + 2 * kv_heads) * size)
        self.out = nn.Linear(heads * size, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (a.unflatten(-1, (-1, self.size)).transpose(1, 2) for a in self.parts(self.qkv(x)))
        if self.way == "in place":
            k.mul_(2.0)
        k, v = (a.repeat_interleave(self.heads // self.kv_heads, 1) for a in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return x + out

    def parts(self, y: Tensor) -> Any:
        q, kv = self.heads * self.size, self.kv_heads * self.size
        if self.way in ("slices", "in place"):
            return y[..., :q], y[..., q : q + kv], y[..., q + kv :]
        if self.way == "chunk":
            return y[..., :q], *y[..., q:].chunk(2, -1)
        if self.way == "heads":  # first heads, then pieces
            heads = y.view(*y.shape[:2], -1, self.size)
            pieces = heads.split([self.heads, self.kv_heads, self.kv_heads], 2)
            return [piece.flatten(2) for piece in pieces]
        return torch.split(y, [q, kv, kv], -1)


def fused(heads: int, kv_heads: int, way: str) -> nn.Module:
    blocks = [Fused(heads, kv_heads, way) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), *blocks, nn.Linear(32, VOCABULARY))


def step(model: Any) -> Tensor:
    index = tokens(VOCABULARY, 2, 6)
    return F.cross_entropy(model(index).flatten(0, 1), index.flatten())


MODELS: dict[str, Any] = {
    "phi3, 1": (lambda: phi3(num_attention_heads=8, num_key_value_heads=1), language_model, "self_attn.qkv_proj"),
    "phi3, 2": (lambda: phi3(num_attention_heads=8, num_key_value_heads=2), language_model, "self_attn.qkv_proj"),
    "big code, sdpa": (lambda: big_code("sdpa"), language_model, "attn.c_attn"),
    "big code, eager": (lambda: big_code("eager"), language_model, "attn.c_attn"),
    "split, 1": (lambda: fused(4, 1, "split"), step, "1.qkv"),
    "split, 2": (lambda: fused(4, 2, "split"), step, "1.qkv"),
    "slices, 2": (lambda: fused(4, 2, "slices"), step, "1.qkv"),
    "chunk, 2": (lambda: fused(4, 2, "chunk"), step, "1.qkv"),
}


QUICK = {("phi3, 1", 2), ("phi3, 2", 4), ("big code, sdpa", 4), ("split, 1", 4), ("slices, 2", 4), ("chunk, 2", 2)}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if (name, size) in QUICK else pytest.mark.slow)
        for name in MODELS
        for size in (2, 4)
    ],
)
def test_equal_to_one_process(name: str, size: int) -> None:
    build, run, where = MODELS[name]
    torch.manual_seed(0)
    model = build()
    plan = plan_tensor_parallel(model, run, size)
    weights = {n: p for n, p in model.named_parameters() if where in n}
    heads = 2 if name.endswith("2") else 1
    for weight, parameter in weights.items():
        cut = plan.decisions[weight].placement
        assert cut is not None, plan.decisions[weight].reason
        assert cut.shares == ((1, size // heads, size // heads) if size > heads else ())
        assert cut.local_shape(parameter.shape, size)[0] == parameter.shape[0] // size
        if size > heads and weight.endswith("weight"):
            assert f"gathered by groups of {size // heads} ranks" in plan.why(weight)
    assert weights
    assert plan.sharded_fraction > 0.93, f"\n{plan}"
    assert TensorPlan.from_dict(plan.to_dict()).decisions == plan.decisions
    report = verify_tensor_plan(model, plan, run)
    assert report.worst <= EXACT, str(report)
    assert report.gathers == 0
    operations = prove_operations(model, plan, run)
    assert operations.worst <= EXACT, str(operations)
    assert not operations.gathers


@pytest.mark.parametrize("name", [pytest.param("phi3, 2", marks=pytest.mark.slow), "chunk, 2"])
def test_equal_with_sequence_parallelism(name: str) -> None:
    build, run, where = MODELS[name]
    torch.manual_seed(0)
    model = build()
    plan = plan_tensor_parallel(model, run, 4, sequence=True)
    assert any(where in n and d.placement is not None and d.placement.shares for n, d in plan.decisions.items())
    assert verify_tensor_plan(model, plan, run).worst <= EXACT


def test_heads_before_pieces() -> None:
    """`view(..., heads, size)` and then `split` on the heads: divided while every rank gets whole ones."""
    torch.manual_seed(0)
    model = fused(4, 2, "heads")
    plan = plan_tensor_parallel(model, step, 2)
    assert plan.decisions["1.qkv.weight"].placement == Placement(0, (32, 16, 16))
    assert verify_tensor_plan(model, plan, step).worst <= EXACT
    assert verify_tensor_plan(model, plan_tensor_parallel(model, step, 4), step).worst <= EXACT


def test_a_write_into_gathered_heads_leaves_the_projection_whole() -> None:
    torch.manual_seed(0)
    model = fused(4, 2, "in place")
    plan = plan_tensor_parallel(model, step, 4)
    assert plan.decisions["1.qkv.weight"].kind == "replicated"
    assert "in place" in plan.decisions["1.qkv.weight"].reason
    assert verify_tensor_plan(model, plan, step).worst <= EXACT


@pytest.mark.parametrize("copies", [2, 4])
def test_what_the_pieces_cost(copies: int) -> None:
    """A gather of the piece and a sum of its gradient, over the ranks that share it; nothing for the queries."""
    cut = Placement(1, (16, 8, 8), shares=(1, copies, copies))
    x = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def pieces(y: Tensor) -> Tensor:
        q, k, v = y.split([16, 8, 8], 1)
        heads = 4 // copies
        q = q.view(3, 4, 4)
        k, v = (a.reshape(3, heads, -1).repeat_interleave(4 // heads, 1) for a in (k, v))
        return q * k[..., :1] + v[..., -1:].sin()

    ranks: list[ThreadCommunicator] = compare(pieces, [x], [cut], 4)
    assert ranks[0].ledger.total(op="all_gather").calls > 0


def test_a_write_that_planning_did_not_see_is_an_error() -> None:
    """Never lost for the shards: autograd refuses it."""
    cut = Placement(1, (16, 8, 8), shares=(1, 2, 2))

    def write(y: Tensor) -> Tensor:
        k = y.sin()[:, 16:24]
        return k.view(3, 2, 4).mul_(2)

    with pytest.raises(RuntimeError, match="created inside a custom Function"):
        compare(write, [torch.randn(3, 32, dtype=torch.float64)], [cut], 4)


@pytest.mark.parametrize("copies", [2, 4])
def test_second_derivatives(copies: int) -> None:
    cut = Placement(1, (16, 8), shares=(1, copies))

    def penalty(y: Tensor) -> Tensor:
        x = y.sin()
        q, k = x.split([16, 8], 1)
        out = q.view(3, 4, 4) * k.reshape(3, 4 // copies, -1).repeat_interleave(copies, 1)[..., :1]
        return out.sin()

    def run(group: TensorGroup | None, leaf: Tensor) -> Tensor:
        shown = leaf if group is None else ShardedTensor(leaf, cut, group)
        out = penalty(shown)
        here = local(out)
        (grad,) = torch.autograd.grad(here.pow(2).sum(), leaf, create_graph=True)
        grad.pow(2).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    x = torch.randn(3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = run(None, x.clone().requires_grad_())
    parts = run_simulated(4, lambda c: run(TensorGroup(c), cut.to_local(x, c.rank, 4).clone().requires_grad_()))
    assert relative_error(cut.to_global(parts, 4), want) < 1e-12
