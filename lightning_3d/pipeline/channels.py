"""HOW do values travel between stages?  Point-to-point messages without tags.

Both ends derive from the schedule which messages go from one stage to another, and in which order; that order is all
they need. Receives are posted before they are needed. Sends do not block; what was sent is kept until a message comes
back that its receiver can only have sent afterwards, and then let go (no waiting, no polling).
One communicator for messages to later stages and one for those to earlier stages: NCCL runs the operations of two ranks
on a communicator in order, so a receive that is posted ahead would hold up a send to the same rank. (In V-shaped and
interleaved schedules values and gradients both travel both ways.) Two ranks meet on a communicator before their first
message: the first receive of all on NCCL returns when its sender is there, too, and one that is posted ahead would wait
for a sender that waits for this rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_3d.comm import Communicator, Pending
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.routes import Message, Parcel, Routes

_Outgoing = list[tuple[Pending, Tensor]]


class _Incoming(NamedTuple):
    works: list[Pending]
    buffers: list[Tensor]


class Channels:
    """This stage's messages to and from the other stages at the same (dp, cp, tp).

    Args:
        mesh: Gives the communicators and this stage.
        on_wait: Called with the parcel before a receive may block, and with None when it is there.
    """

    def __init__(self, mesh: Mesh, on_wait: Callable[[Parcel | None], None] | None = None) -> None:
        self.mesh, self.on_wait = mesh, on_wait
        self.stage = mesh.at.pp
        self._to: dict[int, tuple[Communicator, int]] = {}
        self._from: dict[int, tuple[Communicator, int]] = {}
        for stage in set(range(mesh.layout.pp)) - {self.stage}:
            later = stage > self.stage
            self._to[stage] = (mesh.forward if later else mesh.backward, mesh.peer(stage))
            self._from[stage] = (mesh.backward if later else mesh.forward, mesh.peer(stage))
        self._arrived: dict[Message, _Incoming] = {}
        self._local: dict[Message, list[Tensor]] = {}
        self._sent: dict[int, deque[_Outgoing]] = {}
        self._let_go: dict[int, int] = {}
        self._acknowledged: Mapping[Message, int] = {}
        self._met: set[tuple[int, int]] = set()

    def knows(self, routes: Routes) -> bool:
        """Whether all who exchange messages have met: then `begin` does not communicate."""
        return routes.links <= self._met

    def begin(self, routes: Routes) -> None:
        """Start a batch with these messages.

        Collectives: a number (4 bytes) from every stage to every other one that it sends to for the first time.
        """
        assert not [*self._sent, *self._arrived], "the last batch did not end"
        self._acknowledged = routes.acknowledged
        with self.mesh.ledger.during("meeting"):
            for source, target in sorted(routes.links - self._met):  # in one order on all stages
                if source != target and self.stage in (source, target):
                    self._meet(source, target)
        self._met |= routes.links

    def _meet(self, source: int, target: int) -> None:
        number = torch.zeros(1, device=self.mesh.device)
        if source == self.stage:
            communicator, peer = self._to[target]
            communicator.send_start(number, peer).wait()
        else:
            communicator, peer = self._from[source]
            communicator.receive_start(number, peer).wait()

    def send(self, parcel: Parcel, tensors: list[Tensor]) -> None:
        """Start sending."""
        target = parcel.stage
        if target == self.stage:
            self._local[parcel.message] = [x.detach().clone() for x in tensors]
            return
        communicator, peer = self._to[target]
        outgoing: _Outgoing = []
        for x in tensors:
            if x.numel():
                piece = x.detach().contiguous()
                outgoing.append((communicator.send_start(piece, peer), piece))
        self._sent.setdefault(target, deque()).append(outgoing)

    def post(self, parcels: Sequence[Parcel]) -> None:
        """Start receiving these messages, each source's in the order it sends them."""
        device = self.mesh.device
        for message, source, _, metas in parcels:
            communicator, peer = self._from[source]
            incoming = self._arrived[message] = _Incoming([], [])
            for meta in metas:
                buffer = torch.empty(meta.wire, dtype=meta.dtype, device=device)
                incoming.buffers.append(buffer)
                if buffer.numel():
                    incoming.works.append(communicator.receive_start(buffer, peer))

    def arrived(self, parcels: Sequence[Parcel]) -> bool:
        """Whether nothing would have to be waited for."""
        for parcel in parcels:
            for work in self._arrived[parcel.message].works if parcel.stage != self.stage else ():
                if not work.is_completed():
                    return False
        return True

    def receive(self, parcel: Parcel) -> list[Tensor]:
        """The tensors of a message that was posted.

        Raises:
            RuntimeError: The process group's timeout passed.
        """
        message, source = parcel.message, parcel.stage
        if source == self.stage:
            return self._local.pop(message)
        incoming = self._arrived.pop(message)
        if self.on_wait is not None:
            self.on_wait(parcel)
        for work in incoming.works:
            work.wait()
        if self.on_wait is not None:
            self.on_wait(None)
        self._release(source, self._acknowledged.get(message, 0))
        return incoming.buffers

    def end(self) -> None:
        """Wait until everything has been sent."""
        for target in self._sent:
            self._release(target)
        self._sent.clear()
        self._let_go.clear()
        left = [*self._arrived, *self._local]
        assert not left, f"messages nobody took: {left}"

    def abandon(self) -> None:
        """Forget everything after an error; the process group cannot be used for messages any more."""
        self._arrived.clear()
        self._local.clear()
        self._sent.clear()
        self._let_go.clear()

    @property
    def kept_bytes(self) -> int:
        """Memory of what was sent and is not let go yet."""
        return sum(x.nbytes for sent in self._sent.values() for outgoing in sent for _, x in outgoing)

    def _release(self, target_stage: int, upto: int | None = None) -> None:
        """Let go of the first `upto` messages sent to a stage (all)."""
        sent = self._sent.get(target_stage, deque())
        while sent and (upto is None or self._let_go.get(target_stage, 0) < upto):
            for work, _ in sent.popleft():
                work.wait()
            self._let_go[target_stage] = self._let_go.get(target_stage, 0) + 1
