"""Callbacks that add groups, average, prune or replace weights; state that exists before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_3d.testing import preload, relative_error, run_distributed
from tests.strategy.callbacks import fits

preload("tests.models", "tests.strategy.callbacks")
TP, PP, DP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"zero_stage": 1}
DIVIDED = {"zero_stage": 3, "bucket_size_mb": 0.001}
ON_HOST = {"zero_stage": 1, "offload_optimizer": True}
CASES: dict[str, list[dict[str, Any]]] = {
    "finetune": [TP, PP, DP, DIVIDED, {**DIVIDED, "offload_optimizer": True}],
    "average": [DP, {"zero_stage": 0}, {"save_distributed_checkpoint": False}, ON_HOST],
    "prune": [{"zero_stage": 0}],
    "replace": [TP, PP, DP, ON_HOST],
    "adagrad": [TP, {**TP, "zero_stage": 0}, PP, DP, DIVIDED, ON_HOST],
}


@pytest.mark.parametrize("kind", CASES)
def test_equal_to_one_process_also_after_a_resume(kind: str, tmp_path: Path) -> None:
    alone = run_distributed(fits, 1, [(None, kind)], f"{tmp_path}/alone", init_process_group=False, timeout=120)[0][0]
    cases = [(sizes, kind) for sizes in CASES[kind]]
    for rank in run_distributed(fits, 2, cases, str(tmp_path), init_process_group=False, timeout=200):
        for (sizes, _), got in zip(cases, rank, strict=True):
            for parameters, want in zip(got, alone, strict=True):
                assert list(parameters) == list(want)
                worst = max(relative_error(parameters[n], p) for n, p in want.items())
                assert worst <= 1e-9, (sizes, worst)
