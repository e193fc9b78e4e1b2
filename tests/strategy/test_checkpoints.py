"""Checkpoints: save in any layout, resume in the same or another one, equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_3d.testing import preload, relative_error, run_distributed
from tests.strategy.checkpoints import one_process, plain_files, save_and_resume

preload("tests.models", "tests.strategy.checkpoints")


def sizes(tp: int, pp: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, **more}


CASES = [
    (sizes(2, 1), sizes(2, 1), "gpt_tied", "adamw", False),
    (sizes(1, 2), sizes(1, 2), "gpt_tied", "adamw", False),
    (sizes(1, 1, zero_stage=3), sizes(2, 1, zero_stage=3), "gpt_tied", "adamw", False),
    (sizes(2, 2), sizes(2, 2), "gpt_tied", "adamw", False),
    (sizes(2, 2), sizes(1, 1, zero_stage=0), "gpt_tied", "adamw", False),
    (sizes(1, 1), sizes(1, 2, zero_stage=3), "gpt_tied", "adamw", False),
    (sizes(1, 2), sizes(2, 1), "mlp", "sgd", False),
    (sizes(2, 2), sizes(2, 2), "gpt_tied", "adamw", True),
    (sizes(1, 1, zero_stage=3), sizes(1, 2), "mlp", "sgd", True),
    (sizes(4, 1), sizes(2, 2), "llama_full", "adamw", False),  # pairs of ranks share a key/value head
    (sizes(1, 2), sizes(4, 1), "llama_full", "adamw", False),
    (sizes(4, 1), sizes(2, 1), "phi3_full", "adamw", False),  # pairs of ranks gather the key/value head they share
    (sizes(2, 1, zero_stage=2), sizes(2, 2), "mlp", "adafactor", False),  # state of whole matrices on one rank
    (sizes(4, 1), sizes(1, 1), "mlp", "adafactor", True),
    (sizes(2, 1), sizes(1, 1), "narrow", "adafactor", False),
]


def worst(got: dict[str, Any], want: dict[str, Any]) -> float:
    assert got["steps"] == want["steps"]
    assert got["rate"] == want["rate"]
    return max(relative_error(got["parameters"][n], p) for n, p in want["parameters"].items())


def test_resume_in_any_layout_equals_one_process(tmp_path: Path) -> None:
    folder = str(tmp_path)
    models = [
        ("gpt_tied", "adamw"),
        ("mlp", "sgd"),
        ("llama_full", "adamw"),
        ("phi3_full", "adamw"),
        ("mlp", "adafactor"),
        ("narrow", "adafactor"),
    ]
    alone = run_distributed(one_process, 1, models, folder, init_process_group=False, timeout=120)[0]
    want = dict(zip(models, alone, strict=True))
    got = run_distributed(save_and_resume, 4, CASES, folder, init_process_group=False, timeout=180)
    for rank in got:
        for case, (whole, resumed) in zip(CASES, rank, strict=True):
            want_whole, want_resumed = want[case[2], case[3]]
            assert worst(whole, want_whole) <= 1e-9, case
            assert worst(resumed, want_resumed) <= 1e-9, case
    # a directory becomes a file that plain Lightning resumes from, optimizer included
    kinds = {("gpt_tied", "adamw"), ("phi3_full", "adamw"), ("narrow", "adafactor")}
    saved = {case[2:4]: i for i, case in enumerate(CASES) if not case[4] and case[2:4] in kinds}
    files = [(str(tmp_path / f"case{i}" / "step=2.ckpt"), *kind) for kind, i in saved.items()]
    alone = run_distributed(plain_files, 1, files, folder, init_process_group=False)[0]
    for kind, resumed in zip(saved, alone, strict=True):
        assert worst(resumed, want[kind][1]) <= 1e-9
