"""WHICH messages does a batch need, in which order?  Derived from cut and schedule, once for many batches."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_3d.pipeline.events import TensorMeta, Vid
from lightning_3d.pipeline.partition import Partition
from lightning_3d.pipeline.schedule import Action

AHEAD_BYTES = 4 * 2**20
"""Memory for receives that are posted long before they are needed."""


class Message(NamedTuple):
    """Values (`F`) or their gradients (`G`) of one microbatch, from one window to another."""

    kind: str
    microbatch: int
    source: int
    target: int

    def __str__(self) -> str:
        what = "values" if self.kind == "F" else "gradients"
        return f"{what} of microbatch {self.microbatch} from window {self.source} to window {self.target}"


class Parcel(NamedTuple):
    """A message, the stage at the other end, and the values it carries."""

    message: Message
    stage: int
    vids: list[Vid]
    metas: list[TensorMeta]


@dataclass
class Routes:
    """All messages of one stage in one batch.

    Args:
        partitions: How every microbatch is cut.
        lists: Every stage's actions.
        stage: This stage.

    Attributes:
        needs: Action of this stage -> what it waits for.
        sends: Action of this stage -> what it sends afterwards.
        expected: Source stage -> its messages to this stage, in the order it sends them.
        posts: The messages to this stage in the order in which their receives are posted.
        due: Per action of this stage, how many of them are posted before it begins: those of the action and of the one
            after it, and what their sources send before them.
        ahead: The same, when the stage has to wait anyway: also those of the action after that, and as many more as
            are small (`AHEAD_BYTES`): a receive that is posted when its message is there costs time nobody has.
        acknowledged: Message to this stage -> how many messages of this stage its sender has received before.
        links: All (sending stage, receiving stage) of the batch, other stages' too.
    """

    partitions: Sequence[Partition]
    lists: Sequence[Sequence[Action]]
    stage: int
    needs: dict[Action, list[Parcel]] = field(default_factory=dict)
    sends: dict[Action, list[Parcel]] = field(default_factory=dict)
    expected: dict[int, list[Parcel]] = field(default_factory=dict)
    posts: list[Parcel] = field(default_factory=list)
    due: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    acknowledged: dict[Message, int] = field(default_factory=dict)
    links: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for action in self.lists[self.stage]:
            self.needs[action], self.sends[action] = self._needs(action), self._sends(action)
            self.links |= {(self.stage, parcel.stage) for parcel in self.sends[action]}
        for stage, actions in enumerate(self.lists):
            if stage != self.stage:
                self._from(stage, actions)
        self._post(self.lists[self.stage])

    def _post(self, mine: Sequence[Action]) -> None:
        """When which receive is posted."""
        waiting = {source: deque(parcels) for source, parcels in self.expected.items()}
        posted: set[Message] = set()
        after = []  # posts up to and with those of each action
        for action in mine:
            for parcel in self.needs[action]:
                while parcel.stage != self.stage and parcel.message not in posted:
                    first = waiting[parcel.stage].popleft()
                    posted.add(first.message)
                    self.posts.append(first)
            after.append(len(self.posts))
        self.due = [*after[1:], *after[-1:]]
        small = self._small()
        self.ahead = [max(then, small[due]) for due, then in zip(self.due, [*self.due[1:], *after[-1:]], strict=True)]
        left = [parcel.message for parcels in waiting.values() for parcel in parcels]
        assert not left, f"messages nobody takes: {left}"

    def _small(self) -> list[int]:
        """Per number of posted receives, up to where the next ones fit into `AHEAD_BYTES`."""
        sums = [0, *itertools.accumulate(sum(meta.nbytes for meta in parcel.metas) for parcel in self.posts)]
        return [bisect.bisect_right(sums, before + AHEAD_BYTES) - 1 for before in sums]

    def _from(self, stage: int, actions: Sequence[Action]) -> None:
        """What another stage sends here, and what it has received from here by then."""
        received, mine = 0, self.expected.setdefault(stage, [])
        for action in actions:
            received += sum(parcel.stage == self.stage for parcel in self._needs(action))
            for parcel in self._sends(action):
                self.links.add((stage, parcel.stage))
                if parcel.stage == self.stage:
                    mine.append(parcel._replace(stage=stage))
                    self.acknowledged[parcel.message] = received

    def _needs(self, action: Action) -> list[Parcel]:
        kind, i, w = action
        partition = self.partitions[i]
        if kind == "F":
            pairs = [(owner, partition.receives[w][owner]) for owner in partition.receives[w]]
            return [self._parcel(partition, Message("F", i, owner, w), owner, vids) for owner, vids in pairs]
        if kind == "W":
            return []
        back = [(target, differentiable(partition, vids)) for target, vids in sorted(partition.sends(w).items())]
        return [self._parcel(partition, Message("G", i, t, w), t, vids) for t, vids in back if vids]

    def _sends(self, action: Action) -> list[Parcel]:
        kind, i, w = action
        partition = self.partitions[i]
        if kind == "F":
            pairs = sorted(partition.sends(w).items())
            return [self._parcel(partition, Message("F", i, w, target), target, vids) for target, vids in pairs]
        if kind == "W":
            return []
        back = [(owner, differentiable(partition, vids)) for owner, vids in partition.receives[w].items()]
        return [self._parcel(partition, Message("G", i, w, owner), owner, vids) for owner, vids in back if vids]

    @staticmethod
    def _parcel(partition: Partition, message: Message, other: int, vids: list[Vid]) -> Parcel:
        metas = [partition.trace.meta[vid] for vid in vids]
        return Parcel(message, partition.windows[other].stage, vids, metas)


def differentiable(partition: Partition, vids: Sequence[Vid]) -> list[Vid]:
    """Those values of a message whose gradients travel back."""
    return [vid for vid in vids if partition.trace.meta[vid].requires_grad]
