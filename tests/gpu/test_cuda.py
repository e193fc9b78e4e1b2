"""The same code on CUDA and NCCL: parity with one GPU for what the devices that are there allow."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters, preload, relative_error, run_distributed
from tests import models

preload("tests.models")
GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no CUDA device")]


def train(sizes: dict[str, Any] | None, precision: str = "64-true") -> dict[str, Any]:
    warnings.simplefilter("ignore")
    world = int(os.environ["WORLD_SIZE"])
    strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
    trainer = pl.Trainer(
        max_steps=3, max_epochs=-1, accelerator="gpu", devices=world, precision=precision, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.3,
        strategy=strategy, use_distributed_sampler=False, limit_val_batches=1,
    )  # fmt: skip
    module = models.build("gpt_tied")
    replicas = 1 if sizes is None else strategy.layout.dp
    replica = int(os.environ["RANK"]) // (world // replicas)
    loader = models.loader("gpt_tied", 24, 8, replica, replicas)
    trainer.fit(module, loader, loader)
    parameters = dict(module.named_parameters()) if sizes is None else full_parameters(strategy)
    report = strategy.memory_report() if sizes is not None else {}
    return {
        "parameters": {n: p.detach().cpu() for n, p in parameters.items()},
        "loss": float(trainer.callback_metrics["val_loss"]),
        "on device": report.get("optimizer", 0),
        "offloaded": report.get("offloaded", 0),
    }


LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]


@pytest.mark.parametrize("layout", [s for s in LAYOUTS if s[0] * s[1] * s[2] <= max(GPUS, 1)])
def test_parity_with_one_gpu(layout: tuple[int, int, int]) -> None:
    tp, pp, dp = layout
    want = run_distributed(train, 1, None, init_process_group=False, timeout=120)[0]
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    for got in run_distributed(train, tp * pp * dp, sizes, init_process_group=False, timeout=180):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-9)
        for name, parameter in want["parameters"].items():
            assert relative_error(got["parameters"][name], parameter) <= 1e-9


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_that_step_on_the_host(precision: str, stage: int) -> None:
    """As those that step on the device, but for what processors round otherwise; their state is not on the device."""
    world, close = min(GPUS, 2), {"64-true": 1e-9, "bf16-true": 1e-2, "16-mixed": 1e-3}[precision]
    run = {"zero_stage": stage, "bucket_size_mb": 0.002}
    want = run_distributed(train, world, run, precision, init_process_group=False, timeout=120)[0]
    offloaded = {**run, "offload_optimizer": True}
    for got in run_distributed(train, world, offloaded, precision, init_process_group=False, timeout=120):
        assert got["on device"] == 0
        assert got["offloaded"] > 0
        for name, parameter in want["parameters"].items():
            assert relative_error(got["parameters"][name], parameter) <= close
