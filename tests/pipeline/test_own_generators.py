"""Generators of the module's own: all stages draw the same numbers, in whatever order they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_3d.testing import preload
from tests.pipeline.own_generators import masks
from tests.strategy.test_cases import launch, sizes

preload("tests.pipeline.own_generators")
INTERLEAVED = {"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_size": 2}


@pytest.mark.parametrize("source", ["torch", "global", "numpy", "RandomState", "reseeded"])
@pytest.mark.parametrize("more", [{}, INTERLEAVED, {"pipeline_schedule": "zb_v"}], ids=["1f1b", "interleaved", "zb_v"])
def test_all_stages_draw_the_same(source: str, more: dict[str, Any]) -> None:
    """Broken before: a stage had drawn what came before its end only, so the next microbatch's masks differed."""
    ranks = launch(masks, 2, source, sizes(1, 2, num_microbatches=4, **more))
    drawn = ranks[0][0]
    assert len(drawn) == 8
    assert all(torch.equal(a, b) for a, b in zip(drawn, ranks[1][0], strict=True))
    for _, losses, after, _ in ranks:
        assert losses == [0.0, 0.0]
        assert torch.equal(after, ranks[0][2])
    equal = torch.equal(drawn[0], drawn[1])
    assert equal == (source == "reseeded")
    if source == "reseeded":
        first = torch.rand((2, 4), generator=torch.Generator().manual_seed(11), dtype=torch.float64)
        assert all(torch.equal(mask, first) for masks_ in drawn for mask in masks_)
    else:
        assert len({float(mask.sum()) for masks_ in drawn for mask in masks_}) == 3 * len(drawn)


@pytest.mark.parametrize("source", ["torch", "global", "numpy", "RandomState", "reseeded"])
def test_one_microbatch_draws_what_one_process_draws(source: str) -> None:
    """The module's own stream, also after the batch; without atoms that draw from it."""
    ((want, _, after, _),) = launch(masks, 1, source, sizes(), True)
    for more in ({}, INTERLEAVED):
        for got, losses, then, _ in launch(masks, 2, source, sizes(1, 2, num_microbatches=1, **more), True):
            assert losses == [0.0, 0.0]
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            assert torch.equal(then, after)


def test_planning_takes_nothing_from_an_iterator() -> None:
    """Of two steps of four microbatches the last stage has taken eight items."""
    ranks = launch(masks, 2, "torch", sizes(1, 2, num_microbatches=4))
    assert ranks[0][3] == 8
