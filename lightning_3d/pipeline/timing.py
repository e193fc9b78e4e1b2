"""HOW LONG does a schedule take, and how long do ranks stand idle?  Played through on paper (no torch here).

`simulate` runs lists with given durations; `formula_bubble` is what the papers promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline.action import Action, Kind
from lightning_3d.pipeline.check import check
from lightning_3d.pipeline.schedule import canonical_name, placement, schedule_lists

Durations = Mapping[tuple[Kind, int], float] | Callable[[Kind, int], float]
"""Seconds of every kind of action in every window: `durations["F", 3]` or `durations("F", 3)`."""


class Timed(NamedTuple):
    """When a rank runs an action, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timing:
    """A step, played through.

    Attributes:
        actions: Every action, by rank and then by time.
        stages: Number of ranks.
        length: Seconds until the last action ends.
    """

    actions: tuple[Timed, ...]
    stages: int
    length: float

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Per rank, the share of the step in which it stands idle."""
        busy = [0.0] * self.stages
        for timed in self.actions:
            busy[timed.rank] += timed.end - timed.start
        return tuple(1 - seconds / self.length if self.length else 0.0 for seconds in busy)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks together."""
        return sum(self.bubbles) / self.stages

    def of_rank(self, rank: int) -> list[Timed]:
        """One rank's actions, by time."""
        return [timed for timed in self.actions if timed.rank == rank]

    def live(self, rank: int, size: Mapping[int, float] | None = None) -> list[tuple[float, float]]:
        """The memory of activations over time: `(seconds, what is live from then on)`, at every change.

        Args:
            rank: Which rank.
            size: What one microbatch takes in each window, in any unit; default: every window counts 1.
        """
        changes, now = [(0.0, 0.0)], 0.0
        for _, action, start, end in self.of_rank(rank):
            amount = 1.0 if size is None else size[action.stage]
            if action.kind == "F":
                now += amount
                changes.append((start, now))
            elif action.kind in ("B", "W"):
                now -= amount
                changes.append((end, now))
        return changes

    def peak_live(self, size: Mapping[int, float] | None = None) -> tuple[float, ...]:
        """Per rank, the largest value of `live`."""
        return tuple(max(amount for _, amount in self.live(rank, size)) for rank in range(self.stages))


def parts(forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0) -> Callable[[Kind, int], float]:
    """Durations that are the same in every window: of `F`, `I`, `W`, and of `B` as the sum of the last two."""
    seconds: dict[str, float] = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
    return lambda kind, window: seconds[kind]


def simulate(
    lists: Sequence[Sequence[Action]], owners: Sequence[int], durations: Durations, send: float = 0.0
) -> Timing:
    """When every action starts and ends, if each rank runs its list in order, as early as it can.

    Args:
        lists: Per rank, its actions.
        owners: Per window, its rank.
        durations: Seconds of an action by kind and window.
        send: Seconds until a message of one rank is at another; it blocks neither.

    Raises:
        ConfigurationError: The lists are no schedule for this chain (see `check`).
    """
    flat = [action for actions in lists for action in actions]
    microbatches = 1 + max((action.microbatch for action in flat), default=0)
    backward = any(action.kind != "F" for action in flat)
    report = check(lists, len(owners), microbatches, backward=backward)
    if report.owners != tuple(owners):
        raise ConfigurationError(f"the lists run windows on the ranks {report.owners}, not on {tuple(owners)}.")
    lasts = durations if callable(durations) else lambda kind, window: durations[kind, window]
    free = [0.0] * len(lists)
    ends: dict[tuple[bool, int, int], float] = {}  # (forward?, microbatch, window) -> seconds
    timed: list[list[Timed]] = [[] for _ in lists]
    for action in report.order:
        kind, i, w = action
        rank = owners[w]
        start = free[rank]
        other = w - 1 if kind == "F" else w + 1
        if kind != "W" and 0 <= other < len(owners):
            start = max(start, ends[kind == "F", i, other] + (send if owners[other] != rank else 0.0))
        free[rank] = end = start + lasts(kind, w)
        if kind != "W":
            ends[kind == "F", i, w] = end
        timed[rank].append(Timed(rank, action, start, end))
    return Timing(tuple(t for of_rank in timed for t in of_rank), len(lists), max(free, default=0.0))


def formula_bubble(
    name: str, stages: int, microbatches: int, virtual: int = 1, split: tuple[float, float, float] = (1, 1, 1)
) -> float:
    """The idle share of the whole step by the papers' formulas: equal windows, free messages.

    Interleaved 1F1B reaches its formula if windows are looped and `stages` divides `microbatches`, ZB-H1 for at least
    `stages` microbatches. For ZB-V there is no formula: its list is played through.

    Args:
        name: Name of the schedule.
        stages: Number of pipeline ranks.
        microbatches: Number of microbatches.
        virtual: Windows per rank.
        split: Seconds of `F`, `I` and `W`; they matter for the zero-bubble schedules only.
    """
    name, p, m = canonical_name(name), stages, microbatches
    owners = placement(name, stages, virtual)
    forward, inputs, weights = split
    if name == "zb_v":
        return simulate(schedule_lists(name, p, m, virtual), owners, parts(*split)).bubble
    if name == "zb_h1":
        idle = (p - 1) * (forward + inputs - weights)
        return idle / (m * sum(split) + idle)
    return (p - 1) / (virtual * m + p - 1)
