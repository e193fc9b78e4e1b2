"""HOW can the gradients of the weights fill the idle time?  ZB-H1 (Qi et al., 2023) and ZB-V (Qi et al., 2024)."""

from __future__ import annotations

from lightning_3d.pipeline.action import Action, Lists
from lightning_3d.pipeline.greedy import greedy_lists


def zb_h1(stages: int, microbatches: int, rank: int) -> list[Action]:
    """ZB-H1: 1F1B with split backwards, never more than `stages` live microbatches on any rank.

    In 1F1B, rank s holds `stages - s` microbatches. The s that are left of the first rank's memory go to deferred
    weight gradients: rank s leaves out `W` in its first s rounds. Its inputs' gradients are thereby on their way
    earlier, and what was deferred fills the end, where 1F1B idles.
    """
    actions = [Action("F", i, rank) for i in range(min(stages - rank, microbatches))]
    for i in range(microbatches):
        actions.append(Action("I", i, rank))
        if i >= rank:
            actions.append(Action("W", i - rank, rank))
        if i + stages - rank < microbatches:
            actions.append(Action("F", i + stages - rank, rank))
    return actions + [Action("W", i, rank) for i in range(max(0, microbatches - rank), microbatches)]


def zb_v(stages: int, microbatches: int) -> Lists:
    """ZB-V: two windows per rank along a V (rank s owns s and 2p-1-s), split backwards, at most 2p windows live.

    A microbatch comes back to the first rank for the loss, so backwards begin there, too, before a whole round trip is
    over. The order is found by `greedy_lists`; the caps give a rank's 2p places to its two windows, in proportion to
    how long a microbatch stays away.
    """
    p = stages
    caps = [2 * p - 1 - w if w < p else 2 * p - w for w in range(2 * p)]
    return greedy_lists(v_shape(p), p, microbatches, caps, split_backward=True)


def v_shape(stages: int) -> tuple[int, ...]:
    """Owners 0, 1, ..., p-1, p-1, ..., 1, 0."""
    return (*range(stages), *reversed(range(stages)))
