"""HOW LONG does the pipeline take?  The schedule's own action lists, played through with each window's seconds.

A step of many microbatches repeats itself in rounds (one microbatch per rank). So fewer are played, and then one and
two rounds more: once both take equally long, and no less than the busiest rank's work, every further round takes that.
tests/planner/test_playing.py compares it with the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from lightning_3d.pipeline.action import Action, Kind
from lightning_3d.pipeline.schedule import placement, schedule_lists, windows_per_rank
from lightning_3d.pipeline.timing import Timing, simulate

_MOST = 6000
"""Forwards after which a round counts as settled even if rounds still change (by less than a percent of the step)."""


class Window(NamedTuple):
    """Seconds of one microbatch in one window: forward, gradients of inputs, of weights."""

    forward: float
    inputs: float
    weights: float


class Played(NamedTuple):
    """A pipeline's step.

    Attributes:
        length: Seconds.
        busy: Seconds in which each rank computes.
    """

    length: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The idle share of the busiest rank."""
        return 1 - max(self.busy) / self.length if self.length else 0.0


def play(
    schedule: str,
    stages: int,
    microbatches: int,
    virtual: int,
    windows: tuple[Window, ...],
    send: float,
    order: str = "looped",
) -> Played:
    """Seconds of a step of a named schedule.

    Args:
        schedule: Its name.
        stages: Pipeline ranks.
        microbatches: How many.
        virtual: Windows per rank.
        windows: Seconds of every window of the chain, `stages * virtual` of them.
        send: Seconds of a message between ranks.
        order: See `Layout.order`.
    """
    virtual = windows_per_rank(schedule, virtual)
    owners = placement(schedule, stages, virtual, order)
    busy = [0.0] * stages
    for window, owner in zip(windows, owners, strict=True):
        busy[owner] += microbatches * sum(window)
    if stages == 1:
        return Played(busy[0], tuple(busy))
    return Played(_length(schedule, stages, microbatches, virtual, windows, send, order), tuple(busy))


@lru_cache(maxsize=16384)
def _length(
    schedule: str, stages: int, microbatches: int, virtual: int, windows: tuple[Window, ...], send: float, order: str
) -> float:
    def after(count: int) -> float:
        return timing(schedule, stages, count, virtual, windows, send, order).length

    owners = placement(schedule, stages, virtual, order)
    of_rank = [sum(sum(w) for w, owner in zip(windows, owners, strict=True) if owner == r) for r in range(stages)]
    least = max(of_rank) * stages  # no round is shorter than the busiest rank's work in it
    enough = (3 if virtual == 1 else 4) * stages + microbatches % stages
    if enough * len(windows) > 2 * _MOST and microbatches > 3 * stages:
        enough = 2 * stages + microbatches % stages  # a deep pipeline: two runs, as short as they can be
        one, two = after(enough), after(enough + stages)
        return two + max(two - one, least) * (microbatches - enough - stages) / stages
    while microbatches > enough + 2 * stages:
        one, two, three = (after(enough + rounds * stages) for rounds in range(3))
        steady = abs((three - two) - (two - one)) <= 1e-9 * three and three - two >= least * (1 - 1e-9)
        if steady or enough * len(windows) > _MOST:
            return three + max(three - two, least) * (microbatches - enough - 2 * stages) / stages
        enough *= 2
    return after(microbatches)


def timing(
    schedule: str,
    stages: int,
    microbatches: int,
    virtual: int,
    windows: Sequence[Window],
    send: float,
    order: str = "looped",
) -> Timing:
    """Every action of a step with its start and end."""
    virtual = windows_per_rank(schedule, virtual)
    lists = schedule_lists(schedule, stages, microbatches, virtual, order)
    return simulate(lists, placement(schedule, stages, virtual, order), durations(windows), send)


def durations(windows: Sequence[Window]) -> Mapping[tuple[Kind, int], float]:
    """Seconds of an action by kind and window."""

    table: dict[tuple[Kind, int], float] = {}
    for number, (forward, inputs, weights) in enumerate(windows):
        table["F", number], table["I", number], table["W", number] = forward, inputs, weights
        table["B", number] = inputs + weights
    return table


@lru_cache(maxsize=4096)
def in_flight(
    schedule: str,
    stages: int,
    microbatches: int,
    virtual: int,
    order: str = "looped",
    after_inputs: float = 1.0,
    halved: tuple[bool, ...] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Per rank and window of this rank, microbatches that are live when this rank holds most of them.

    Read off the action list: what has run forward and not yet backward. With split backwards `after_inputs` of it stays
    after `I`, until `W`, in the windows that `halved` says (default: all); in the others `I` is the whole backward.
    """
    virtual = windows_per_rank(schedule, virtual)
    few = min(microbatches, 2 * stages + (stages if virtual > 1 else 0))
    few = microbatches if schedule == "gpipe" else few
    lists: Sequence[Sequence[Action]] = schedule_lists(schedule, stages, few, virtual, order)
    owners = placement(schedule, stages, virtual, order)
    kept = [after_inputs if halved is None or halved[w] else 0.0 for w in range(len(owners))]
    peaks: list[tuple[float, ...]] = []
    for rank, actions in enumerate(lists):
        mine = [w for w, owner in enumerate(owners) if owner == rank]
        live, most = dict.fromkeys(mine, 0.0), (0.0,) * len(mine)
        for action in actions:
            stays = kept[action.stage]
            live[action.stage] += {"F": 1.0, "B": -1.0, "I": stays - 1.0, "W": -stays}[action.kind]
            if action.kind == "F":
                most = max(most, tuple(live[w] for w in mine), key=sum)
        peaks.append(most)
    return tuple(peaks)
