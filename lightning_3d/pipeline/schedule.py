"""IN WHICH ORDER does each stage run forwards and backwards?  Schedules are lists of actions (no torch here).

The model is a chain of *windows*; `placement` says which pipeline rank owns each, `schedule_lists` in which order each
rank runs forwards and backwards of its windows. `check.py` proves a schedule complete and free of deadlock; the runner
walks any proven list. Schedules with one window per rank are functions `(stages, microbatches, rank) -> list[Action]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil
from typing import get_args

from lightning_3d.errors import ConfigurationError, near
from lightning_3d.layout import SCHEDULES as NAMES
from lightning_3d.layout import Order
from lightning_3d.pipeline.action import Action, Kind, Lists
from lightning_3d.pipeline.greedy import greedy_lists
from lightning_3d.pipeline.interleaved import contiguous, looped
from lightning_3d.pipeline.zero_bubble import v_shape, zb_h1, zb_v

__all__ = [
    "NAMES",
    "ORDERS",
    "SCHEDULES",
    "Action",
    "Kind",
    "Lists",
    "Schedule",
    "canonical_name",
    "chain_lists",
    "forward_only",
    "gpipe",
    "one_forward_one_backward",
    "placement",
    "schedule_lists",
    "splits_backward",
    "windows_per_rank",
]

Schedule = Callable[[int, int, int], list[Action]]

ORDERS: tuple[str, ...] = get_args(Order)
_SPELLINGS = {"zero_bubble": "zb_h1"}


def gpipe(stages: int, microbatches: int, rank: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al., 2019). Every microbatch is live at once."""
    forwards = [Action("F", i, rank) for i in range(microbatches)]
    return forwards + [Action("B", i, rank) for i in range(microbatches)]


def one_forward_one_backward(stages: int, microbatches: int, rank: int) -> list[Action]:
    """1F1B (Narayanan et al., 2019): at most `stages - rank` live microbatches, however many there are."""
    warmup = min(stages - rank - 1, microbatches)
    actions = [Action("F", i, rank) for i in range(warmup)]
    for i in range(microbatches - warmup):
        actions += [Action("F", warmup + i, rank), Action("B", i, rank)]
    return actions + [Action("B", i, rank) for i in range(microbatches - warmup, microbatches)]


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""The schedules with one window per rank and whole backwards."""


def canonical_name(name: str) -> str:
    """The name in `NAMES` for a schedule's name, or another spelling of it.

    Raises:
        ConfigurationError: There is no such schedule.
    """
    found = _SPELLINGS.get(name, name)
    if found not in NAMES:
        raise ConfigurationError(
            f"pipeline_schedule is {name!r}; known schedules are {', '.join(NAMES)}."
            + near(str(name), (*NAMES, *_SPELLINGS))
        )
    return found


def splits_backward(name: str) -> bool:
    """Whether this schedule runs `I` and `W` instead of `B`."""
    return canonical_name(name).startswith("zb_")


def windows_per_rank(name: str, virtual: int) -> int:
    """`virtual`, but for `zb_v`: it always has two, also where a layout leaves `virtual` at 1."""
    return 2 if name == "zb_v" else virtual


def placement(name: str, stages: int, virtual: int = 1, order: str = "looped") -> tuple[int, ...]:
    """The owner (pipeline rank) of each of the `stages * virtual` windows of the chain.

    Args:
        name: Name of the schedule.
        stages: Number of pipeline ranks.
        virtual: Windows per rank.
        order: For `interleaved_1f1b`: "looped" deals the windows out in rounds, "contiguous" gives every rank
            neighbours.

    Raises:
        ConfigurationError: There is no such schedule or order, or the schedule does not go with `virtual`.
    """
    name = canonical_name(name)
    if stages < 1 or virtual < 1:
        raise ConfigurationError(f"a pipeline needs stages and virtual of at least 1, not {stages} and {virtual}.")
    if order not in ORDERS:
        raise ConfigurationError(f"the order of windows is {order!r}; known are {', '.join(ORDERS)}.")
    if name == "zb_v":
        if virtual != 2:
            raise ConfigurationError(
                f"schedule 'zb_v' places two windows per rank along a V, but virtual is {virtual}. Set it to 2, or use "
                "'zb_h1', which has one window per rank."
            )
        return v_shape(stages)
    if name == "interleaved_1f1b":
        return tuple(w % stages if order == "looped" else w // virtual for w in range(stages * virtual))
    if virtual != 1:
        raise ConfigurationError(
            f"schedule {name!r} has one window per rank, but virtual is {virtual}. Set it to 1, or use "
            "'interleaved_1f1b' (any number) or 'zb_v' (2)."
        )
    return tuple(range(stages))


@lru_cache(maxsize=64)
def schedule_lists(
    name: str, stages: int, microbatches: int, virtual: int = 1, order: str = "looped"
) -> Sequence[Sequence[Action]]:
    """What each pipeline rank does in a training step, in order; remembered, as it is asked for at every step.

    Args:
        name: Name of the schedule.
        stages: Number of pipeline ranks.
        microbatches: Number of microbatches; any number works.
        virtual: Windows per rank.
        order: See `placement`.

    Raises:
        ConfigurationError: There is no such schedule or order, or the sizes do not fit it.
    """
    name = canonical_name(name)
    placement(name, stages, virtual, order)
    _some(microbatches)
    if name == "zb_v":
        return zb_v(stages, microbatches)
    if name == "interleaved_1f1b":
        turns = looped if order == "looped" else contiguous
        return tuple(tuple(turns(stages, microbatches, virtual, rank)) for rank in range(stages))
    schedule = {**SCHEDULES, "zb_h1": zb_h1}[name]
    return tuple(tuple(schedule(stages, microbatches, rank)) for rank in range(stages))


def chain_lists(
    owners: Sequence[int], stages: int, microbatches: int, split_backward: bool = False
) -> Sequence[Sequence[Action]]:
    """A training schedule for any chain of windows, e.g. 0, 1, 0, 1 for a step that walks through the model twice.

    A chain that a named schedule has gets that schedule's lists (1F1B, interleaved 1F1B; with split backwards ZB-H1,
    ZB-V). For any other the order is found by playing the step through with bounded memory: a window holds the
    microbatches that are on the way between its forward and its backward, plus one where ranks own several windows.

    Args:
        owners: For each window, the rank that owns it.
        stages: Number of ranks; some may own nothing.
        microbatches: Number of microbatches.
        split_backward: Whether backwards are split into `I` and `W`.

    Raises:
        ConfigurationError: An owner is no rank, or there are no windows or microbatches.
    """
    return _chain_lists(tuple(owners), stages, microbatches, split_backward)


@lru_cache(maxsize=64)
def _chain_lists(owners: tuple[int, ...], stages: int, microbatches: int, split: bool) -> Lists:
    _some(microbatches)
    if not owners or min(owners) < 0 or max(owners) >= stages:
        raise ConfigurationError(f"the chain {owners} needs at least one window, all on ranks 0 to {stages - 1}.")
    ranks = list(dict.fromkeys(owners))  # in the order in which the chain comes to them
    met = tuple(ranks.index(owner) for owner in owners)
    lists: list[tuple[Action, ...]] = [() for _ in range(stages)]
    for rank, actions in zip(ranks, _lists_in_order_met(met, len(ranks), microbatches, split), strict=True):
        lists[rank] = actions
    return tuple(lists)


def _lists_in_order_met(owners: tuple[int, ...], stages: int, microbatches: int, split: bool) -> Lists:
    windows = len(owners)
    if split and owners == v_shape(stages):
        return zb_v(stages, microbatches)
    if split and owners == tuple(range(stages)):
        return tuple(tuple(zb_h1(stages, microbatches, rank)) for rank in range(stages))
    if not split and windows % stages == 0 and owners == tuple(w % stages for w in range(windows)):
        return tuple(tuple(looped(stages, microbatches, windows // stages, rank)) for rank in range(stages))
    most = max(owners.count(rank) for rank in range(stages))
    # From a window to the chain's end and back are `windows - w` forwards and backwards; in the time of `most` of them
    # the busiest rank lets one microbatch pass. One more keeps a rank busy that has several windows to choose from.
    slack = 1 if most > 1 else 0
    caps = [ceil((windows - w) / most) + (slack if w < windows - 1 else 0) for w in range(windows)]
    return greedy_lists(owners, stages, microbatches, caps, split_backward=split)


def forward_only(owners: Sequence[int], microbatches: int, rank: int) -> list[Action]:
    """Evaluation: every window of this rank once per microbatch, as a wavefront.

    Args:
        owners: For each window of the chain, the rank that owns it; a step that walks through the model twice has the
            chain 0, 1, 0, 1.
        microbatches: How many microbatches.
        rank: Whose list.

    The order is the same total order on all ranks (by `microbatch + window`), in which everything a window needs
    comes earlier, so the lists cannot deadlock.
    """
    mine = [Action("F", i, w) for i in range(microbatches) for w, owner in enumerate(owners) if owner == rank]
    return sorted(mine, key=lambda action: (action.microbatch + action.stage, action.stage))


def _some(microbatches: int) -> None:
    if microbatches < 1:
        raise ConfigurationError(f"a step needs at least one microbatch, not {microbatches}.")
