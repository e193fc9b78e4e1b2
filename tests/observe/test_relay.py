"""What the last stage knows reaches all ranks of its replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric

from lightning_3d.comm import ProcessCommunicator
from lightning_3d.observe.relay import LogCall, Relay, collapse
from lightning_3d.testing import run_distributed

CPU = torch.device("cpu")


def call(values: list[float], weights: list[float], **options: Any) -> LogCall:
    return LogCall("x", [torch.tensor(v, dtype=torch.float64) for v in values], weights, options)


@pytest.mark.parametrize(
    ("reduce", "value"),
    [("mean", 2.5), (torch.mean, 2.5), ("sum", 4.0), ("max", 3.0), ("min", 1.0), (lambda v: v.prod(), 3.0)],
)
def test_one_value_for_a_step(reduce: Any, value: float) -> None:
    assert float(collapse(call([1.0, 3.0], [1.0, 3.0], reduce_fx=reduce), CPU)) == value


def share() -> list[Any]:
    axis = ProcessCommunicator("replica", dist.group.WORLD, CPU)
    relay = Relay(axis, axis, CPU)
    module = nn.Module()
    module.metric = MeanMetric()
    out: list[Any] = []
    lead = dist.get_rank() == 0
    for step in range(3):
        calls = [
            LogCall("loss", [torch.tensor(1.5, dtype=torch.float32)], [1.0], {"prog_bar": True}),
            LogCall("count", [3 + step], [1.0], {"reduce_fx": "sum", "batch_size": 8}),
            LogCall("metric", [module.metric], [1.0], {"on_epoch": True}),
        ]
        outputs = {"y": torch.arange(3), "text": "a"} if step == 1 else None
        loss = torch.tensor(0.25 + step, dtype=torch.float32)
        got = relay.share(loss, calls, outputs, module) if lead else relay.share(None, [], None, module)
        logs = [(n, "metric" if v is module.metric else (float(v), v.dtype), o) for n, v, o in got.logs]
        out.append((float(got.loss), got.loss.dtype, logs, got.outputs))
    out.append(axis.ledger.total(op="broadcast").calls)
    return out


def test_loss_logs_metrics_and_outputs_are_shared() -> None:
    leader, other = run_distributed(share, 2)
    assert repr(leader) == repr(other)
    assert leader[1][0] == 1.25
    assert leader[1][1] is torch.float32
    names = [name for name, _, _ in leader[1][2]]
    assert names == ["loss", "count", "metric"]
    assert leader[2][2][1][1][0] == 5.0
    assert leader[2][2][2][1] == "metric"
    assert leader[1][3]["y"].tolist() == [0, 1, 2]
    assert leader[0][3] is None
    # flags and values every step; the names once (2 calls: length, content), the outputs once
    assert leader[3] == 3 * 2 + 2 + 2
