"""A user's module on the meta device: the same prices as its sizes give, and the bytes the ledger will count."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics.classification import MulticlassF1Score
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_3d
from lightning_3d.errors import ConfigurationError
from lightning_3d.planner import Cluster, ModelShape
from lightning_3d.planner.candidate import Job, candidate_for
from lightning_3d.planner.chain import ShapeChain
from lightning_3d.planner.memory import memory
from lightning_3d.planner.module_probe import record
from lightning_3d.planner.step_time import Run
from lightning_3d.planner.traffic import buckets
from lightning_3d.planner.user_model import ModuleChain, chain_of_module, traffic
from lightning_3d.planner.work import Setting
from tests import models


class Llama(pl.LightningModule):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=512, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=4, vocab_size=4096,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss


SHAPE = ModelShape("same", 6, 512, 1536, 8, 4, 4096, gated=True, biases=False)


@pytest.fixture(scope="module")
def chain() -> ModuleChain:
    with torch.device("meta"):
        module = Llama()
    before = {name: id(p) for name, p in module.named_parameters()}
    found = chain_of_module(module, torch.zeros(2, 128, dtype=torch.long))
    assert {name: id(p) for name, p in module.named_parameters()} == before
    return found


def test_counts_what_the_sizes_say(chain: ModuleChain) -> None:
    assert chain.params == SHAPE.params
    assert (chain.samples, chain.seq, chain.hidden) == (2, 128, 512)
    assert len(chain.kinds) == 8
    assert len(set(chain.kinds[2:7])) == 1  # the first block also keeps what all of them share (rotary tables)
    for causal in (False, True):
        told = chain.flops_per_token(128, causal=causal)
        assert told == pytest.approx(SHAPE.flops_per_token(128, causal=causal), rel=0.01)


@pytest.mark.parametrize("layout", ["tp1-pp1", "tp2-pp1", "tp2-pp2"])
def test_priced_like_the_sizes(chain: ModuleChain, layout: str) -> None:
    cluster, options = Cluster.of("a100", 8), {"global_batch": 64, "seq": 128}
    own = Run(chain, cluster, Job(64, 128), _candidate(layout))
    sizes = Run(ShapeChain(SHAPE), cluster, Job(64, 128), _candidate(layout))
    for one, other in zip(memory(own).stages, memory(sizes).stages, strict=True):
        assert one.states == pytest.approx(other.states, rel=0.02)
        assert one.activations == pytest.approx(other.activations, rel=0.35)  # eager norms and rotary keep more
    assert options["seq"] == 128


def _candidate(layout: str) -> Any:
    found = lightning_3d.Layout.parse(layout).with_world_size(8)
    return candidate_for(found, Job(64, 128), 1)


def test_sizes_that_the_module_cannot_be_cut_into(chain: ModuleChain) -> None:
    assert chain.check(2, 1, 1) is None
    assert "TP=3" in (chain.check(3, 1, 1) or "")
    assert "CP=2" in (chain.check(1, 2, 1) or "")


def test_plan_of_a_module() -> None:
    batch = torch.zeros(2, 128, dtype=torch.long)
    answer = lightning_3d.plan((Llama(2), batch), Cluster.of("rtx4090", 4), global_batch=32)
    assert answer.job.seq == 128
    assert answer.best.run.candidate.layout.world_size == 4
    assert "Llama" in str(answer)


def test_a_step_that_needs_values() -> None:
    class Needs(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).sum()
            if float(loss.detach()) != 0.25:
                raise RuntimeError("the loss must be a quarter")
            return loss

    with pytest.raises(ConfigurationError, match="cannot be run on shapes alone"):
        record(Needs(), torch.randn(2, 4))
    with pytest.raises(ConfigurationError, match="a LightningModule with a training_step"):
        record(torch.nn.Linear(2, 2), torch.randn(2, 2))


def test_buckets_are_padded_as_zero_pads_them() -> None:
    assert buckets([10, 20], 4, 4 << 20, 1) == [48]
    assert buckets([10, 20], 4, 4 << 20, 2) == [64]
    assert buckets([100, 100, 100], 4, 800, 2) == [224, 128]


def test_predicted_traffic_of_a_gpt() -> None:
    """The formulas of tests/strategy/test_ledger.py, in bytes of float64."""
    dim, length, samples, depth = 16, 8, 8, 4
    module = models.LitGPT(depth=depth, dim=dim, tied=False)
    ids = torch.zeros(samples, length + 1, dtype=torch.long)
    chain = chain_of_module(module, {"tokens": ids, "targets": ids})
    layout = lightning_3d.Layout.parse("tp2-pp2-dp1-zero1")
    job = Job(samples, length, "fp32", "32-true", "lightning_3d-cpu")
    first, last = traffic(Run(chain, Cluster.of("a100", 4), job, candidate_for(layout, job, 2)), 8)
    activation = samples * length * dim
    assert first.pp == last.pp == activation * 8
    total = (1 + 2 * depth + 2 * depth + 1) * activation + 3 * samples * length
    assert first.tp + last.tp == total * 8


class ByValues(pl.LightningModule):
    """Shapes that depend on values: a metric's count of classes, rows that a mask picks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.accuracy = MulticlassF1Score(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.a(batch[0]).relu()
        logits = self.b(hidden[hidden.sum(-1) > 0])
        self.accuracy.update(self.b(hidden), batch[1])
        return logits.mean() * len(torch.unique(logits.argmax(-1)))


def test_shapes_that_depend_on_values_are_those_of_ones() -> None:
    module = ByValues()
    chain = chain_of_module(module, (torch.randn(6, 8), torch.zeros(6, dtype=torch.long)))
    products = [(p.rows, p.inner, p.columns) for piece in chain.chain for p in piece.products]
    assert products == [(6, 8, 16), (6, 16, 4), (6, 16, 4)]
    assert chain.check(2, 1, 1) is None
    assert int(module.accuracy.tp.sum()) == 0, "the metric has seen nothing"


def test_logits_are_divided_over_tp(chain: ModuleChain) -> None:
    """The loss's moment in memory is that of the same sizes, also with tensor parallelism."""
    for tp in (1, 2, 4):
        at = Setting(tokens=1024, seq=128, samples=8, tp=tp, sp=tp > 1, logits=14.0)
        told, wanted = chain.works(at)[chain.kinds[-1]], ShapeChain(SHAPE).works(at)[-1]
        assert told.passing == pytest.approx(wanted.passing, rel=0.25)
