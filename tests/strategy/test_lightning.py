"""Callbacks, loggers, precisions, evaluation, the other Lightning package, BatchNorm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_3d
from lightning_3d import GradientNorm
from lightning_3d.errors import ConfigurationError
from lightning_3d.testing import preload, relative_error, run_distributed
from tests import models
from tests.strategy import lightnings

preload("tests.models", "tests.strategy.lightnings", "pytorch_lightning")


def sizes(tp: int = 1, pp: int = 1, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, **more}


def launch(function: Any, world: int, *args: Any) -> list[Any]:
    return run_distributed(function, world, *args, init_process_group=False, timeout=120)


@pytest.mark.parametrize(("layout", "world"), [(sizes(1, 2), 2), (sizes(2, 1), 4), (sizes(2, 2), 4)])
def test_callbacks_see_the_same_on_every_rank(layout: dict[str, Any], world: int, tmp_path: Path) -> None:
    ranks = launch(lightnings.with_callbacks, world, layout, str(tmp_path))
    lead = ranks[0]
    for rank in ranks:
        for key in ("epochs", "best", "path", "validated"):
            assert rank[key] == lead[key]
    assert lead["epochs"] == 2  # EarlyStopping
    assert lead["validated"] == pytest.approx(lead["best"], rel=1e-12)
    assert f"{lead['best']:.4f}" in lead["path"]
    assert {"loss_step", "loss_epoch"} <= set(lead["shown"])
    assert len(lead["losses"]) == 4
    assert lead["rates"] == pytest.approx([1e-2, 1e-2 / 2, 1e-2 / 3, 1e-2 / 4])
    assert [p.name for p in (tmp_path / "kept").iterdir()] == [lead["path"]]


@pytest.mark.parametrize(("precision", "close"), [("32-true", 1e-5), ("bf16-mixed", 2e-2), ("bf16-true", 5e-2)])
def test_precisions(precision: str, close: float) -> None:
    want = launch(lightnings.in_precision, 1, None, precision)[0]
    for layout, world in ((sizes(2), 2), (sizes(1, 2), 2), (sizes(2, 2), 4)):
        for got in launch(lightnings.in_precision, world, layout, precision):
            assert got == pytest.approx(want, rel=close)


def test_fit_test_and_predict_with_batches_of_changing_size() -> None:
    want = launch(lightnings.evaluate, 1, None)[0]
    layouts = (sizes(2), sizes(1, 2), sizes(1, 2, num_microbatches=5), sizes(zero_stage=3, bucket_size_mb=0.002))
    for layout, world in (*((layout, 2) for layout in layouts), (sizes(2, 2), 4)):
        ranks = launch(lightnings.evaluate, world, layout)
        for got in ranks:
            assert got["steps"] == want["steps"] == 6
            assert got["test_loss"] == pytest.approx(want["test_loss"], rel=1e-9)
            assert max(relative_error(got["parameters"][n], p) for n, p in want["parameters"].items()) <= 1e-9
            assert relative_error(got["predictions"], want["predictions"]) <= 1e-9


def test_the_callback_logs_the_norm_of_the_whole_gradient(tmp_path: Path) -> None:
    want = launch(lightnings.logged_norms, 1, None, str(tmp_path))[0]
    assert len(want) == 3
    for layout, world in ((sizes(), 2), (sizes(zero_stage=0), 2), (sizes(2, 2, num_microbatches=2), 4)):
        assert launch(lightnings.logged_norms, world, layout, str(tmp_path))[0] == pytest.approx(want, rel=1e-6)
    with pytest.raises(ConfigurationError, match="norm_type is -1"):
        GradientNorm(norm_type=-1)
    with pytest.raises(ConfigurationError, match="needs ThreeDStrategy"):
        GradientNorm().setup(pl.Trainer(accelerator="cpu", logger=False), None, "fit")


def test_learning_rate_finder(tmp_path: Path) -> None:
    want, start = launch(lightnings.found_rate, 1, None, str(tmp_path))[0]
    assert want is not None
    for layout in (sizes(), sizes(2), sizes(1, 2)):
        for suggestion, parameters in launch(lightnings.found_rate, 2, layout, str(tmp_path)):
            assert suggestion == pytest.approx(want, rel=1e-9)
            assert max(relative_error(parameters[n], p) for n, p in start.items()) <= 1e-12


def test_validation_before_fit() -> None:
    """What a fit asks for (microbatches, checks, a proof) holds although the module was cut for a validation."""
    want = launch(lightnings.validate_then_fit, 1, None)[0]
    for layout, world in ((sizes(2), 2), (sizes(1, 2, num_microbatches=2), 2), (sizes(2, 2), 4)):
        for rank, got in enumerate(launch(lightnings.validate_then_fit, world, layout)):
            assert got["val_loss"] == pytest.approx(want["val_loss"], rel=1e-9)
            assert max(relative_error(got["parameters"][n], p) for n, p in want["parameters"].items()) <= 1e-9
            if layout["pipeline_parallel_size"] == 2:
                assert got["microbatches"] == layout.get("num_microbatches", 8)
                assert "manual optimization" in got["refusal"]
            assert ("not proved" in got["logged"]) == (layout["tensor_parallel_size"] == 2 and rank == 0)


def test_both_lightning_packages() -> None:
    for steps, loss, wrong_trainer, wrong_module in launch(lightnings.in_pytorch_lightning, 4):
        assert steps == 2
        assert 0 < loss < 10
        assert "lightning_3d.pytorch_lightning.ThreeDStrategy" in wrong_trainer
        assert "`model` must be a `LightningModule`" in wrong_module  # Lightning says so before it asks the strategy


def test_batch_norm_has_a_rule_and_a_warning() -> None:
    for rank in launch(lightnings.batch_norm, 4, sizes(1, 2, num_microbatches=4)):
        messages, _, count, _ = rank
        assert count == 2 * 4  # once per microbatch
        assert len(messages) <= 1
    ranks = launch(lightnings.batch_norm, 4, sizes(1, 2, num_microbatches=4))
    assert "once per microbatch" in ranks[0][0][0]
    assert all(rank[1] == ranks[0][1] for rank in ranks)
    assert all(rank[3] == pytest.approx(ranks[0][3], rel=1e-12) for rank in ranks)
    direct = launch(lightnings.batch_norm, 4, sizes())
    assert direct[0][0] == []
    assert direct[0][2] == 2


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2-pp2", "tp4-pp4-dp8"])
def test_verify_and_explain(layout: str) -> None:
    module = models.build("gpt_tied")
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    batch = next(iter(models.loader("gpt_tied", 4, 4)))
    report = lightning_3d.verify(module, batch, layout)
    assert report.ok
    assert report.worst <= 1e-12
    report.raise_if_wrong()
    text = lightning_3d.explain(module, batch, layout)
    assert ("column" in text) == ("tp" in layout)
    assert ("pipeline stages" in text) == ("pp" in layout)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    assert not module.__dict__.keys() & {"log", "log_dict"}
