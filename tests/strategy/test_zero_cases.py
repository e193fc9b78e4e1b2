"""Public bug reports about gradients, optimizers and their state as tests (M2 N9 N10 N11 N12 U7 U9)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import lightning_3d
from lightning_3d.testing import preload, relative_error
from tests import models
from tests.strategy import zero_cases
from tests.strategy.fits import Case
from tests.strategy.test_cases import launch, sizes
from tests.strategy.test_parity import check

preload("tests.models", "tests.strategy.fits", "tests.strategy.zero_cases")

SMALL = {"bucket_size_mb": 0.001}


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(relative_error(got[n], p) for n, p in want.items())


def test_experts_and_their_balance() -> None:
    """N10, N11, N12: router, experts (also without tokens) and what is before them, in every layout and stage."""
    for layout, runs, more in (
        ((1, 1, 4), ((0, 1), (2, 4)), {}),
        ((2, 1, 2), ((1, 4), (3, 1)), {}),
        ((1, 2, 2), ((1, 4),), {"num_microbatches": 2}),
    ):
        parts = (layout[2], more.get("num_microbatches", 1))
        cases = [
            Case("experts", steps=2, accumulate=accumulate, samples=8, parts=parts,
                 strategy={"zero_stage": stage, **SMALL, **more})
            for stage, accumulate in runs
        ]  # fmt: skip
        check(layout, cases)


def test_sizes_of_one() -> None:
    """U9: one process with every stage, and two replicas, are plain training."""
    for world in (1, 2):
        cases = [
            Case("gpt_tied", steps=3, samples=8, accumulate=2, clip=0.3, optimizer="adamw", parts=(world, 1),
                 strategy={"zero_stage": stage, **SMALL})
            for stage in (range(4) if world == 1 else (1,))
        ]  # fmt: skip
        check((1, 1, world), cases)


def test_batches_left_over_at_the_end_of_an_epoch() -> None:
    """N9: as Lightning on one device has it, divided by the full count; also with a schedule of counts."""
    hows = ("four", "scheduled")
    want = launch(zero_cases.leftovers, 1, [(None, how) for how in hows])[0]
    assert [steps for _, steps in want] == [4, 5]
    layouts: list[dict[str, Any]] = [
        *(sizes(zero_stage=stage, **SMALL) for stage in range(4)), sizes(2), sizes(1, 2, num_microbatches=2)
    ]  # fmt: skip
    cases = [(layout, how) for layout in layouts for how in hows if how == "four" or layout in layouts[2::3]]
    for rank in launch(zero_cases.leftovers, 2, cases):
        for (layout, how), (got, steps) in zip(cases, rank, strict=True):
            parameters, expected = want[hows.index(how)]
            assert steps == expected, layout
            assert worst(got, parameters) <= 1e-9, (layout, how)


def test_two_optimizers_that_take_turns_and_accumulate_by_hand() -> None:
    """U7: a GAN with `toggle_optimizer`; a pipeline is refused before anything runs."""
    ((want, _),) = launch(zero_cases.gan, 1, [None])[0]
    for world, layouts in (
        (2, [*(sizes(zero_stage=stage, **SMALL) for stage in range(4)), sizes(2)]),
        (4, [sizes(2, zero_stage=stage, **SMALL) for stage in (1, 2, 3)]),
    ):
        for rank in launch(zero_cases.gan, world, layouts):
            for layout, (got, apart) in zip(layouts, rank, strict=True):
                assert worst(got, want) <= 1e-9, layout
                assert apart == 0.0, layout
    for precision, tolerance in (("32-true", 1e-5), ("16-mixed", 5e-3)):
        ((want, _),) = launch(zero_cases.gan, 1, [None], precision)[0]
        layouts = [sizes(2), sizes(zero_stage=1, offload_optimizer=True, **SMALL)]
        for rank in launch(zero_cases.gan, 2, layouts, precision):
            for layout, (got, apart) in zip(layouts, rank, strict=True):
                assert worst(got, want) <= tolerance, (layout, precision)
                assert apart == 0.0, (layout, precision)
    for text in launch(zero_cases.refused, 2, zero_cases.GAN, sizes(1, 2)):
        assert "manual optimization" in text
        assert "pipeline_parallel_size=1" in text


def test_a_heavy_end_is_foretold() -> None:
    """M2: what `explain` says of every stage before any process runs is what ranks hold; an embedding alone, too."""
    module = zero_cases.HeavyEnds()
    batch = next(iter(models.loader("gpt_tied", 8, 8)))
    rows = re.findall(r"^ (\d) +\S+ +([\d,]+) ", lightning_3d.explain(module, batch, "pp2"), re.MULTILINE)
    told = {int(stage): 4 * int(count.replace(",", "")) for stage, count in rows}
    assert len(told) == 2
    assert dict(launch(zero_cases.stage_bytes, 2, "auto")) == pytest.approx(told, rel=0.05)
    embedding = module.embed.weight.nbytes
    rest = sum(p.nbytes for p in module.parameters()) - embedding
    assert dict(launch(zero_cases.stage_bytes, 2, ["blocks.0"])) == pytest.approx({0: embedding, 1: rest}, rel=0.05)
