"""Traces of simulated runs, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_3d.observe import RankTrace, Span, StepTrace
from lightning_3d.pipeline.schedule import placement, schedule_lists
from lightning_3d.pipeline.timing import parts, simulate


def traces(p: int, m: int, *, schedule: str = "1f1b", dp: int = 1) -> list[RankTrace]:
    """Every rank's trace of step 3; a forward takes 1 s, a backward 2 s."""
    return [
        replace(trace, rank=d * p + trace.rank, dp=d, steps=[StepTrace(3, spans=list(trace.steps[0].spans))])
        for d in range(dp)
        for trace in played(schedule, p, m)
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
