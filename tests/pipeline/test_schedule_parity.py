"""Every schedule gives the numbers of one process: several windows per stage, and backwards in two halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.check import check
from lightning_3d.pipeline.training_schedule import TrainingSchedule
from lightning_3d.testing import preload, run_distributed
from tests.pipeline.test_parity import TOLERANCE, compare
from tests.pipeline.zoo import ZOO

preload("transformers", "tests.pipeline.zoo", "lightning_3d.pipeline")

SEVERAL_PASSES = ("siamese", "several_forwards")
Choice = tuple[str, int, str]
INTERLEAVED: Choice = ("interleaved_1f1b", 2, "looped")
CONTIGUOUS: Choice = ("interleaved_1f1b", 2, "contiguous")
THREE: Choice = ("interleaved_1f1b", 3, "looped")
H1: Choice = ("zb_h1", 1, "looped")
V: Choice = ("zb_v", 2, "looped")


def _rank(pp: int, cases: list[tuple[str, int, int, Choice]]) -> list[dict[str, Any]]:
    mesh = Mesh(Layout(pp=pp), torch.device("cpu"))
    out = []
    for name, samples, microbatches, (schedule, virtual, order) in cases:
        chosen = TrainingSchedule(schedule, pp, virtual, order)
        result = compare(mesh, name, samples=samples, microbatches=microbatches, schedule=chosen)
        lists = chosen.lists(chosen.owners, min(microbatches, samples))
        planned = check(lists, len(chosen.owners), min(microbatches, samples)).peak_live[mesh.at.pp]
        out.append({**result, "planned peak": planned})
    return out


def _cases(pp: int) -> list[tuple[str, int, int, Choice]]:
    pieces_for_four = {"vae", "unet", "masks", "frozen_start", "batch_norm", "hidden_states"}
    small = [n for n in ZOO if pp == 2 or n not in pieces_for_four]
    cases = [(name, 8, 4, H1) for name in ZOO]
    cases += [(name, 8, 4, choice) for name in small for choice in (INTERLEAVED, V)]
    for choice in (INTERLEAVED, CONTIGUOUS, H1, V, *([THREE] if pp == 2 else [])):
        cases += [("gpt", 7, 5, choice), ("mlp", 8, 1, choice), ("mlp", 3, 8, choice)]
    return cases


@pytest.mark.parametrize(
    ("pp", "models"),
    [(2, None), (4, ("gpt", "t5", "siamese")), pytest.param(4, None, marks=pytest.mark.slow)],
)
def test_gradients_of_every_schedule_equal_one_process(pp: int, models: tuple[str, ...] | None) -> None:
    cases = [case for case in _cases(pp) if models is None or case[0] in models]
    ranks = run_distributed(_rank, pp, pp, cases, timeout=180)
    for k, (name, samples, microbatches, choice) in enumerate(cases):
        label = f"{name} pp={pp} m={microbatches} of {samples} {choice}"
        results = [rank[k] for rank in ranks]
        for result in results:
            assert result["gradient"] <= TOLERANCE, f"{label}: {result['where']} off by {result['gradient']:.1e}"
            assert result["loss"] <= TOLERANCE, label
            if name not in SEVERAL_PASSES:  # their chain is longer than the planned one
                assert result["peak"] == result["planned peak"], f"{label}: memory is not what the schedule promises"
        everything = results[0]["names"]
        assert sorted({n for r in results for n in r["held"]}) == sorted(everything), f"{label}: a parameter is lost"
        assert sorted(n for r in results for n in r["counted"]) == sorted(everything), f"{label}: counted once"


def _split_rank(pp: int) -> list[dict[str, Any]]:
    """Measured splits, and numbers of blocks that do not divide."""
    mesh = Mesh(Layout(pp=pp), torch.device("cpu"))
    out = []
    for name, how in (("gpt5", "auto"), ("gpt7", "auto"), ("gpt7", "measured"), ("llama", "measured")):
        schedule = TrainingSchedule("interleaved_1f1b", pp, 2)
        out.append(compare(mesh, name, samples=8, microbatches=4, schedule=schedule, split=how))
    return out


def test_blocks_that_do_not_divide_and_measured_splits() -> None:
    for rank in run_distributed(_split_rank, 2, 2, timeout=120):
        assert all(result["gradient"] <= TOLERANCE for result in rank)
