"""HOW do ranks with several parts of the model take turns?  Interleaved 1F1B (Narayanan et al., 2021)."""

from __future__ import annotations

from lightning_3d.pipeline.action import Action


def looped(stages: int, microbatches: int, virtual: int, rank: int) -> list[Action]:
    """Interleaved 1F1B: this rank owns the windows `rank`, `rank + stages`, `rank + 2 * stages`, ...

    Microbatches go in groups of `stages`: a group passes a rank's first window, by then its head has come around to
    the second one, and so on; backwards the same with the windows reversed. The warm-up is one group through all
    windows but the last, plus what it takes until the first backward is back.

    If `stages` does not divide `microbatches`, the last group is filled up with microbatches that do not exist, whose
    actions are then left out: what remains of a valid order is valid, and holds no more memory.
    """
    if virtual == 1:
        warmup = stages - rank - 1
    else:
        warmup = 2 * (stages - rank - 1) + (virtual - 1) * stages
    turns = [
        (first + i, chunk)
        for first in range(0, microbatches, stages)
        for chunk in range(virtual)
        for i in range(stages)
    ]
    forwards = [Action("F", i, chunk * stages + rank) for i, chunk in turns]
    backwards = [Action("B", i, (virtual - 1 - chunk) * stages + rank) for i, chunk in turns]
    warmup = min(warmup, len(forwards))
    actions = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += (forward, backward)
    actions += backwards[len(forwards) - warmup :]
    return [action for action in actions if action.microbatch < microbatches]


def contiguous(stages: int, microbatches: int, virtual: int, rank: int) -> list[Action]:
    """1F1B with `virtual` consecutive windows per rank: neighbours in the chain stay together, and so does the bubble.

    A microbatch passes all of a rank's windows without leaving it, so there is nothing to interleave: fewer messages
    than looped, the bubble of plain 1F1B.
    """
    down = range(rank * virtual, (rank + 1) * virtual)
    actions: list[Action] = []
    warmup = min(stages - rank - 1, microbatches)
    for i in range(microbatches + warmup):
        if i < microbatches:
            actions += [Action("F", i, w) for w in down]
        if i >= warmup:
            actions += [Action("B", i - warmup, w) for w in reversed(down)]
    return actions
