"""What the ranks of `test_hang.py` run: a pipeline of three stages in which something does not move."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.observe.hang import HangReport
from lightning_3d.pipeline import PipelineRunner


def _nothing() -> None:
    return None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.left, self.hang = -1, _nothing

    def begin(self, calls: int, hang: Callable[[], Any]) -> None:
        """Hang in the call after that many."""
        self.left, self.hang = calls, hang

    def forward(self, x: Tensor) -> Tensor:
        if self.left == 0:
            self.hang()
        self.left -= 1
        return torch.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()


def run(limit: float | None, seconds: float) -> tuple[list[tuple[float, str]], float]:
    """(reports this rank wrote, with the seconds since the hang began; seconds the step took)."""
    reports: list[tuple[float, str]] = []
    net, mesh, runner = _pipeline()
    report = _watched(mesh, runner, limit, lambda text: reports.append((time.monotonic() - begin, text)))
    dist.barrier()
    begin = time.monotonic()
    if mesh.is_last_stage:
        net.layers[5].begin(2, lambda: time.sleep(seconds))
    runner.train_step(torch.randn(8, 4), 1)
    took = time.monotonic() - begin
    if report is not None:
        report.stop()
    assert (threading.active_count() > 1) == (report is not None)
    return reports, took


def foreign_collective(folder: str) -> None:
    """The last stage calls a collective in a block, which the others never come to: ended when it was reported."""
    net, mesh, runner = _pipeline()
    file = Path(folder) / "report"
    _watched(mesh, runner, 1.0, lambda text: _publish(file, text))
    _end_with(file)
    if mesh.is_last_stage:
        net.layers[4].begin(1, lambda: dist.all_reduce(torch.zeros(1)))
    runner.train_step(torch.randn(8, 4), 1)


def deadlock(folder: str) -> None:
    """Two replicas, each in a collective of its own."""
    mesh = Mesh(Layout(dp=2), torch.device("cpu"))
    file = Path(folder) / "report"
    _watched(mesh, None, 1.0, lambda text: _publish(file, text))
    _end_with(file)
    (mesh.world if mesh.rank else mesh.data).all_reduce(torch.zeros(1))


def _pipeline() -> tuple[Any, Mesh, PipelineRunner]:
    mesh, net = Mesh(Layout(pp=3), torch.device("cpu")), Net()
    runner = PipelineRunner(net, mesh, num_microbatches=4)
    runner.setup("training_step", torch.randn(8, 4))
    runner.train_step(torch.randn(8, 4), 0)
    return net, mesh, runner


def _watched(
    mesh: Mesh, runner: PipelineRunner | None, limit: float | None, write: Callable[[str], None]
) -> HangReport | None:
    if limit is None:
        return None
    report = HangReport.on_default_group(mesh, limit)
    report._write = write
    report.follow(runner)
    report.start()
    return report


def _publish(file: Path, text: str) -> None:
    (file.parent / "new").write_text(text)
    (file.parent / "new").rename(file)


def _end_with(file: Path) -> None:
    def wait() -> None:
        while not file.exists():
            time.sleep(0.1)
        time.sleep(1.0)  # a second report would come by now
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
