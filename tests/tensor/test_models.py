"""Whole models: loss and every gradient of the cut model against the original, on simulated ranks in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.tensor import Decision, Placement, TensorPlan, plan_tensor_parallel, verify_tensor_plan
from tests.tensor.helpers import EXACT, check_model
from tests.tensor.models import PLAIN, NanoGPT, next_token, tokens, values

GATHERS = "ignore:.*no tensor-parallel form"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PLAIN)
def test_equal_to_one_process(name: str, size: int) -> None:
    check_model(PLAIN[name], size)


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize("name", PLAIN)
def test_equal_with_sequence_parallelism(name: str) -> None:
    check_model(PLAIN[name], 2, sequence=True)


def test_collectives_of_a_decoder_language_model() -> None:
    """Two blocks with 2 + 2 all-reduces each, embedding 1, head backward 1, cross-entropy 2; nothing else."""
    model = NanoGPT()
    plan = plan_tensor_parallel(model, next_token, 2)
    report = verify_tensor_plan(model, plan, next_token)
    assert {op: t.calls for (_, _, op), t in report.ledger.traffic.items()} == {"all_reduce": 2 * 4 + 1 + 1 + 2}
    activation = 2 * 8 * 32
    small = 2 * 8 * (1 + 2)  # cross-entropy: the maximum; the sum of exponentials and the target's logit
    assert report.ledger.total().elements == (2 * 4 + 1 + 1) * activation + small
    assert plan.conversions == 0


def test_separate_projections_share_one_all_reduce() -> None:
    class Separate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
            self.out = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            heads = [p(y).view(2, 6, 4, 8).transpose(1, 2) for p in (self.q, self.k, self.v)]
            return x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(2, 6, 32))

    def step(model: Any) -> Tensor:
        return model(values(2, 6, 32)).pow(2).mean()

    model = Separate()
    report = verify_tensor_plan(model, plan_tensor_parallel(model, step, 2), step)
    assert report.worst <= EXACT
    assert report.ledger.total(op="all_reduce").calls == 2


@pytest.mark.parametrize(
    ("kwargs", "size", "kind"),
    [
        ({"kv_heads": 1}, 2, "column"),
        ({"kv_heads": 2}, 4, "column"),
        ({"heads": 6, "d": 48}, 4, "replicated"),
        ({"heads": 3, "d": 48}, 2, "replicated"),
    ],
)
@pytest.mark.parametrize("flash", [True, False])
def test_heads_that_cannot_be_dealt(kwargs: dict[str, int], size: int, kind: str, flash: bool) -> None:
    """Few key/value heads are gathered by the ranks that share them; other attention is whole, with a reason."""
    model = NanoGPT(flash=flash, **kwargs)
    plan = plan_tensor_parallel(model, next_token, size)
    attention = plan.decisions["transformer.h.0.attn.c_attn.weight"]
    assert attention.kind == kind
    assert attention.reason
    assert plan.decisions["transformer.h.0.mlp.c_fc.weight"].kind == "column"
    report = verify_tensor_plan(model, plan, next_token)
    assert report.worst <= EXACT, str(report)


@pytest.mark.parametrize("size", [2, 4])
def test_an_odd_width_between_two_layers_is_replicated_with_a_reason(size: int) -> None:
    model = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8))

    def step(m: Any) -> Tensor:
        return m(values(3, 8)).pow(2).sum()

    plan = plan_tensor_parallel(model, step, size)
    assert plan.decisions["0.weight"] == Decision(
        "replicated", None, f"its 7 outputs are not divisible by {size} ranks"
    )
    assert verify_tensor_plan(model, plan, step).worst <= EXACT


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tie", [True, False])
def test_a_small_odd_vocabulary_with_the_target_in_the_last_shard(size: int, tie: bool) -> None:
    def step(model: Any) -> Tensor:
        index = tokens(13, 2, 9)
        target = index[:, 1:].clone()
        target[0] = 12
        return model(index[:, :-1], target)[1]

    model = NanoGPT(vocabulary=13, tie=tie)
    plan = plan_tensor_parallel(model, step, size, overrides={"*wte*": "vocab", "lm_head": "vocab"})
    cut = plan.decisions["lm_head.weight"].placement
    assert cut == Placement(0, (13,), -13 % size)
    assert plan.decisions["transformer.wte.weight"].placement == cut
    report = verify_tensor_plan(model, plan, step)
    assert report.worst <= EXACT, str(report)


@pytest.mark.filterwarnings(GATHERS)
def test_user_code_may_do_anything_with_cut_logits() -> None:
    def step(model: Any) -> Tensor:
        index = tokens(101, 2, 9)
        logits = model(index[:, :-1])[0]
        loss = F.cross_entropy(logits.view(-1, 101), index[:, 1:].reshape(-1), label_smoothing=0.1)
        assert not torch.isnan(logits).any()
        accuracy = (logits.argmax(-1) == index[:, 1:]).double().mean()
        penalty = logits.float().logsumexp(-1).pow(2).mean()
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        picked = logits.gather(-1, index[:, 1:, None]).mean()
        root = (logits.abs() + 1).sqrt().mean()
        return loss + accuracy + 0.01 * penalty + 0.1 * entropy + picked + root + logits.flatten()[3] + logits[0, 1, -1]

    model = NanoGPT()
    plan = plan_tensor_parallel(model, step, 2)
    assert plan.decisions["lm_head.weight"].kind == "vocab"
    report = verify_tensor_plan(model, plan, step)
    assert report.worst <= EXACT, str(report)


class RandomNet(nn.Module):
    """A random chain of what users write between linear layers."""

    CHOICES = ["lin", "lin", "lin", "ln", "gelu", "res", "glu", "attn", "rms", "soft", "scale", "roll", "mean", "cat"]
    CHOICES += ["reorder", "sqr", "drop", "lora", "two", "conv", "gate", "chunked"]

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.ops: list[tuple[Any, ...]] = []
        self.mods = nn.ModuleList()
        width = 16

        def linear(inputs: int, outputs: int) -> int:
            self.mods.append(nn.Linear(inputs, outputs, bias=rng.random() < 0.7))
            return len(self.mods) - 1

        for _ in range(rng.randrange(3, 9)):
            kind = rng.choice(self.CHOICES)
            if kind == "lin":
                out = rng.choice([8, 16, 24, 32, 48])
                self.ops.append((kind, linear(width, out)))
                width = out
            elif kind == "ln":
                self.mods.append(nn.LayerNorm(width))
                self.ops.append(("lin", len(self.mods) - 1))
            elif kind in ("res", "two"):
                hidden = rng.choice([16, 32])
                self.ops.append((kind, linear(width, hidden), linear(hidden, width)))
            elif kind in ("glu", "chunked"):
                self.ops.append((kind, linear(width, 32)))
                width = 16
            elif kind == "attn":
                style = rng.choice(["split", "permute", "interleave"])
                self.ops.append((kind, linear(width, 48), linear(16, width), style))
            elif kind == "cat":
                self.ops.append((kind, linear(width, 16), linear(width, 8)))
                width = 24
            elif kind == "lora":
                self.ops.append((kind, linear(width, 32), linear(width, 4), linear(4, 32)))
                width = 32
            elif kind == "gate":
                self.ops.append((kind, linear(width, width)))
            elif kind == "scale":
                self.mods.append(nn.Embedding(4, width))
                self.ops.append((kind, len(self.mods) - 1))
            elif kind == "conv":
                self.mods.append(nn.Conv1d(width, width, 3, padding=1))
                self.ops.append((kind, len(self.mods) - 1))
            else:
                self.ops.append((kind,))
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for kind, *rest in self.ops:
            mods = [self.mods[i] for i in rest if isinstance(i, int)]
            x = self.apply_op(kind, mods, rest, x)
        return self.out(x)

    def apply_op(self, kind: str, mods: list[Any], rest: list[Any], x: Tensor) -> Tensor:
        simple = {
            "gelu": F.gelu,
            "rms": lambda t: t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-5),
            "soft": lambda t: t.softmax(-1) * t.shape[-1],
            "roll": lambda t: t.roll(1, -1),
            "mean": lambda t: t - t.mean(-1, keepdim=True),
            "reorder": lambda t: t.flip(-1),
            "sqr": lambda t: t * torch.sigmoid(t),
            "drop": lambda t: F.dropout(t, 0.1, self.training),
        }
        if kind in simple:
            return simple[kind](x)
        if kind == "lin":
            return mods[0](x)
        if kind == "res":
            return x + mods[1](torch.tanh(mods[0](x)))
        if kind == "two":
            return mods[1](mods[0](x)) + mods[1](torch.relu(mods[0](x)))
        if kind == "glu":
            return F.glu(mods[0](x), -1)
        if kind == "chunked":
            a, b = mods[0](x).chunk(2, -1)
            return F.silu(a) * b
        if kind == "cat":
            return torch.cat([mods[0](x), torch.relu(mods[1](x))], -1)
        if kind == "lora":
            return mods[0](x) + mods[2](mods[1](x)) * 0.5
        if kind == "gate":
            return x * torch.sigmoid(mods[0](x))
        if kind == "scale":
            return x * mods[0].weight[1]
        if kind == "conv":
            return mods[0](x.transpose(1, 2)).transpose(1, 2)
        assert kind == "attn"
        return x + mods[1](self.attention(mods[0](x), rest[2]))

    @staticmethod
    def attention(qkv: Tensor, style: str) -> Tensor:
        b, t, _ = qkv.shape
        if style == "split":
            q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in qkv.split(16, -1))
        elif style == "permute":
            q, k, v = qkv.view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (z.squeeze(3).transpose(1, 2) for z in qkv.view(b, t, 4, 3, -1).split(1, 3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(b, t, 16)


def random_step(model: Any) -> Tensor:
    return model(values(2, 5, 16)).pow(2).mean()


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize("sequence", [False, True])
def test_random_user_nets(sequence: bool) -> None:
    fractions = []
    for seed in range(30):
        torch.manual_seed(seed)
        model, size = RandomNet(seed), 2 if seed % 2 else 4
        plan = plan_tensor_parallel(model, random_step, size, sequence=sequence)
        report = verify_tensor_plan(model, plan, random_step)
        assert report.worst <= EXACT, f"seed {seed}: {report}"
        fractions.append(plan.sharded_fraction)
    assert sum(fractions) / len(fractions) > 0.4, "hardly anything is cut: the test shows little"


def random_plan(model: nn.Module, size: int, seed: int) -> TensorPlan:
    """Every parameter cut somehow, whatever it means."""
    rng = random.Random(seed)
    plan = TensorPlan(size)
    chosen: dict[int, Decision] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in chosen:
            cuts = [
                Placement(dim, segments, copies=copies)
                for dim, n in enumerate(parameter.shape)
                for segments in ((n,), (n // 2,) * 2, (n // 3,) * 3)
                for copies in range(1, size + 1)
                if n
                and sum(segments) == n
                and size % copies == 0
                and segments[0] % (size // copies) == 0
                and segments[0]
            ]
            some = [k for k in range(1, size + 1) if size % k == 0]
            cuts += [replace(c, shares=tuple(rng.choices(some, k=len(c.segments)))) for c in cuts if c.copies == 1]
            cut = rng.choice(cuts) if cuts and rng.random() < 0.5 else None
            chosen[id(parameter)] = Decision("column", cut) if cut else Decision("replicated")
        plan.decisions[name] = chosen[id(parameter)]
        plan.shapes[name] = tuple(parameter.shape)
    return plan


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize(
    "name", ["gated_fused", "nanogpt", "nanogpt_gqa", "timm", "encoder", "decoder", "conv1d", "lora"]
)
def test_a_wrong_plan_is_slow_but_never_wrong(name: str) -> None:
    build, step, _ = PLAIN[name]
    for seed in range(4):
        torch.manual_seed(0)
        model = build()
        report = verify_tensor_plan(model, random_plan(model, 2 + 2 * (seed % 2), seed), step)
        assert report.worst <= EXACT, f"seed {seed}: {report}"
