"""IS a schedule complete and free of deadlock?  How many microbatches are live at once?  (no torch here)

The lists are walked twice. `_Books` reads every rank's list on its own: nothing twice, nothing foreign, every window on
one rank, forward before backward. `_walk` then runs all lists against each other. Both are linear in the number of
actions, so that thousands of schedules can be proved in a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline.action import Action, Kind

Lists = Sequence[Sequence[Action]]

_BIT: dict[str, int] = {"F": 1, "B": 2, "I": 4, "W": 8}
_BEFORE: dict[str, int] = {"F": 0, "B": 1, "I": 1, "W": 1 | 4}  # what has run, exactly, when this kind may run
_WHOLE, _SPLIT = 1 | 2, 1 | 4 | 8
_LIVE: dict[str, int] = {"F": 1, "B": -1, "I": 0, "W": -1}


class ScheduleError(ConfigurationError):
    """A list of actions cannot be run.

    Attributes:
        action: The action that is wrong, missing, or waits for ever.
        rank: In whose list; for a missing action, the list it belongs in, or None if nobody knows.
        index: Its position in this list; None if it is missing.
    """

    def __init__(self, message: str, action: Action, rank: int | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.action, self.rank, self.index = action, rank, index


@dataclass(frozen=True)
class Report:
    """What `check` proved.

    Attributes:
        peak_live: Per rank, the largest number of forwards (a window of a microbatch each) whose `B`, or `W` if the
            backward is split, has not run yet: activation memory.
        order: One order of all actions that respects every dependency.
        owners: Per window, the rank that runs it.
    """

    peak_live: tuple[int, ...]
    order: tuple[Action, ...]
    owners: tuple[int, ...]


def check(lists: Lists, windows: int, microbatches: int, *, backward: bool = True) -> Report:
    """Walk the ranks' lists against the data dependencies of a chain of windows.

    Dependencies: F(i, w) needs F(i, w-1). B(i, w) and I(i, w) need F(i, w) and B or I(i, w+1). W(i, w) needs I(i, w).
    Every window of every microbatch has one F, and either B or both I and W. A rank runs its list strictly in order;
    sends do not block. Messages that skip windows need nothing more than the chain.

    Args:
        lists: One list of actions per rank.
        windows: Number of windows in the chain; each belongs to exactly one rank.
        microbatches: Number of microbatches.
        backward: Whether every forward must have its backward (False: evaluation).

    Raises:
        ScheduleError: An action is missing, double, foreign or too early, or the lists wait for each other for ever.
    """
    books = _Books(lists, windows, microbatches, backward)
    peaks = [books.read(rank, actions) for rank, actions in enumerate(lists)]
    books.close()
    return Report(tuple(peaks), tuple(_walk(lists, windows, microbatches)), tuple(books.owners))


class _Books:
    """What has been run of every window of every microbatch, as the lists are read one after the other."""

    def __init__(self, lists: Lists, windows: int, microbatches: int, backward: bool) -> None:
        self.lists, self.windows, self.microbatches, self.backward = lists, windows, microbatches, backward
        self.ran = bytearray(windows * microbatches)  # at i * windows + w: the bits of the kinds
        self.owners = [-1] * windows
        self.early: tuple[Action, int, int] | None = None  # the first action that comes before what it needs

    def read(self, rank: int, actions: Sequence[Action]) -> int:
        """Enter one rank's list. Returns its peak of live windows."""
        windows, microbatches, ran, owners = self.windows, self.microbatches, self.ran, self.owners
        live = peak = 0
        for index, action in enumerate(actions):
            kind, i, w = action
            if not (kind in _BIT and 0 <= i < microbatches and 0 <= w < windows and (self.backward or kind == "F")):
                raise self._foreign(action, rank, index)
            if owners[w] != rank:
                if owners[w] >= 0:
                    raise self._two_owners(w)
                owners[w] = rank
            slot = i * windows + w
            if ran[slot] != _BEFORE[kind]:
                if ran[slot] & _BIT[kind]:
                    raise ScheduleError(
                        f"the schedule is wrong: {action} runs twice in the list of rank {rank}.", action, rank, index
                    )
                if (ran[slot] | _BIT[kind]) & 2 and (ran[slot] | _BIT[kind]) & (4 | 8):
                    raise ScheduleError(
                        f"the schedule is wrong: {action} is beside another backward of microbatch {i} in window {w}. "
                        "A backward is either B, or I and W.",
                        *(action, rank, index),
                    )
                self.early = self.early or (action, rank, index)
            ran[slot] |= _BIT[kind]
            live += _LIVE[kind]
            peak = max(peak, live)
        return peak

    def close(self) -> None:
        """Once all lists are read: nothing comes too early, nothing is missing."""
        if self.early is not None:
            raise self._too_early(*self.early)
        ran = self.ran
        wanted = (_WHOLE, _SPLIT) if self.backward else (1,)
        if sum(ran.count(bits) for bits in wanted) == len(ran):
            return
        missing = [
            Action(kind, i, w)
            for i in range(self.microbatches)
            for w in range(self.windows)
            for kind in self._missing(ran[i * self.windows + w])
        ]
        owner = self.owners[missing[0].stage]
        where = f" in the list of rank {owner}" if owner >= 0 else f": no rank runs window {missing[0].stage}"
        raise ScheduleError(
            f"the schedule is wrong: {missing[0]} never runs{where} ({len(missing)} such actions).",
            missing[0],
            owner if owner >= 0 else None,
        )

    def _missing(self, ran: int) -> list[Kind]:
        kinds: list[Kind] = [] if ran & 1 else ["F"]
        if not self.backward or ran & 2:
            return kinds
        if ran & (4 | 8):
            return kinds + [kind for kind in ("I", "W") if not ran & _BIT[kind]]
        return [*kinds, "B"]

    def _too_early(self, action: Action, rank: int, index: int) -> ScheduleError:
        kind, i, w = action
        needed = Action("I" if kind == "W" and self.ran[i * self.windows + w] & 1 else "F", i, w)
        ran = self.ran[i * self.windows + w] & _BIT[needed.kind]
        what = "only later" if ran else "never"
        return ScheduleError(
            f"the schedule is wrong: rank {rank} runs {action}, which needs {needed}; that runs {what} in its list.",
            *(action if ran else needed, rank, index if ran else None),
        )

    def _two_owners(self, window: int) -> ScheduleError:
        """Name the rank that has fewer actions of the window: that is the mistake."""
        ran_by = Counter(rank for rank, actions in enumerate(self.lists) for a in actions if a.stage == window)
        wrong = min(ran_by, key=lambda rank: (ran_by[rank], -rank))
        index, action = next((k, a) for k, a in enumerate(self.lists[wrong]) if a.stage == window)
        return ScheduleError(
            f"the schedule runs window {window} on ranks {' and '.join(map(str, sorted(ran_by)))}: {action} is in the "
            f"list of rank {wrong}. Each window belongs to one rank.",
            *(action, wrong, index),
        )

    def _foreign(self, action: Action, rank: int, index: int) -> ScheduleError:
        kinds = "F, B, I and W" if self.backward else "F, as this is an evaluation"
        return ScheduleError(
            f"the schedule is wrong: {action} does not belong in the list of rank {rank}. There are microbatches 0 to "
            f"{self.microbatches - 1}, windows 0 to {self.windows - 1}, and the kinds {kinds}.",
            *(action, rank, index),
        )


def _walk(lists: Lists, windows: int, microbatches: int) -> list[Action]:
    """Run all lists against each other; every rank goes on until it waits for an action of another one."""
    count = windows * microbatches
    done = bytearray(2 * count)  # forwards, then backwards (B or I), at i * windows + w
    waits: dict[int, int] = {}  # what a rank waits for -> the rank
    position = [0] * len(lists)
    order: list[Action] = []
    can_run = list(reversed(range(len(lists))))
    while can_run:
        rank = can_run.pop()
        actions, k = lists[rank], position[rank]
        while k < len(actions):
            action = actions[k]
            kind, i, w = action
            slot = i * windows + w
            if kind == "F":
                if w and not done[slot - 1]:
                    waits[slot - 1] = rank
                    break
            elif kind != "W":
                slot += count
                if w < windows - 1 and not done[slot + 1]:
                    waits[slot + 1] = rank
                    break
            if kind != "W":
                done[slot] = 1
                if slot in waits:
                    can_run.append(waits.pop(slot))
            order.append(action)
            k += 1
        position[rank] = k
    if waits:
        raise _deadlock(lists, position)
    return order


def _deadlock(lists: Lists, position: Sequence[int]) -> ScheduleError:
    stuck = {rank: actions[position[rank]] for rank, actions in enumerate(lists) if position[rank] < len(actions)}
    texts = []
    for rank, action in stuck.items():  # never at a W: what it needs is in the same list, before it
        what, other = ("forward", action.stage - 1) if action.kind == "F" else ("backward", action.stage + 1)
        texts.append(f"rank {rank} waits at {action} for its {what} in window {other}")
    rank, action = next(iter(stuck.items()))
    return ScheduleError(f"the schedule deadlocks: {'; '.join(texts)}.", action, rank, position[rank])
