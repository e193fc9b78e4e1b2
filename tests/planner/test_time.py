"""Kernels, collectives and the parts of a step."""

from __future__ import annotations

import pytest

from lightning_3d.layout import Layout
from lightning_3d.planner.candidate import Candidate, Job
from lightning_3d.planner.chain import ShapeChain, cut
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.collectives import Group, Links, group_of
from lightning_3d.planner.hardware import gpu_named, gpus
from lightning_3d.planner.kernels import Kernels
from lightning_3d.planner.presets import preset
from lightning_3d.planner.search import divisors
from lightning_3d.planner.step_time import Run, estimated_seconds, step_time

A100 = Cluster.of("a100-80gb", 64, 8, "hdr200x8")


def test_large_products_reach_what_was_measured() -> None:
    for name in ("a100", "h100"):
        gpu = gpu_named(name)
        share = 2 * 8192**3 / Kernels(gpu, "bf16").matmul(8192, 8192, 8192) / gpu.bf16
        assert 0.6 < share < 0.88


def test_awkward_products_are_slower() -> None:
    kernels = Kernels(gpu_named("a100"), "fp16")
    good, odd = kernels.matmul(8192, 14336, 1792), kernels.matmul(8192, 14400, 1800)
    assert odd > 1.3 * good
    assert kernels.matmul(4096, 4096, 4097) > 2 * kernels.matmul(4096, 4096, 4096)
    assert kernels.matmul(32, 4096, 4096) > kernels.matmul(4096, 4096, 4096) / 60  # not a 128th


def test_ring_over_the_network() -> None:
    links = Links(A100)
    assert group_of(A100, 8, 1) == Group(8, 8)
    assert group_of(A100, 8, 8) == Group(8, 1)
    assert group_of(A100, 16, 4) == Group(16, 2)
    inside, between = (links.seconds("all_reduce", 1e9, g) for g in (Group(8, 8), Group(8, 1)))
    assert between > 10 * inside
    assert links.seconds("all_reduce", 1e9, Group(1, 1)) == 0
    gather = links.seconds("all_gather", 1e9, Group(8, 8))
    assert gather == pytest.approx(inside / 2, rel=0.01)


def test_pairs_without_a_switch() -> None:
    """MI300X: two ranks have one link of seven."""
    links = Links(Cluster.of("mi300x", 8))
    assert links.inside(8, "all_gather") == pytest.approx(7 * links.inside(2, "all_gather"))


def test_parts_add_up_to_the_played_step() -> None:
    layout = Layout(tp=4, pp=4, dp=4, schedule="interleaved_1f1b", virtual=2)
    run = Run(ShapeChain(preset("llama3-8b")), A100, Job(256, 4096), Candidate(layout, 1, 64, "full", True))
    time = step_time(run)
    assert time.total == pytest.approx(step_time(run, split=False).total)
    assert min(time.compute, time.recompute, time.tensor, time.bubble) > 0
    assert estimated_seconds(run) == pytest.approx(time.total, rel=0.1)


def test_more_recomputation_costs_time_and_saves_nothing_else() -> None:
    chain = ShapeChain(preset("llama3-8b"))
    totals = [
        step_time(Run(chain, A100, Job(64, 4096), Candidate(Layout(dp=64), 1, 1, how))) for how in ("none", "full")
    ]
    assert totals[0].compute == pytest.approx(totals[1].compute)
    assert totals[1].recompute > 0.25 * totals[0].compute


def test_cut() -> None:
    kinds = (0, *[1] * 6, 3)
    even = cut(kinds, (0.1, 1.0, 0.0, 2.0), 3, True)
    assert [len(blocks) for blocks in even] == [3, 2, 3]
    balanced = cut(kinds, (0.1, 1.0, 0.0, 2.0), 3, False)
    assert max(sum((0.1, 1.0, 0.0, 2.0)[kinds[b]] for b in blocks) for blocks in balanced) == pytest.approx(3.0)
    llama = cut((0, *[1] * 126, 3), (1.0, 1.0, 1.0, 1.0), 16, True)
    assert [len(blocks) for blocks in llama] == [8] * 16  # one layer fewer on the first and the last stage


def test_table_of_gpus() -> None:
    assert len(gpus()) == 17
    assert gpu_named("A100-80GB").memory / 2**30 == pytest.approx(79.15)
    assert gpu_named("h100").link == 450e9  # one direction
    assert gpu_named("gb200").domain == 72
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
