"""The block-by-block memory of the planner against the papers' closed forms, and those against printed numbers."""

from __future__ import annotations

import pytest

from lightning_3d.layout import Layout
from lightning_3d.planner import formulas
from lightning_3d.planner.candidate import Candidate, Job
from lightning_3d.planner.chain import ShapeChain
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.memory import memory
from lightning_3d.planner.presets import preset
from lightning_3d.planner.recipes import RECIPES, states
from lightning_3d.planner.step_time import Run
from lightning_3d.planner.work import Setting, layer_work


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sp", [False, True])
def test_layer_against_korthikanti(tp: int, sp: bool) -> None:
    """Equations 1 to 6: none, selective and full recomputation."""
    model, s, b = preset("gpt-22b"), 2048, 4
    work = layer_work(model, 0, Setting(s * b, s, b, tp=tp, sp=sp, flash=False))
    for recompute, kept in (("none", work.kept), ("selective", work.kept_selective)):
        assert kept == pytest.approx(formulas.layer_activations(s, b, 6144, 64, tp, sp, recompute), rel=1e-9)
    assert work.entry == formulas.layer_activations(s, b, 6144, 64, tp, sp, "full")


def test_printed_numbers() -> None:
    assert formulas.zero_states(7.5e9, 64, 1) / 1e9 == pytest.approx(31.4, abs=0.05)
    assert formulas.zero_states(7.5e9, 64, 2) / 1e9 == pytest.approx(16.6, abs=0.05)
    assert formulas.zero_states(7.5e9, 64, 3) / 1e9 == pytest.approx(1.9, abs=0.05)
    assert formulas.deepspeed_estimate(7.5e9, 5e8, 64, 2) / 2**30 == pytest.approx(15.93, abs=0.01)
    assert formulas.interleaved_factor(35, 3) == pytest.approx(1.324, abs=0.001)
    assert formulas.gpipe_speedup(8, 32) == pytest.approx(6.56, abs=0.01)


@pytest.mark.parametrize(("zero", "bytes_"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_states_by_stage(zero: int, bytes_: float) -> None:
    assert states(1000, RECIPES["zero-paper"], zero, 8).total == pytest.approx(1000 * bytes_)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved_1f1b", 3)])
def test_first_stage_holds_the_papers_activations(schedule: str, virtual: int) -> None:
    """1F1B: all layers' worth for any number of stages; interleaved: 1 + (p-1)/(pv) of it."""
    model, p = preset("gpt-530b"), 35
    layout = Layout(tp=8, pp=p, schedule=schedule, virtual=virtual)
    job = Job(280, 2048, "fp16", "megatron", "megatron-2021")
    run = Run(ShapeChain(model), Cluster.of("a100", 280, 8), job, Candidate(layout, 1, 280, "selective", True))
    layer = formulas.layer_activations(2048, 1, model.hidden, model.heads, 8, True, "selective")
    more = formulas.interleaved_factor(p, virtual) if virtual > 1 else 1.0
    assert memory(run).stages[0].activations == pytest.approx(layer * model.layers * more, rel=0.02)


def test_gpipe_holds_every_microbatch() -> None:
    chain, cluster = ShapeChain(preset("gpt-1.7b")), Cluster.of("a100", 4)
    held = {}
    for schedule in ("gpipe", "1f1b"):
        candidate = Candidate(Layout(pp=4, schedule=schedule), 1, 16)
        held[schedule] = memory(Run(chain, cluster, Job(16, 2048), candidate)).stages[0].activations
    assert held["gpipe"] == pytest.approx(4 * held["1f1b"])
