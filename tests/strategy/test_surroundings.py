"""Lightning's summary of the model, calls of the module after the run, modules and steps of unusual kinds."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from lightning_3d import Layout
from lightning_3d.suitability import check_can_be_trained
from lightning_3d.testing import DistributedError, preload
from tests import models
from tests.strategy import surroundings
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.strategy.cases", "tests.strategy.surroundings")


def test_an_example_of_the_input_does_not_break_the_summary() -> None:
    assert launch(surroundings.summarised, 2, [sizes(1, 2), sizes(2)]) == [[True, True]] * 2


def test_a_call_of_the_cut_module_after_the_run_says_what_it_needs() -> None:
    for after, during in launch(surroundings.called_afterwards, 2):
        assert after
        assert "every rank must make the same call" in after[0]
        assert not during


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (surroundings.Lazy, r"net\.0\.weight.* of Lazy have no shape yet.*configure_model"),
        (surroundings.ReadsLoader, r"takes dataloader_iter.*training_step\(self, batch, batch_idx\)"),
    ],
)
def test_refusals(kind: type[Any], words: str) -> None:
    with pytest.raises(DistributedError, match=words):
        launch(surroundings.refused, 2, kind)


def test_one_microbatch_needs_no_warning_of_batch_norm() -> None:
    module = models.LitMLP()
    module.net.insert(1, nn.BatchNorm1d(16))
    with pytest.warns(UserWarning, match="BatchNorm in a pipeline"):
        check_can_be_trained(module, Layout(pp=2), [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_can_be_trained(module, Layout(pp=2), [], 1)
