"""The same seed gives the same start, bit for bit, in every layout."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_3d.testing import preload
from tests.strategy import initial_weights
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.strategy.initial_weights")

ZERO_3 = {"zero_stage": 3, "bucket_size_mb": 0.002}
CASES: dict[str, list[dict[str, Any]]] = {
    "init": [sizes(2, 2), sizes(4), sizes(1, 2, **ZERO_3)],
    "configure_model": [sizes(2, 2), sizes(2, **ZERO_3)],
    "meta": [sizes(2, 2), sizes(1, 4), sizes(), sizes(2, **ZERO_3), sizes(1, 2, **ZERO_3)],
}
EIGHT = [sizes(2, 2, zero_stage=stage, bucket_size_mb=0.002) for stage in range(4)] + [sizes(1, 8), sizes(8)]


def check(world: int, cases: list[tuple[str, Any]]) -> None:
    init, configured = launch(initial_weights.starts, 1, [("init", None), ("configure_model", None)])[0]
    # on the meta device: as one process that builds it with values
    want = {"init": init, "configure_model": configured, "meta": configured}
    for rank in launch(initial_weights.differ, world, cases, want):
        assert [(case, names) for case, names in zip(cases, rank, strict=True) if names] == []


def test_initial_weights_do_not_depend_on_the_layout() -> None:
    """R4: stages, shards of TP and of ZeRO-3; built in `__init__`, in `configure_model`, on the meta device."""
    check(4, [(kind, layout) for kind, layouts in CASES.items() for layout in layouts])


@pytest.mark.slow
def test_initial_weights_of_eight_ranks() -> None:
    check(8, [(kind, layout) for kind in CASES for layout in EIGHT])
