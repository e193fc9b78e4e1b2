"""Optimizers that step in the host's memory: bit-equal to those that step where the model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_3d.errors import ConfigurationError
from lightning_3d.testing import DistributedError, preload
from lightning_3d.zero import check_offload
from lightning_3d.zero.offload import HostCopy, check_steps_on_host, fingerprint, follow
from tests.strategy import offloads, precisions
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.strategy.precisions", "tests.strategy.offloads")

CLIPPED = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


def check(world: int, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    results = launch(offloads.differences, world, cases)
    for case, (count, wrong, on_device) in zip(cases, results[0], strict=True):
        assert count > 50, case
        assert wrong == [], case
        assert on_device == 0, case


def test_bit_equal_without_replicas() -> None:
    check(1, [("adamw", sizes(), CLIPPED), ("fused", sizes(), {}), ("adafactor", sizes(), BY_VALUE)])


def test_bit_equal_with_every_stage() -> None:
    check(2, [("adamw", sizes(zero_stage=stage), CLIPPED) for stage in range(4)] + [("sgd", sizes(), BY_VALUE)])


def test_bit_equal_with_tensor_and_pipeline_parallelism() -> None:
    check(2, [("adamw", sizes(2), CLIPPED), ("adamw", sizes(1, 2, num_microbatches=4), CLIPPED)])
    check(4, [("adamw", sizes(1, 2, num_microbatches=2, zero_stage=3), CLIPPED)])


@pytest.mark.parametrize("directory", [True, False], ids=["directory", "file"])
def test_checkpoints_do_not_know_of_it(directory: bool, tmp_path: Path) -> None:
    """Saved with it and resumed without, and the other way round, in another stage."""
    how = {"save_distributed_checkpoint": directory}
    runs = [sizes(zero_stage=1, offload_optimizer=True, **how), sizes(zero_stage=3, **how)]
    for index, (before, after) in enumerate((runs, runs[::-1])):
        count, wrong = launch(offloads.resumed, 2, f"{tmp_path}/{index}", before, after)[0]
        assert count > 50
        assert wrong == []


def test_masters_on_the_host() -> None:
    """Of bfloat16 parameters, bit by bit; also with gradients in float32, and what a step writes into parameters."""
    cases = [(sizes(zero_stage=s, float32_gradients=f), 3 if f else 1) for s, f in ((0, True), (1, False), (3, True))]
    for rank in launch(offloads.masters, 2, cases):
        assert rank == [(0.0, 0.0)] * len(cases)
    for rank in launch(precisions.edited, 2, [0, 1, 3], True):
        for weight, bias in rank:
            assert 0 < weight < 0.05
            assert 0 < bias < 0.05


def test_what_is_refused() -> None:
    with pytest.raises(DistributedError, match=r"LBFGS .*offload_optimizer=False"):
        launch(offloads.coupled, 1)
    parameter, cuda = nn.Parameter(torch.ones(2)), torch.device("cuda")
    with pytest.raises(ConfigurationError, match="capturable"):
        check_steps_on_host(torch.optim.Adam([parameter], capturable=True), {cuda})
    sgd = torch.optim.SGD([parameter], lr=0.1)
    sgd.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    with pytest.raises(ConfigurationError, match="lr of SGD is a tensor on meta"):
        check_steps_on_host(sgd, {cuda})
    with pytest.raises(ConfigurationError, match="bf16-mixed"):
        check_offload([torch.optim.Adam([parameter], fused=True)], cuda, torch.amp.GradScaler("cpu"))
    check_offload([torch.optim.Adam([parameter])], cuda, torch.amp.GradScaler("cpu"))
    with pytest.warns(UserWarning, match="saves nothing on the CPU"):
        check_offload([torch.optim.Adam([parameter])], torch.device("cpu"), None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_a_change_on_the_device_is_seen(dtype: torch.dtype) -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = fingerprint(values)
    changes = [values.clone() for _ in range(5)]
    changes[0][2999] *= 1.01
    changes[1].neg_()
    changes[2] = values.flip(0)
    changes[3][[1, 2]] = values[[2, 1]]
    changes[4].mul_(2)
    marks = [int(fingerprint(changed)) for changed in [values.clone(), *changes]]
    assert marks[0] == int(before)
    assert len(set(marks)) == 6


def test_elements_that_were_not_changed_keep_their_precision() -> None:
    shard = torch.ones(8, dtype=torch.bfloat16)
    copy = HostCopy(shard, torch.float32)
    copy.values.add_(1e-3)
    copy.send()
    follow([copy])
    assert torch.equal(copy.values, torch.full((8,), 1.001))
    shard[3] = 2.0
    follow([copy])
    assert copy.values[3] == 2.0
    assert torch.equal(copy.values[:3], torch.full((3,), 1.001))
