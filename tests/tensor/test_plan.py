from __future__ import annotations

import copy
import json
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import TensorPlanError
from lightning_3d.tensor import Decision, Placement, TensorPlan, plan_tensor_parallel, verify_tensor_plan
from tests.tensor.hf_models import language_model, llama
from tests.tensor.models import MLP, Block, Einsum, Gated, GatedFused, NanoGPT, mean_square, next_token, values

# ---------------------------------------------------------------- overrides


def test_a_pattern_that_matches_nothing_lists_near_names() -> None:
    with pytest.raises(TensorPlanError, match=r"'transfromer\.h\.0\.mlp' matches no parameter.*transformer\.h\.0\.mlp"):
        plan_tensor_parallel(NanoGPT(), next_token, 2, overrides={"transfromer.h.0.mlp": "replicate"})
    with pytest.raises(TensorPlanError, match=r"blcoks\.\*\.fc1"):
        plan_tensor_parallel(NanoGPT(), next_token, 2, overrides={"blcoks.*.fc1": "column"})


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(
        TensorPlanError, match=r"'columnwise' for 'a' is not one of column, row, vocab, replicate.*'column'"
    ):
        plan_tensor_parallel(MLP(), mean_square, 2, overrides={"a": "columnwise"})


def test_replicate_and_its_scope() -> None:
    model = NanoGPT()
    plan = plan_tensor_parallel(model, next_token, 2, overrides={"transformer.h.1.mlp": "replicate"})
    assert plan.decisions["transformer.h.0.mlp.c_fc.weight"].kind == "column"  # only the block that was named
    assert plan.decisions["transformer.h.1.mlp.c_fc.weight"] == Decision(
        "replicated", None, "demanded by 'transformer.h.1.mlp'"
    )
    assert plan.decisions["transformer.h.1.attn.c_attn.weight"].kind == "column"
    assert verify_tensor_plan(model, plan, next_token).ok


def test_the_last_pattern_wins() -> None:
    plan = plan_tensor_parallel(MLP(), mean_square, 2, overrides={"*": "replicate", "a": "column", "b": "row"})
    assert [plan.decisions[f"{n}.weight"].kind for n in "abcd"] == ["column", "row", "replicated", "replicated"]


def test_a_demanded_column_that_the_code_refutes() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x)))

    def step(m: Any) -> Tensor:
        return m(values(2, 3, 8)).sum()

    with pytest.raises(
        TensorPlanError,
        match=r"'a': 'column' cannot be done for a.weight of shape \(16, 8\) over 2 ranks: "
        r"layer_norm of \(2, 3, 16\): layer_norm normalises over the cut dim 2",
    ):
        plan_tensor_parallel(Norm(), step, 2, overrides={"a": "column"})
    assert plan_tensor_parallel(Norm(), step, 2).decisions["a.weight"].kind == "replicated"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"0": "column"}, r"its 7 outputs are not divisible by 2 ranks"),
        ({"2": "row"}, r"its 7 inputs are not divisible by 2 ranks"),
        ({"0.bias": "column"}, r"'column' matches only vectors"),
    ],
)
def test_demands_that_the_sizes_refuse(overrides: dict[str, str], message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8))
    with pytest.raises(TensorPlanError, match=message):
        plan_tensor_parallel(model, lambda m: m(values(3, 8)).sum(), 2, overrides=overrides)


def test_a_demand_for_what_is_no_matrix_of_a_product() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.lin = nn.Parameter(torch.rand(4, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x + self.table[0])

    with pytest.raises(TensorPlanError, match=r"table \(4, 8\) is not used as the weight of a matrix product"):
        plan_tensor_parallel(Table(), lambda m: m(values(3, 8)).sum(), 2, overrides={"table": "column"})


def test_a_demanded_embedding_kind() -> None:
    with pytest.raises(TensorPlanError, match=r"can be 'vocab' or 'replicate', not 'column'"):
        plan_tensor_parallel(NanoGPT(tie=False), next_token, 2, overrides={"transformer.wte": "column"})
    plan = plan_tensor_parallel(NanoGPT(), next_token, 2, overrides={"*wpe": "vocab"})
    assert plan.decisions["transformer.wpe.weight"].kind == "vocab"


def test_a_demand_wins_over_what_the_planner_would_assume_before_it() -> None:
    """`b` must be column, so `a` (which would feed it as a column layer) cannot."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

    def step(m: Any) -> Tensor:
        return m(values(3, 8).to(m[0].bias.dtype)).pow(2).sum()

    assert plan_tensor_parallel(model, step, 2).decisions["2.weight"].kind == "row"
    plan = plan_tensor_parallel(model, step, 2, overrides={"2": "column"})
    assert [plan.decisions[f"{i}.weight"].kind for i in (0, 2, 4)] == ["replicated", "column", "row"]
    assert verify_tensor_plan(model, plan, step).ok


def test_a_demanded_row_on_a_whole_input() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))

    def step(m: Any) -> Tensor:
        return m(values(3, 8).to(m[1].bias.dtype)).pow(2).sum()

    plan = plan_tensor_parallel(model, step, 2, overrides={"1": "row"})
    assert plan.decisions["1.weight"].placement == Placement(1, (8,))
    assert verify_tensor_plan(model, plan, step).ok


def test_too_little_cut_is_an_error_if_asked_for() -> None:
    model = NanoGPT(heads=3, d=48)
    with pytest.raises(
        TensorPlanError,
        match=r"at least 90.0% was asked for(.|\n)*c_attn(.|\n)*split into 3 \(heads, groups\), which",
    ):
        plan_tensor_parallel(model, next_token, 2, strict=0.9)


def test_what_cannot_be_divided_is_told_by_its_sizes() -> None:
    plan = plan_tensor_parallel(NanoGPT(heads=4, d=32), next_token, 3)
    whys = {name.rpartition("h.0.")[2]: plan.why(name) for name in plan.decisions}
    assert "it is cut into pieces of 32, 32, 32" in whys["attn.c_attn.weight"]
    assert "3 ranks cannot share each of them equally" in whys["attn.c_attn.weight"]
    assert whys["mlp.c_fc.weight"] == "none of its sizes 128 x 32 is divisible by 3 ranks"
    assert whys["ln_1.weight"] == "a vector that no divided layer uses"
    whole, cut = Decision("replicated", None), Decision("column", Placement(0, (3,)))
    little = TensorPlan(3, {"a": whole, "b": cut}, {"a": (100, 10), "b": (3, 1)})
    assert "divides only 0%" in (little.hardly_divides() or "")
    assert plan_tensor_parallel(NanoGPT(heads=4, d=32), next_token, 2).hardly_divides() is None


# ---------------------------------------------------------------- what the planner sees


def test_fused_projections_get_their_segments() -> None:
    plan = plan_tensor_parallel(NanoGPT(kv_heads=2), next_token, 2)
    assert plan.decisions["transformer.h.0.attn.c_attn.weight"].placement == Placement(0, (32, 16, 16))
    assert plan.decisions["transformer.h.0.attn.c_attn.bias"].placement == Placement(0, (32, 16, 16))
    fused = plan_tensor_parallel(GatedFused(), mean_square, 2)
    assert fused.decisions["gate_up.weight"].placement == Placement(0, (128, 128))
    assert fused.decisions["down.weight"].placement == Placement(1, (128,))


def test_ties_are_one_decision_and_counted_once() -> None:
    plan = plan_tensor_parallel(NanoGPT(), next_token, 2)
    wte, head = plan.decisions["transformer.wte.weight"], plan.decisions["lm_head.weight"]
    assert wte == head
    assert wte.placement == Placement(0, (101,), 1)
    assert plan.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert sum(row.elements for row in plan.rows()) == sum(p.numel() for p in NanoGPT().parameters())


def test_rows_collapse_equal_blocks() -> None:
    rows = {row.pattern: row for row in plan_tensor_parallel(NanoGPT(layers=3), next_token, 2).rows()}
    fc = rows["transformer.h.*.mlp.c_fc.weight"]
    assert (fc.count, fc.kind, fc.segments, fc.shape) == (3, "column", (128,), (128, 32))
    assert "feeds transformer.h.*.mlp.c_proj.weight" in fc.reason
    assert "transformer.h.*" in str(plan_tensor_parallel(NanoGPT(), next_token, 2))


def test_plain_data_round_trip() -> None:
    plan = plan_tensor_parallel(NanoGPT(kv_heads=2), next_token, 2)
    back = TensorPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert back.decisions == plan.decisions
    assert back.rows() == plan.rows()
    assert back.sharded_fraction == plan.sharded_fraction


def test_the_plan_does_not_depend_on_where_the_parameters_are() -> None:
    model = NanoGPT(kv_heads=2)
    with torch.device("meta"):
        on_meta = NanoGPT(kv_heads=2)
    # buffers hold values the code looks at
    for block, real in zip(on_meta.transformer.h, model.transformer.h, strict=True):
        block.attn.bias = real.attn.bias
    want = plan_tensor_parallel(model, next_token, 2)
    assert plan_tensor_parallel(on_meta, next_token, 2).decisions == want.decisions
    assert next(on_meta.parameters()).is_meta


class Stateful(nn.Module):
    """Code that looks at values, counts its calls, has running statistics and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(1))
        self.calls, self.cache = 0, {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cache["last"] = x
        self.seen += 1
        mask = torch.ones(x.shape[0], dtype=torch.bool)
        if not mask.all():  # depends on the batch only: really evaluated
            raise ValueError("a hole in the mask")
        y = self.a(F.dropout(x, 0.1))
        assert not torch.isnan(y).any()  # depends on parameters: answered
        if y.abs().max() < 0:
            raise ValueError("cannot be")
        return self.norm(self.b(y))


def test_the_module_is_as_it_was() -> None:
    model = Stateful()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    plan = plan_tensor_parallel(model, lambda m: m(values(3, 8)).sum(), 2)
    assert plan.decisions["a.weight"].kind == "column"
    assert (model.calls, model.cache) == (0, {})
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert dict(model.named_parameters()) == parameters
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(hasattr(p, "placement") for p in model.parameters())


class Experts(nn.Module):
    """Shapes that depend on values: tokens are dealt to experts in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.up, self.down = (nn.ModuleList(nn.Linear(*s) for _ in range(3)) for s in ((8, 16), (16, 8)))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for i in range(3):
            (rows,) = torch.where(choice == i)
            out[rows] += self.down[i](F.gelu(self.up[i](x[rows])))
        return out


def expert_step(m: Any) -> Tensor:
    return m(values(12, 8).to(m.router.bias.dtype)).pow(2).sum()


def test_shapes_that_depend_on_values_need_real_parameters() -> None:
    model = Experts()
    plan = plan_tensor_parallel(model, expert_step, 2)
    assert plan.used_values
    assert plan.sharded_fraction > 0.9
    assert verify_tensor_plan(model, plan, expert_step).worst < 1e-9
    with torch.device("meta"):
        on_meta = Experts()
    with pytest.raises(TensorPlanError, match=r"depend on values.*router.weight is on the meta device"):
        plan_tensor_parallel(on_meta, expert_step, 2)


def test_the_users_own_error_comes_through() -> None:
    def step(m: Any) -> Tensor:
        raise KeyError("my bug")

    with pytest.raises(KeyError, match="my bug"):
        plan_tensor_parallel(MLP(), step, 2)


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(32, 4, None, True, 0.1), nn.Linear(32, 5)

    def training_step(self, batch: Tensor, index: int) -> dict[str, Tensor]:
        loss = self.head(self.block(batch)).pow(2).mean()
        self.log("loss", loss)
        self.log_dict({"a": loss})
        return {"loss": loss}


def test_a_lightning_module_without_a_trainer() -> None:
    model, batch = Lit(), values(2, 5, 32)

    def step(m: Any) -> Any:
        return m.training_step(batch, 0)

    plan = plan_tensor_parallel(model, step, 2)
    assert plan.decisions["block.attn.c_attn.weight"].kind == "column"
    assert "log" not in model.__dict__


def test_a_gated_block_shares_its_input() -> None:
    plan = plan_tensor_parallel(Gated(), mean_square, 4)
    assert [plan.decisions[f"{n}.weight"].kind for n in ("gate", "up", "down")] == ["column", "column", "row"]


def test_demands_on_einsum_weights() -> None:
    step = mean_square

    def model() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(32), Einsum())

    plan = plan_tensor_parallel(model(), step, 2, overrides={"1.out": "row", "1.qkv.0": "replicate"})
    assert plan.decisions["1.qkv.0"].kind == "replicated"
    assert plan.decisions["1.qkv.1"].placement == Placement(1, (4,))
    assert plan.decisions["1.out"].placement == Placement(0, (4,))
    mixed = model()
    assert verify_tensor_plan(mixed, plan, step).worst < 1e-9
    with pytest.raises(TensorPlanError, match=r"'1\.out': 'column' cannot be done|demanded as 'column'"):
        plan_tensor_parallel(model(), step, 2, overrides={"1.qkv.*": "column", "1.out": "column"})


class Scan(nn.Module):
    """A recurrence in a Python loop: a cut state would meet whole inputs at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(8, 32), nn.Linear(8, 1), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, gates, out = self.up(x), self.mix(x), []
        state = torch.zeros_like(h[:, 0])
        for t in range(x.shape[1]):
            state = state * torch.sigmoid(gates[:, t]) + h[:, t]
            out.append(state)
        return self.down(torch.stack(out, 1))


def test_a_cut_that_would_communicate_at_every_step_of_a_loop_is_given_up() -> None:
    for length, kind in ((4, "column"), (40, "replicated")):
        model = Scan()

        def step(m: Any, length: int = length) -> Tensor:
            return m(values(2, length, 8).to(m.up.bias.dtype)).pow(2).sum()

        plan = plan_tensor_parallel(model, step, 2)
        assert plan.decisions["up.weight"].kind == kind
        assert kind == "column" or "40 more collectives" in plan.decisions["up.weight"].reason
        assert verify_tensor_plan(model, plan, step).worst < 1e-9


def test_few_key_value_heads_are_shared_by_groups_of_ranks() -> None:
    """Two heads on four and eight ranks: a rank holds one of them, not both."""
    torch.manual_seed(0)
    model = llama(num_attention_heads=8, num_key_value_heads=2)
    for size in (4, 8):
        plan = plan_tensor_parallel(model, language_model, size)
        keys = plan.decisions["model.layers.0.self_attn.k_proj.weight"]
        assert keys.placement == Placement(0, (8,), copies=size // 2)
        assert keys.placement.local_shape((8, 32), size) == (4, 32)
        assert f"held by {size // 2} of the {size} ranks" in keys.reason
        assert plan.sharded_fraction > 0.99
        assert TensorPlan.from_dict(plan.to_dict()).decisions == plan.decisions
        report = verify_tensor_plan(model, plan, language_model)
        assert report.worst < 1e-9
        assert report.gathers == 0


def test_pairs_begin_where_they_cut_most() -> None:
    """A small first layer would pair with the second; the large third would be left over."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    plan = plan_tensor_parallel(model, mean_square, 2)
    assert [plan.decisions[f"{i}.weight"].kind for i in (0, 2, 4)] == ["replicated", "column", "row"]
    assert "so that 4.weight can be cut" in plan.decisions["0.weight"].reason
    assert verify_tensor_plan(model, plan, mean_square).worst < 1e-9
    assert [d.kind for n, d in plan_tensor_parallel(MLP(), mean_square, 2).decisions.items() if "weight" in n] == [
        "column",
        "row",
        "column",
        "row",
    ]


class OuterProduct(nn.Module):
    """Two projections of one size that cannot both be cut: one of them has to give way."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.names = (first, second)
        for name in self.names:
            self.add_module(name, nn.Linear(8, 8))
        self.out = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (getattr(self, name)(x) for name in self.names)
        return self.out((rows.unsqueeze(-1) * columns.unsqueeze(-2)).flatten(-2))


def test_which_of_two_gives_way_does_not_depend_on_the_order_of_sets() -> None:
    """Sets of names have another order in every process, and all ranks must come to one plan."""
    found = set()
    for first, second in product("abcd", "stuv"):
        model = OuterProduct(first, second)
        plan = plan_tensor_parallel(model, lambda m: m(torch.randn(3, 8)).square().mean(), 2)
        found.add(tuple(plan.decisions[f"{name}.weight"].kind for name in (first, second)))
    assert len(found) == 1
    assert "replicated" in found.pop()


class Averaged(nn.Module):
    """A model, and a copy of it that the step does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MLP()
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.helper = nn.ModuleDict({"kept": copy.deepcopy(self.model).requires_grad_(False)})  # as libraries have it


def test_a_copy_that_the_step_does_not_use_is_cut_like_its_original() -> None:
    model = Averaged()
    plan = plan_tensor_parallel(model, lambda m: mean_square(m.model), 2)
    placed = {name: decision.placement for name, decision in plan.decisions.items()}
    assert any(placed.values())
    for name in dict(model.model.named_parameters()):
        assert placed[f"average.{name}"] == placed[f"helper.kept.{name}"] == placed[f"model.{name}"]
    assert "like model.a.weight" in plan.decisions["average.a.weight"].reason
    whole = plan_tensor_parallel(model, lambda m: mean_square(m.model), 2, overrides={"average": "replicate"})
    assert not any(whole.decisions[f"average.{name}"].placement for name in dict(model.model.named_parameters()))
