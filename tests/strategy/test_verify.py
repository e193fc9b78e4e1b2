"""`verify` and `explain` on steps that are equal in stages and yet not what one process trains, or cannot run here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_3d
from lightning_3d.errors import ConfigurationError, PipelineError
from tests import models


class Sum(models.LitMLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="sum")


class Contrastive(models.LitMLP):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        z = F.normalize(self.net(batch["x"]), dim=-1)
        return {"loss": F.cross_entropy(z @ z.t() * 5, torch.arange(len(z)))}


class Noisy(models.LitMLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"] + torch.randn_like(batch["x"])), batch["y"])


class Detached(models.LitMLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


class NeedsTrainer(models.LitMLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.optimizers()
        return super().training_step(batch, batch_idx)


@pytest.fixture
def batch() -> Any:
    return {k: v[:8] for k, v in models.vectors(8).columns.items()}


@pytest.mark.parametrize("kind", [Sum, Contrastive])
def test_a_loss_that_is_no_mean_over_samples_is_warned_of(kind: Any, batch: Any) -> None:
    report = lightning_3d.verify(kind(), batch, "pp2")
    assert report.ok
    (warning,) = report.warnings
    assert warning in str(report)
    for word in ("loss of the whole batch is", "mean over 2 microbatches", "num_microbatches=1"):
        assert word in warning
    assert not lightning_3d.verify(kind(), batch, "pp2", num_microbatches=1).warnings


@pytest.mark.parametrize("kind", [models.LitMLP, Noisy])
def test_a_mean_over_samples_is_not(kind: Any, batch: Any) -> None:
    report = lightning_3d.verify(kind(), batch, "pp2", num_microbatches=3)
    assert report.ok
    assert not report.warnings


def test_a_layout_that_cuts_nothing_is_named(batch: Any) -> None:
    report = lightning_3d.verify(models.LitMLP(), batch, "tp7")
    assert report.ok
    assert "nothing of this model can be cut over 7" in str(report)


def test_a_step_that_cannot_run_here(batch: Any) -> None:
    with pytest.raises(PipelineError, match="does not require grad"):
        lightning_3d.verify(Detached(), batch, "pp2")
    for layout in ("tp2", "pp2"):
        for look in (lightning_3d.verify, lightning_3d.explain):
            with pytest.raises(
                ConfigurationError, match=r"NeedsTrainer uses self\.trainer.*self\._trainer is not None"
            ):
                look(NeedsTrainer(), batch, layout)


@pytest.mark.parametrize("layout", ["pp2-interleaved_1f1b-v2", "pp2-interleaved_1f1b-v2-contiguous", "pp2-zb_v"])
def test_every_part_of_a_stage_is_proved_and_explained(layout: str) -> None:
    module = models.build("gpt")
    batch = next(iter(models.loader("gpt", 8, 8)))
    report = lightning_3d.verify(module, batch, layout)
    assert report.ok
    text = lightning_3d.explain(module, batch, layout)
    stages = text[text.index("pipeline stages") :]
    assert "wte" in stages
    assert "head" in stages
    several = "to 0" in stages or "to 1" in stages
    assert several, stages
