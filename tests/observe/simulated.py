"""Traces of simulated runs, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable

from lightning_3d.observe import RankTrace, Span, StepTrace
from lightning_3d.pipeline.schedule import placement, schedule_lists
from lightning_3d.pipeline.timing import parts, simulate


def order(p: int, m: int, stage: int, schedule: str) -> list[tuple[str, int]]:
    """The actions of one stage."""
    warm_up = m if schedule == "gpipe" else min(m, p - 1 - stage)
    actions = [("F", i) for i in range(warm_up)]
    for i in range(m - warm_up):
        actions += [("F", warm_up + i), ("B", i)]
    return actions + [("B", i) for i in range(m - warm_up, m)]


def traces(
    p: int,
    m: int,
    *,
    schedule: str = "1f1b",
    forward: float = 1.0,
    backward: float = 2.0,
    dp: int = 1,
    zero: float = 50.0,
) -> list[RankTrace]:
    """Every rank's trace of step 3, with fixed lengths of all actions, starting at time `zero`."""
    seconds = {"F": forward, "B": backward}
    queues = {s: order(p, m, s, schedule) for s in range(p)}
    free = dict.fromkeys(range(p), 0.0)
    done: dict[tuple[str, int, int], float] = {}
    spans: dict[int, list[Span]] = {s: [] for s in range(p)}
    while any(queues.values()):
        for s in range(p):
            while queues[s]:
                kind, i = queues[s][0]
                need = ("F", i, s - 1) if kind == "F" else ("B", i, s + 1) if s < p - 1 else ("F", i, s)
                if not (kind == "F" and s == 0) and need not in done:
                    break
                start = max(free[s], done.get(need, 0.0))
                free[s] = done[kind, i, s] = start + seconds[kind]
                spans[s].append(Span(kind, i, s, zero + start, zero + free[s]))
                queues[s].pop(0)
    return [
        RankTrace(d * p + s, s, d, 0, f"pp{p}-{schedule}", [StepTrace(3, "train", list(spans[s]))])
        for d in range(dp)
        for s in range(p)
    ]


def played(
    name: str,
    p: int,
    m: int,
    virtual: int = 1,
    order: str = "looped",
    durations: Callable[..., float] | None = None,
) -> list[RankTrace]:
    """Traces of any schedule; `durations(kind, window)` in seconds."""
    layout = f"pp{p}-{name}" + (f"-v{virtual}" if virtual > 1 and name != "zb_v" else "")
    layout += "" if order == "looped" else f"-{order}"
    lists = schedule_lists(name, p, m, virtual, order)
    timing = simulate(lists, placement(name, p, virtual, order), durations or parts())
    out = []
    for rank in range(p):
        spans = [Span(*action, 10 + start, 10 + end) for _, action, start, end in timing.of_rank(rank)]
        out.append(RankTrace(rank, rank, layout=layout, steps=[StepTrace(0, spans=spans)]))
    return out
