"""What Lightning decides on each rank by itself, and ranks must decide together."""

from __future__ import annotations

import pytest

from lightning_3d.testing import DistributedError, preload
from tests.strategy import agreements
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.strategy.agreements")


@pytest.mark.parametrize("layout", [sizes(), sizes(1, 2)], ids=["dp2", "pp2 x dp2"])
def test_replicas_that_log_other_names_in_another_order(layout: dict[str, int]) -> None:
    """Means are over the replicas that logged a name; broken before: means of different names were added, or a hang."""
    for first, second in launch(agreements.logged_in_any_order, 2 * layout["pipeline_parallel_size"], layout):
        assert {k: first[k] for k in "abc"} == {"a": 5.0, "b": 6.0, "c": 12.0}
        assert first["metric"] == 0.5
        assert (second["a"], second["c"]) == (0.0, 12.0)
        assert second["b"] == 11.0


def test_replicas_with_other_numbers_of_training_batches_are_refused() -> None:
    with pytest.raises(DistributedError, match=r"the data-parallel replicas have 3, 2 training batches in an epoch"):
        launch(_with, 2, {"max_epochs": 1})
    for options in ({"max_steps": 2, "max_epochs": 1}, {"limit_train_batches": 2, "max_epochs": 1}):
        assert launch(_with, 2, options) == [2, 2]


def _with(options: dict[str, int]) -> int:
    return agreements.unequal_training(sizes(), **options)
