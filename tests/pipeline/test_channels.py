"""Messages as NCCL handles them: two ranks that never talked wait for each other, and no group is bound to a device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.comm import Pending, ProcessCommunicator
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline import PipelineRunner
from lightning_3d.pipeline.training_schedule import TrainingSchedule
from lightning_3d.testing import preload, run_distributed
from tests.pipeline.test_parity import TOLERANCE, compare
from tests.pipeline.zoo import batch_of, build

preload("tests.pipeline.zoo", "lightning_3d.pipeline")


def _connects_like_nccl(communicator: ProcessCommunicator, meeting: ProcessCommunicator) -> None:
    """The first operation with a peer returns when the peer's first one with this rank has begun."""
    met: set[int] = set()

    def first(peer: int) -> None:
        if peer not in met:
            met.add(peer)
            sent = meeting.send_start(torch.zeros(1), peer)
            meeting.receive_start(torch.zeros(1), peer).wait()
            sent.wait()

    send, receive = communicator.send_start, communicator.receive_start

    def send_start(tensor: Tensor, peer: int) -> Pending:
        first(peer)
        return send(tensor, peer)

    def receive_start(tensor: Tensor, peer: int) -> Pending:
        first(peer)
        return receive(tensor, peer)

    communicator.send_start, communicator.receive_start = send_start, receive_start  # type: ignore[method-assign]


def _train(kinds: list[tuple[str, int]]) -> list[dict[str, Any]]:
    out = []
    for name, virtual in kinds:
        mesh = Mesh(Layout(pp=4), torch.device("cpu"))
        for communicator in (mesh.forward, mesh.backward):
            _connects_like_nccl(communicator, mesh._lines(["pp"], "meeting"))
        schedule = TrainingSchedule(name, 4, virtual)
        out.append(compare(mesh, "gpt", samples=8, microbatches=8, schedule=schedule))
    return out


def test_first_messages_do_not_wait_for_each_other() -> None:
    """Receives are posted before what their senders wait for is sent (hangs if stages do not meet before)."""
    for rank in run_distributed(_train, 4, [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)], timeout=60):
        for result in rank:
            assert result["gradient"] <= TOLERANCE


def _bound() -> dict[str, int]:
    world, new_group = dist.group.WORLD, dist.new_group
    assert world is not None
    device = torch.device("cuda", 0)
    asked: list[Any] = []

    def watched(ranks: list[int], **settings: Any) -> Any:
        asked.append(world.bound_device_id)
        return new_group(ranks, **settings)

    dist.new_group, world.bound_device_id = watched, device  # as Lightning binds it
    Mesh(Layout(pp=2), torch.device("cpu"))
    return {"groups": len(asked), "bound": sum(x is not None for x in asked), "world": world.bound_device_id == device}


def test_groups_are_not_bound_to_a_device() -> None:
    """Bound to one, NCCL runs all that a rank sends and receives in one order, and gloo groups fail."""
    for rank in run_distributed(_bound, 2, timeout=60):
        assert rank["groups"] >= 8
        assert rank["bound"] == 0
        assert rank["world"]


def _meetings() -> list[int]:
    mesh, batch = Mesh(Layout(pp=2), torch.device("cpu")), batch_of("mlp", 4)
    runner = PipelineRunner(build("mlp"), mesh, num_microbatches=2)
    runner.setup("training_step", batch)
    sent = []
    for _ in range(2):
        runner.train_step(batch, 0)
        sent.append(mesh.ledger.total("pp", "send", "meeting").calls)
    return sent


def test_stages_meet_once() -> None:
    """Each sends the other a number before the first batch, and nothing before the second."""
    assert run_distributed(_meetings, 2, timeout=60) == [[1, 1], [1, 1]]
