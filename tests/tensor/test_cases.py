"""Public bug reports of other systems as tests: how a tensor is cut (L1, L2, L3, L5, U1, U3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import TensorPlanError
from lightning_3d.tensor import TensorGroup, ThreadCommunicator, plan_tensor_parallel, rewrite, run_simulated, whole
from lightning_3d.tensor.verify import verify_tensor_plan
from tests.tensor.models import GatedFused, NanoGPT, mean_square, next_token

EXACT = 1e-9


def test_the_bias_of_a_row_layer_counts_once() -> None:
    """L1: bias 100 on zeros gives 100 on every rank, and the bias's gradient is that of one process."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).double()
    with torch.no_grad():
        model[0].bias.zero_()
        model[1].bias.fill_(100)

    def step(m: Any) -> Tensor:
        return m(torch.zeros(3, 8, dtype=torch.float64)).sum()  # type: ignore[no-any-return]

    plan = plan_tensor_parallel(model, step, 2)
    assert plan.decisions["1.weight"].kind == "row"

    def body(comm: ThreadCommunicator) -> Any:
        twin = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).double()
        twin.load_state_dict(model.state_dict())
        rewrite(twin, plan, TensorGroup(comm))
        out = whole(twin(torch.zeros(3, 8, dtype=torch.float64)))
        out.sum().backward()
        return out.detach(), twin[1].bias.grad

    for out, gradient in run_simulated(2, body):
        assert torch.equal(out, torch.full((3, 8), 100.0, dtype=torch.float64))
        assert torch.equal(gradient, torch.full((8,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 4])
def test_fused_projections_are_cut_part_by_part(size: int) -> None:
    """L2: q|k|v and gate|up packed in one matrix, without any hint; fewer key/value heads, too."""
    for build, step, name, parts in (
        (GatedFused, mean_square, "gate_up.weight", 2),
        (NanoGPT, next_token, "transformer.h.0.attn.c_attn.weight", 3),
        (lambda: NanoGPT(kv_heads=2), next_token, "transformer.h.0.attn.c_attn.weight", 3),
    ):
        torch.manual_seed(0)
        model = build()
        plan = plan_tensor_parallel(model, step, size)
        key = next(n for n in plan.decisions if n.endswith(name) or "gate" in n) if parts == 2 else name
        cut = plan.decisions[key].placement
        if cut is not None:  # two heads on four ranks in one packed matrix: whole
            assert len(cut.segments) == parts
            whole_weight = dict(model.named_parameters())[key].detach()
            shards = [cut.to_local(whole_weight, rank, size) for rank in range(size)]
            assert torch.equal(cut.to_global(shards, size), whole_weight)
        assert verify_tensor_plan(model, plan, step).worst <= EXACT


class Bigrams(nn.Module):
    """V = 13: embedding and head, tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 8), nn.Linear(8, 13, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.embedding(index))  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_does_not_divide(tied: bool, size: int) -> None:
    """L3: a label in the last shard, padding rows without gradient (the proof demands it)."""
    index = torch.tensor([[0, 12, 7, 12, 3]])

    def step(m: Any) -> Tensor:
        return F.cross_entropy(m(index[:, :-1]).flatten(0, 1), index[:, 1:].flatten())

    model = Bigrams(tied)
    plan = plan_tensor_parallel(model, step, size, smallest_vocabulary=2)
    cut = plan.decisions["embedding.weight"].placement
    assert cut is not None
    assert cut.padding == -13 % size
    report = verify_tensor_plan(model, plan, step)
    assert report.worst <= EXACT
    assert report.gathers == 0


def test_a_width_that_does_not_divide() -> None:
    """L5: 8 -> 7 -> 8 stays whole and right; demanded, it is refused with layer, size and ranks."""
    model = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8))

    def step(m: Any) -> Tensor:
        return m(torch.ones(2, 8, dtype=m[0].weight.dtype)).square().mean()  # type: ignore[no-any-return]

    plan = plan_tensor_parallel(model, step, 2)
    assert plan.decisions["0.weight"].kind == "replicated"
    assert "7 outputs are not divisible by 2" in plan.decisions["0.weight"].reason
    assert verify_tensor_plan(model, plan, step).worst <= EXACT
    with pytest.raises(TensorPlanError, match=r"0\.weight of shape \(7, 8\) over 2 ranks: its 7 outputs"):
        plan_tensor_parallel(model, step, 2, overrides={"0": "column"})


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 1, 2), (4, 2, 4), (6, 6, 4), (8, 2, 8), (8, 2, 4)])
def test_fewer_heads_than_ranks(heads: int, kv_heads: int, size: int) -> None:
    """U1: never a view error in the middle of a forward."""
    torch.manual_seed(0)
    width = 48 if heads == 8 and size == 8 else 96  # two narrow heads: not even the width divides
    model = nn.Sequential(nn.Embedding(32, width), Separate(width, heads, kv_heads), nn.Linear(width, 32))
    index = torch.randint(32, (2, 6))

    def step(m: Any) -> Tensor:
        return F.cross_entropy(m(index).flatten(0, 1), index.flatten())

    plan = plan_tensor_parallel(model, step, size)
    assert verify_tensor_plan(model, plan, step).worst <= EXACT
    keys = plan.decisions["1.k.weight"]
    if kv_heads == 2:
        assert keys.placement is not None
        assert keys.placement.copies == size // 2
    elif heads == 6:
        assert keys.kind == "replicated"
        assert keys.heads == 6
    else:
        assert keys.kind == "replicated"
        assert plan.decisions["1.q.weight"].kind == "column"


class Separate(nn.Module):
    """Attention with projections of their own for queries, keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, kv_heads * self.size) for _ in range(2))
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = (p(x).view(b, t, self.kv_heads, self.size).transpose(1, 2) for p in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return x + self.o(y.transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]


def test_a_pattern_that_matches_nothing() -> None:
    """U3: the miss and near names, before anything runs."""
    with pytest.raises(TensorPlanError, match=r"'transfomer\.\*\.c_attn' matches no parameter .*transformer\.h"):
        plan_tensor_parallel(NanoGPT(), next_token, 2, overrides={"transfomer.*.c_attn": "column"})
