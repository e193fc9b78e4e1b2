"""WHICH order comes out if every rank always does the most urgent thing it can?  List scheduling with bounded memory.

All actions are played through in time, as if every kind of action took equally long in every window. Whenever a rank
is free, it starts, of what is ready, the first of: a forward (of the window farthest down the chain), the backward of
the window that is nearest to the chain's start, a deferred weight gradient. Forwards go first because what limits them
is memory: `caps` says how many microbatches a window may hold.

With split backwards a second order is tried: weight gradients before backwards, as long as the rank has forwards left.
Then a backward is not started the moment its gradient comes, so nobody waits if that comes late. (ZB-V on four ranks,
32 microbatches: if F, I and W last 1, 1.2 and 0.8, 1.8 % stands idle in place of 6.1; if messages take a tenth of a
unit, 2.3 % in place of 4.1.) It is taken unless it is longer, as with few microbatches, where every gap counts.

It cannot get stuck, whatever the chain: windows take microbatches in order, so the oldest unfinished one finds all
microbatches before it gone from wherever it goes next, and a cap of at least one lets it in (if only missing weight
gradients stand in its way, the rank runs those).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lightning_3d.pipeline.action import Action, Kind, Lists

# Forwards a hair shorter than their equals: this leaves a little slack where actions would be ready at the same moment.
_SECONDS: dict[str, int] = {"F": 19, "B": 40, "I": 20, "W": 20}


def greedy_lists(
    owners: Sequence[int], stages: int, microbatches: int, caps: Sequence[int], *, split_backward: bool
) -> Lists:
    """The order of actions of every rank, found by playing the step through.

    Args:
        owners: For each window of the chain, its rank.
        stages: Number of ranks.
        microbatches: Number of microbatches.
        caps: Per window, at least 1: the largest number of microbatches whose forward has begun and whose backward
            (with `split_backward`: whose gradient of the inputs) has not.
        split_backward: Whether backwards are split. Then microbatches whose `W` is missing count too, but only against
            one limit for all ranks: the largest sum of the caps of one rank's windows.
    """
    orders = (True, False) if split_backward else (False,)  # of equally long ones the first
    plays = [_Play(owners, stages, microbatches, caps, split_backward, late) for late in orders]
    best = min(plays, key=_Play.run)
    return tuple(tuple(actions) for actions in best.lists)


class _Play:
    """The state of the played step. As windows take microbatches in order, everything done is a number per window."""

    def __init__(
        self, owners: Sequence[int], stages: int, microbatches: int, caps: Sequence[int], split: bool, late: bool
    ) -> None:
        """`late`: weight gradients before backwards, as long as there are forwards."""
        windows = len(owners)
        self.owners, self.microbatches, self.caps, self.split, self.late = owners, microbatches, caps, split, late
        self.mine = [[w for w in range(windows) if owners[w] == rank] for rank in range(stages)]
        self.backward: Kind = "I" if split else "B"
        self.limit = max((sum(caps[w] for w in own) for own in self.mine), default=0)
        self.begun: dict[Kind, list[int]] = {kind: [0] * windows for kind in ("F", self.backward, "W")}
        self.done: dict[Kind, list[int]] = {kind: [0] * windows for kind in ("F", self.backward, "W")}
        self.live = [0] * stages
        self.lists: list[list[Action]] = [[] for _ in range(stages)]

    def run(self) -> int:
        """Play until all is done; how long it took."""
        now, running = 0, [False] * len(self.mine)
        ends: list[tuple[int, int, Action]] = []
        look = set(range(len(self.mine)))  # ranks for which something may have become possible
        while look:
            for rank in sorted(look):
                if not running[rank] and (action := self._next(rank)) is not None:
                    self._begin(rank, action)
                    running[rank] = True
                    heapq.heappush(ends, (now + _SECONDS[action.kind], rank, action))
            look = set()
            now = ends[0][0] if ends else now
            while ends and ends[0][0] == now:
                _, rank, action = heapq.heappop(ends)
                running[rank] = False
                self.done[action.kind][action.stage] += 1
                look |= {rank, *self._waiting_for(action)}
        assert sum(map(len, self.lists)) == self.microbatches * len(self.owners) * (3 if self.split else 2)
        return now

    def _next(self, rank: int) -> Action | None:
        """The most urgent action that this rank can start now."""
        for w in reversed(self.mine[rank]):
            if self._forward_is_ready(rank, w):
                return Action("F", self.begun["F"][w], w)
        backward, weights = self._next_backward(rank), self._next_weights(rank)
        if self.late and any(self.begun["F"][w] < self.microbatches for w in self.mine[rank]):
            return weights or backward
        return backward or weights

    def _next_backward(self, rank: int) -> Action | None:
        for w in self.mine[rank]:
            i = self.begun[self.backward][w]
            if i < self.done["F"][w] and (w == len(self.owners) - 1 or i < self.done[self.backward][w + 1]):
                return Action(self.backward, i, w)
        return None

    def _next_weights(self, rank: int) -> Action | None:
        for w in self.mine[rank] if self.split else ():
            if self.begun["W"][w] < self.done["I"][w]:
                return Action("W", self.begun["W"][w], w)
        return None

    def _forward_is_ready(self, rank: int, w: int) -> bool:
        i = self.begun["F"][w]
        if i >= (self.done["F"][w - 1] if w else self.microbatches):
            return False
        return i - self.begun[self.backward][w] < self.caps[w] and self.live[rank] < self.limit

    def _begin(self, rank: int, action: Action) -> None:
        self.begun[action.kind][action.stage] += 1
        self.lists[rank].append(action)
        if action.kind == "F":
            self.live[rank] += 1
        elif action.kind in ("B", "W"):
            self.live[rank] -= 1

    def _waiting_for(self, action: Action) -> list[int]:
        """The rank that may be able to go on because this action is done."""
        towards = {"F": 1, self.backward: -1}.get(action.kind, 0)
        other = action.stage + towards
        return [self.owners[other]] if towards and 0 <= other < len(self.owners) else []
