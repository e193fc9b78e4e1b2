"""IN WHICH ORDER does each stage run forwards and backwards?  Schedules are lists of actions (no torch here).

A schedule is a function `(stages, microbatches, rank) -> list[Action]`. `check.py` proves a schedule complete and free
of deadlock; the runner walks any proven list. An action names the *window* it runs (`stage`): with one window per
rank, window and rank are the same number; schedules with several model chunks per rank will use more windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from lightning_3d.errors import ConfigurationError, near

Kind = Literal["F", "B", "wait"]


class Action(NamedTuple):
    """One piece of work: `F` forward, `B` backward of one microbatch in one window.

    `wait` never appears in a schedule; the recorder is told with it how long a window waited for a receive.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


Schedule = Callable[[int, int, int], list[Action]]


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


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def schedule_named(name: str) -> Schedule:
    """The schedule with this name.

    Raises:
        ConfigurationError: There is none.
    """
    if name not in SCHEDULES:
        raise ConfigurationError(
            f"pipeline_schedule is {name!r}; this version has {', '.join(SCHEDULES)}." + near(name, SCHEDULES)
        )
    return SCHEDULES[name]
