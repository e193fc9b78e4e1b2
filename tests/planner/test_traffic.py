"""Predicted bytes against the ledger of real steps, axis by axis, exactly."""

from __future__ import annotations

import pytest
import torch

from lightning_3d.layout import Layout
from lightning_3d.planner import Cluster
from lightning_3d.planner.candidate import Job, candidate_for
from lightning_3d.planner.step_time import Run
from lightning_3d.planner.user_model import chain_of_module, traffic
from lightning_3d.testing import preload, run_distributed
from tests.strategy.ledgers import DIM, LENGTH, SAMPLES, Quiet, count_all

preload("tests.models", "tests.strategy.ledgers")
DEPTH, DOUBLE = 4, 8
LAYOUTS = {"tp2-pp2-dp1-zero1": 4, "tp2-pp1-dp2-zero1": 1, "tp1-pp2-dp2-zero0": 2, "tp1-pp1-dp4-zero1": 1}


def test_bytes_equal_the_ledgers() -> None:
    cases = []
    for text, microbatches in LAYOUTS.items():
        layout = Layout.parse(text)
        sizes = {
            "tensor_parallel_size": layout.tp,
            "pipeline_parallel_size": layout.pp,
            "zero_stage": layout.zero,
            **({"num_microbatches": microbatches} if layout.pp > 1 else {}),
        }
        cases.append((sizes, DEPTH, False))
    ranks = run_distributed(count_all, 4, cases, init_process_group=False, timeout=180)
    ids = torch.zeros(SAMPLES, LENGTH + 1, dtype=torch.long)
    chain = chain_of_module(Quiet(depth=DEPTH, dim=DIM, tied=False), {"tokens": ids})
    for number, (text, microbatches) in enumerate(LAYOUTS.items()):
        layout = Layout.parse(text)
        job = Job(SAMPLES * layout.dp, LENGTH, "fp32", "32-true", "lightning_3d-cpu")
        run = Run(chain, Cluster.of("a100", 4), job, candidate_for(layout, job, SAMPLES // microbatches))
        stages = traffic(run, DOUBLE)
        for axis in ("tp", "pp", "dp"):
            sent = sum(t[3] for r in ranks for (_, a, _), t in r[number]["traffic"].items() if a == axis)
            told = layout.tp * layout.dp * sum(getattr(stage, axis) for stage in stages)
            assert sent == pytest.approx(told, rel=1e-12), (text, axis)
