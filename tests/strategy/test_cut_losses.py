"""A loss that is another one on microbatches is told at the start, once, with the way out."""

from __future__ import annotations

from lightning_3d.testing import preload
from tests.strategy.cut_losses import cut_losses
from tests.strategy.test_cases import launch

preload("tests.models", "tests.strategy.cases", "tests.strategy.cut_losses")


def test_losses_that_microbatches_change_are_told() -> None:
    first, second = launch(cut_losses, 2)
    assert not any(second.values())
    for name in ("mean", "dropped", "sum, one microbatch", "sum, not asked"):
        assert first[name] == [], name
    for name in ("sum", "contrastive"):
        (message,) = first[name]
        for word in ("a sum", "in-batch negatives", "tokens", "time-major", "8 microbatches", "num_microbatches=1"):
            assert word in message
    assert "time-major" in first["time"][0]
