"""Communicators: what each operation gives, what the ledger counts, and the axis of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_3d.comm import Communicator, Ledger, PendingShard
from lightning_3d.layout import Layout
from lightning_3d.mesh import Coordinate, Mesh, coordinate_of, coordinates, rank_of
from lightning_3d.testing import DistributedError, relative_error, run_distributed


def everything() -> dict[str, Any]:
    mesh = Mesh(Layout.parse("tp2-pp2-dp2"), torch.device("cpu"))
    r = float(mesh.rank)
    out: dict[str, Any] = {"at": mesh.at, "sizes": (mesh.tensor.size, mesh.pipeline.size, mesh.data.size)}
    ledger = mesh.ledger
    ledger.reset()
    with ledger.during("test"):
        out["sum"] = mesh.tensor.all_reduce(torch.tensor([r]))
        out["max"] = mesh.data.all_reduce(torch.tensor([r]), "max")
        out["gather"] = mesh.tensor.all_gather(torch.tensor([r, r]))
        shard = torch.tensor([r])
        full = torch.empty(2)
        mesh.data.all_gather_start(full, shard).wait()
        out["flat"] = full
        target = torch.ones(2)
        mesh.data.reduce_scatter_start(torch.arange(4.0) + r).finish(target, add=True)
        out["scatter"] = target
        parts = [torch.full((1 + s,), 10.0 * r + s) for s in range(mesh.data.size)]
        out["exchange"] = mesh.data.all_to_all(parts, [1 + mesh.data.rank] * mesh.data.size)
        out["chunk"] = mesh.tensor.reduce_scatter(torch.full((2, 4), r), 1)
        out["leader"] = mesh.replica.broadcast(torch.tensor([r]), 0)
        out["object"] = mesh.replica.broadcast_object({"rank": mesh.rank}, 0)
        out["objects"] = mesh.pipeline.all_gather_object([mesh.rank] * (mesh.at.pp + 1))
        peer = mesh.peer(1 - mesh.at.pp)
        message = torch.empty(1)
        pending = [mesh.forward.send_start(torch.tensor([r]), peer), mesh.forward.receive_start(message, peer)]
        for p in pending:
            p.wait()
        out["message"] = message
        mesh.world.barrier()
    out["holders"] = mesh.holders((0, 1)).all_reduce(torch.tensor([r]))
    out["alone"] = mesh.holders((0,)).size
    out["reduce"] = vars(ledger.total("tp", "all_reduce", "test"))
    out["send"] = vars(ledger.total("pp", "send", "test"))
    out["mesh"] = (tuple(mesh.device_mesh.mesh.shape), mesh.device_mesh.get_coordinate())
    return out


def test_every_operation_on_a_mesh() -> None:
    ranks = run_distributed(everything, 8)
    for rank, got in enumerate(ranks):
        tp_peer, pp_peer, dp_peer = rank ^ 1, rank ^ 2, rank ^ 4
        lead = rank - rank % 4
        assert got["at"] == coordinate_of(Layout.parse("tp2-pp2-dp2"), rank)
        assert got["sum"].tolist() == [rank + tp_peer]
        assert got["max"].tolist() == [max(rank, dp_peer)]
        assert [t.tolist() for t in got["gather"]] == [[float(x)] * 2 for x in sorted((rank, tp_peer))]
        assert got["flat"].tolist() == sorted((rank, dp_peer))
        low = 0 if rank < dp_peer else 2
        assert got["scatter"].tolist() == [1 + 2 * i + rank + dp_peer for i in (low, low + 1)]
        mine = int(rank > dp_peer)
        assert [t.tolist() for t in got["exchange"]] == [
            [10.0 * r + mine] * (1 + mine) for r in sorted((rank, dp_peer))
        ]
        assert got["chunk"].tolist() == [[rank + tp_peer] * 2] * 2
        assert got["leader"].tolist() == [lead]
        assert got["object"] == {"rank": lead}
        assert got["objects"] == [[min(rank, pp_peer)] * 2, [max(rank, pp_peer)]]
        assert got["message"].tolist() == [pp_peer]
        assert got["holders"].tolist() == [rank + pp_peer]
        assert got["alone"] == 1
        assert got["reduce"] == {"calls": 1, "elements": 1, "payload": 4, "wire": 4.0}
        assert got["send"] == {"calls": 1, "elements": 1, "payload": 4, "wire": 4.0}
        assert got["mesh"][0] == (2, 2, 1, 2)


def test_an_axis_of_one_rank_is_the_identity() -> None:
    axis, x = Communicator("tp"), torch.arange(4.0)
    out = torch.zeros(4)
    assert axis.all_reduce(x) is x
    assert axis.all_gather(x) == [x]
    assert axis.reduce_scatter(x, 0) is x
    axis.all_gather_start(out, x).wait()
    assert torch.equal(out, x)
    pending: PendingShard = axis.reduce_scatter_start(x)
    pending.finish(out, add=True)
    assert torch.equal(out, 2 * x)
    assert axis.broadcast_object("a", 0) == "a"
    assert axis.ledger.total().calls == 0


def test_ledger_phases_nest() -> None:
    ledger = Ledger()
    with ledger.during("forward"):
        ledger.record("tp", "all_gather", 4, torch.zeros(8))
        with ledger.during("backward"):
            ledger.record("tp", "all_reduce", 4, torch.zeros(2, dtype=torch.float64))
    assert ledger.phase == "other"
    assert ledger.total(phase="forward").wire == 32 * 3 / 4
    assert ledger.total(op="all_reduce").wire == 16 * 2 * 3 / 4
    assert ledger.total("tp").elements == 10


@pytest.mark.parametrize("text", ["tp2-pp2-dp2", "tp1-pp4-dp3", "tp4-pp3-dp2-cp2"])
def test_ranks_and_coordinates(text: str) -> None:
    layout = Layout.parse(text)
    found = [rank_of(layout, at) for at in coordinates(layout)]
    assert sorted(found) == list(range(layout.world_size))
    assert all(coordinate_of(layout, rank_of(layout, at)) == at for at in coordinates(layout))
    # tensor-parallel peers are neighbours, and global rank 0 is on the last stage
    assert coordinate_of(layout, 0) == Coordinate(0, layout.pp - 1, 0, 0)
    assert coordinate_of(layout, 1).tp == (1 if layout.tp > 1 else 0)


def fail_on_one(kind: str) -> int:
    import time

    import torch.distributed as dist

    if dist.get_rank() == 1:
        if kind == "raise":
            raise ValueError("the culprit")
        time.sleep(60)
    return 1


def test_the_harness_reports_errors_and_hangs() -> None:
    with pytest.raises(DistributedError, match="the culprit"):
        run_distributed(fail_on_one, 2, "raise", timeout=20)
    with pytest.raises(DistributedError, match="in fail_on_one"):
        run_distributed(fail_on_one, 2, "hang", timeout=4)


def test_relative_error() -> None:
    one = torch.ones(2)
    assert relative_error(None, None) == 0.0
    assert relative_error(None, one) == 1.0
    assert relative_error(one, torch.ones(3)) == float("inf")
    assert relative_error(one * 2, one) == 1.0
    assert not relative_error(one * float("nan"), one) <= 1e9
