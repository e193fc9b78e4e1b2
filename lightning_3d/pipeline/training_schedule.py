"""WHICH list of actions does a batch get?  The user's choice of schedule, for any chain of windows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline.schedule import Action, chain_lists, forward_only, placement, schedule_lists
from lightning_3d.pipeline.schedule_file import load_schedule

_SPLIT = ("zb_h1", "zb_v")

Lists = Sequence[Sequence[Action]]


class TrainingSchedule:
    """A schedule by name, or read from a file.

    Args:
        name: One of the built-in schedules, or the path of a file with action lists.
        stages: Pipeline-parallel size.
        virtual: Windows per stage.
        order: How interleaved windows are dealt to the stages: "looped" or "contiguous".

    Attributes:
        owners: Stage of every window of the planned chain. The last window always belongs to the last stage, where
            the loss is.
        microbatches: How many microbatches a file is made for; None: any number.

    Raises:
        ConfigurationError: The file is wrong, or made for another number of stages.
    """

    def __init__(self, name: str, stages: int, virtual: int = 1, order: str = "looped") -> None:
        self.name, self.stages, self.order = name, stages, order
        self.virtual = 2 if name == "zb_v" else virtual
        self.microbatches: int | None = None
        self._own: Lists | None = None
        if Path(name).suffix in (".txt", ".json", ".yaml", ".yml"):
            found = load_schedule(name)
            if found.stages != stages or found.owners[-1] != stages - 1:
                raise ConfigurationError(
                    f"the schedule in {name} has lists for {found.stages} stages and its last window is run by stage "
                    f"{found.owners[-1]}; pipeline_parallel_size={stages} needs {stages} lists, and the last window "
                    f"(which computes the loss) on stage {stages - 1}."
                )
            self.owners, self._own, self.microbatches = tuple(found.owners), found.lists, found.microbatches
        else:
            owners = placement(name, stages, self.virtual, order)
            # a V begins and ends on one stage; turned round, it ends where the loss, the logs and rank zero are
            self._turned = owners[-1] != stages - 1
            self.owners = tuple(stages - 1 - s for s in owners) if self._turned else tuple(owners)

    @property
    def splits(self) -> bool:
        """Whether backwards are divided."""
        own = self._own or ()
        return self.name in _SPLIT or any(action.kind == "I" for actions in own for action in actions)

    def lists(self, owners: tuple[int, ...], microbatches: int) -> Lists:
        """Every stage's actions; `owners` is the chain the batch really has.

        Raises:
            ConfigurationError: The user's own lists are made for another number of microbatches, or another chain.
        """
        if owners != self.owners:
            if self._own is not None:
                raise ConfigurationError(
                    f"the schedule in {self.name} is made for windows on the stages {list(self.owners)}; this step "
                    f"walks through the stages {list(owners)}. Choose a built-in pipeline_schedule for it."
                )
            return chain_lists(owners, self.stages, microbatches, self.name in _SPLIT)
        if self._own is not None:
            if microbatches != self.microbatches:
                raise ConfigurationError(
                    f"the schedule in {self.name} is made for {self.microbatches} microbatches; this batch was cut "
                    f"into {microbatches}. Set num_microbatches={self.microbatches}, use batches of as many samples "
                    "at least (drop_last=True), or choose a built-in pipeline_schedule."
                )
            return self._own
        make = _turned_lists if self._turned else schedule_lists
        return make(self.name, self.stages, microbatches, self.virtual, self.order)


@functools.lru_cache(maxsize=64)
def _turned_lists(name: str, stages: int, microbatches: int, virtual: int, order: str) -> Lists:
    """The lists for stages in reverse order; one object per argument, since callers compare by identity."""
    return tuple(reversed(schedule_lists(name, stages, microbatches, virtual, order)))


@functools.lru_cache(maxsize=256)
def evaluation_lists(chains: tuple[tuple[int, ...], ...], stages: int) -> Lists:
    """Forward only; microbatches that take different walks follow each other one by one.

    Args:
        chains: For every microbatch, the stages of its windows.
        stages: Number of stages.
    """
    if all(chain == chains[0] for chain in chains):
        return [forward_only(chains[0], len(chains), s) for s in range(stages)]
    return [
        [Action("F", i, w) for i, chain in enumerate(chains) for w, owner in enumerate(chain) if owner == s]
        for s in range(stages)
    ]
