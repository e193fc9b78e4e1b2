"""HOW does a run look in a trace viewer?  Traces as Chrome trace events, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_3d.observe.trace import RankTrace


def chrome_trace(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """All recorded steps of all ranks as one document in the Trace Event Format (complete events, microseconds).

    A replica (dp) is a process, a rank is a thread of it; threads are ordered by stage, then by tp.
    """
    starts = [s.start for trace in traces for step in trace.steps for s in step.spans]
    zero = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for trace in traces:
        place = {"pid": trace.dp, "tid": trace.rank}
        name = f"stage {trace.stage} tp {trace.tp} rank {trace.rank}"
        events.append({"ph": "M", "name": "process_name", **place, "args": {"name": f"replica {trace.dp}"}})
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        order = {"sort_index": trace.stage * 1000 + trace.tp}
        events.append({"ph": "M", "name": "thread_sort_index", **place, "args": order})
        for step in trace.steps:
            for span in step.spans:
                events.append(
                    {
                        "ph": "X",
                        "name": f"{span.kind}{span.microbatch}" if span.microbatch >= 0 else span.kind,
                        "cat": span.kind,
                        **place,
                        "ts": round(1e6 * (span.start - zero), 1),
                        "dur": round(1e6 * span.seconds, 1),
                        "args": {"step": step.step, "loop": step.loop, "stage": trace.stage, "window": span.stage},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_chrome_trace(traces: Sequence[RankTrace], path: str | Path) -> Path:
    """Write `chrome_trace(traces)` to a JSON file that Perfetto opens. Returns the file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(traces)))
    return path
