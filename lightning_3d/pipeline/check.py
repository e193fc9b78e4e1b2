"""IS a schedule complete and free of deadlock?  How many microbatches are live at once?  (no torch here)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline.schedule import Action


@dataclass(frozen=True)
class Report:
    """What `check` proved.

    Attributes:
        peak_live: Per rank, the largest number of forwards whose backward has not run yet (activation memory).
        order: One order of all actions that respects every dependency.
    """

    peak_live: tuple[int, ...]
    order: tuple[Action, ...]


def check(lists: Sequence[Sequence[Action]], windows: int, microbatches: int, *, backward: bool = True) -> Report:
    """Walk the ranks' lists against the data dependencies of a chain of windows.

    Dependencies: F(i, w) needs F(i, w-1); B(i, w) needs F(i, w) and B(i, w+1). A rank runs its list strictly in order;
    sends do not block. Messages that skip windows need nothing more than the chain.

    Args:
        lists: One list of actions per rank.
        windows: Number of windows in the chain; each belongs to exactly one rank.
        microbatches: Number of microbatches.
        backward: Whether every forward must have its backward (False: evaluation).

    Raises:
        ConfigurationError: An action is missing, double or foreign, or the lists wait for each other for ever.
    """
    _check_complete(lists, windows, microbatches, backward)
    position, live, peak = [0] * len(lists), [0] * len(lists), [0] * len(lists)
    done: set[Action] = set()
    order: list[Action] = []
    total = sum(map(len, lists))
    while len(order) < total:
        before = len(order)
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions) and _ready(actions[position[rank]], windows, done):
                action = actions[position[rank]]
                position[rank] += 1
                done.add(action)
                order.append(action)
                live[rank] += {"F": 1, "B": -1}[action.kind]
                peak[rank] = max(peak[rank], live[rank])
        if len(order) == before:
            waiting = [f"rank {r} waits at {a[position[r]]}" for r, a in enumerate(lists) if position[r] < len(a)]
            raise ConfigurationError(f"the schedule deadlocks: {'; '.join(waiting)}.")
    return Report(tuple(peak), tuple(order))


def _ready(action: Action, windows: int, done: set[Action]) -> bool:
    kind, i, w = action
    if kind == "F":
        return w == 0 or Action("F", i, w - 1) in done
    return Action("F", i, w) in done and (w == windows - 1 or Action("B", i, w + 1) in done)


def _check_complete(lists: Sequence[Sequence[Action]], windows: int, microbatches: int, backward: bool) -> None:
    kinds = ("F", "B") if backward else ("F",)
    wanted = {Action(k, i, w) for k in kinds for i in range(microbatches) for w in range(windows)}  # type: ignore[arg-type]
    counts = Counter(action for actions in lists for action in actions)
    double = [str(a) for a, n in counts.items() if n > 1]
    missing = [str(a) for a in sorted(wanted - counts.keys())]
    foreign = [str(a) for a in counts.keys() - wanted]
    for what, found in (("runs twice", double), ("never runs", missing), ("does not belong in the list", foreign)):
        if found:
            raise ConfigurationError(f"the schedule is wrong: {found[0]} {what} ({len(found)} such actions).")
    owner: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if owner.setdefault(action.stage, rank) != rank:
                raise ConfigurationError(
                    f"the schedule runs window {action.stage} on ranks {owner[action.stage]} and {rank}."
                )
