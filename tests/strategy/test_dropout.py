"""Dropout in whole fits (R1, R2): who agrees with whom, recomputation, and a mode that equals one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_3d.testing import preload, relative_error, run_distributed
from tests.strategy.dropouts import masks, recomputed, with_dropout

preload("tests.models", "tests.strategy.dropouts")


def launch(function: Any, world: int, *args: Any) -> list[Any]:
    return run_distributed(function, world, *args, init_process_group=False, timeout=120)


def test_the_exact_mode_equals_one_process() -> None:
    want = launch(with_dropout, 1, [None])[0][0]
    exact, fast = launch(with_dropout, 2, [{"tensor_parallel_size": 2, "exact_dropout": x} for x in (True, False)])[0]
    assert max(relative_error(exact[n], p) for n, p in want.items()) < 1e-9
    assert max(relative_error(fast[n], p) for n, p in want.items()) > 1e-3  # other masks


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a == b).double().mean())


def test_which_masks_agree() -> None:
    """R1: inside the pair every rank has its own, behind it peers agree, replicas never do."""
    ranks = launch(masks, 4, {"tensor_parallel_size": 2})
    for a, b in ((0, 1), (2, 3)):  # peers
        assert 0.4 < agreement(ranks[a]["inside"], ranks[b]["inside"]) < 0.6
        assert agreement(ranks[a]["outside"], ranks[b]["outside"]) == 1.0
    for a, b in ((0, 2), (1, 3)):  # replicas
        assert 0.4 < agreement(ranks[a]["inside"], ranks[b]["inside"]) < 0.6
        assert 0.4 < agreement(ranks[a]["outside"], ranks[b]["outside"]) < 0.6
    for name in ("inside", "outside"):
        kept = torch.stack([rank[name].double() for rank in ranks]).mean()
        assert kept == pytest.approx(0.5, abs=0.03), name


@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)], ids=lambda s: "tp{}-pp{}".format(*s))
def test_recomputation_draws_the_same_masks(layout: tuple[int, int]) -> None:
    """R2: forwards of other microbatches come between a forward and its recomputation."""
    sizes = {"tensor_parallel_size": layout[0], "pipeline_parallel_size": layout[1]}
    kinds = ["none", "saved"] if layout[1] > 1 else ["none", "saved", "reentrant"]  # stages refuse the last kind
    cases = [(sizes, kind) for kind in kinds]
    for plain, *others in launch(recomputed, layout[0] * layout[1], cases):
        for other in others:
            assert all(torch.equal(other[n], p) for n, p in plain.items())
