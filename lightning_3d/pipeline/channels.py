"""HOW do values travel between stages?  Point-to-point messages without tags.

Both ends derive from the schedule which messages go from one stage to another, and in which order; that order is all
they need. Receives are posted before they are needed, sends do not block and are kept alive until they are done.
One communicator per direction: NCCL runs the operations of a communicator in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_3d.comm import Communicator, Pending
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.events import TensorMeta

_GRADIENTS_IN_FLIGHT = 2


class Message(NamedTuple):
    """Values (`F`) or their gradients (`G`) of one microbatch, from one window to another."""

    kind: str
    microbatch: int
    source: int
    target: int

    def __str__(self) -> str:
        what = "values" if self.kind == "F" else "gradients"
        return f"{what} of microbatch {self.microbatch} from window {self.source} to window {self.target}"


class _Incoming(NamedTuple):
    works: list[Pending]
    buffers: list[Tensor]


class Channels:
    """This stage's messages to and from the other stages at the same (dp, cp, tp).

    Args:
        mesh: Gives the communicators and this stage.
        on_wait: Called with a description before a receive may block.
    """

    def __init__(self, mesh: Mesh, on_wait: Callable[[str], None] | None = None) -> None:
        self.mesh, self.on_wait = mesh, on_wait
        self.stage = mesh.at.pp
        self._expected: dict[int, deque[Message]] = {}
        self._metas: Callable[[Message], list[TensorMeta]] = lambda _: []
        self._arrived: dict[Message, _Incoming] = {}
        self._local: dict[Message, list[Tensor]] = {}
        self._sent: dict[Message, list[tuple[Pending, Tensor]]] = {}
        self._gradients: dict[int, deque[Message]] = {}

    def begin(self, expected: Mapping[int, Sequence[Message]], metas: Callable[[Message], list[TensorMeta]]) -> None:
        """Start a step.

        Args:
            expected: Source stage -> its messages to this stage, in the order it sends them.
            metas: What the tensors of a message look like.
        """
        assert not [*self._sent, *self._arrived], "the last step did not end"
        self._expected = {source: deque(messages) for source, messages in expected.items()}
        self._metas = metas

    def send(self, message: Message, target_stage: int, tensors: list[Tensor]) -> None:
        """Start sending; `settle` or `end` waits until it is done."""
        if target_stage == self.stage:
            self._local[message] = [x.detach().clone() for x in tensors]
            return
        communicator, peer = self._way(self.stage, target_stage), self.mesh.peer(target_stage)
        pieces = [x.detach().contiguous() for x in tensors if x.numel()]
        self._sent[message] = [(communicator.send_start(x, peer), x) for x in pieces]
        if message.kind == "G":
            in_flight = self._gradients.setdefault(target_stage, deque())
            in_flight.append(message)
            if len(in_flight) > _GRADIENTS_IN_FLIGHT:
                self._finish(in_flight.popleft())

    def prepare(self, message: Message, source_stage: int) -> None:
        """Post the receives up to and with `message`, in the order the source sends."""
        expected = self._expected.get(source_stage, deque())
        if source_stage == self.stage or message in self._arrived or message not in expected:
            return
        communicator, peer = self._way(source_stage, self.stage), self.mesh.peer(source_stage)
        while message not in self._arrived:
            following = expected.popleft()
            buffers = [torch.empty(m.wire, dtype=m.dtype, device=self.mesh.device) for m in self._metas(following)]
            works = [communicator.receive_start(x, peer) for x in buffers if x.numel()]
            self._arrived[following] = _Incoming(works, buffers)

    def receive(self, message: Message, source_stage: int) -> list[Tensor]:
        """The tensors of a message.

        Raises:
            RuntimeError: The process group's timeout passed.
        """
        if source_stage == self.stage:
            return self._local.pop(message)
        self.prepare(message, source_stage)
        incoming = self._arrived.pop(message)
        if self.on_wait is not None:
            self.on_wait(f"stage {self.stage} waits for the {message} (stage {source_stage})")
        for work in incoming.works:
            work.wait()
        return incoming.buffers

    def settle(self, microbatch: int, window: int) -> None:
        """Let go of the values a window sent for a microbatch whose gradients have come back."""
        for message in [m for m in self._sent if m[:3] == ("F", microbatch, window)]:
            self._finish(message)

    def end(self) -> None:
        """Wait until everything has been sent."""
        for message in list(self._sent):
            self._finish(message)
        self._gradients.clear()
        left = [*self._arrived, *self._local, *(m for messages in self._expected.values() for m in messages)]
        assert not left, f"messages nobody took: {left}"

    def abandon(self) -> None:
        """Forget everything after an error; the process group cannot be used for messages any more."""
        self._expected.clear()
        self._arrived.clear()
        self._local.clear()
        self._sent.clear()
        self._gradients.clear()

    def _finish(self, message: Message) -> None:
        for work, _ in self._sent.pop(message, ()):
            work.wait()

    def _way(self, source: int, target: int) -> Communicator:
        return self.mesh.forward if source < target else self.mesh.backward
