"""HOW does a plan look on a page?  One HTML file with its charts inside: no script, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner import svg
from lightning_3d.planner.hardware import GIB
from lightning_3d.planner.playing import timing
from lightning_3d.planner.pricing import Priced
from lightning_3d.planner.reasons import not_run, slower_because
from lightning_3d.planner.step_time import message_seconds, window_seconds
from lightning_3d.planner.tables import CONVENTIONS, MEMORY_PARTS, TIME_PARTS, seconds_text

if TYPE_CHECKING:
    from lightning_3d.planner.planning import Plan

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #27272a; max-width: 960px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse; font-size: 12px } td, th { padding: 2px 7px; text-align: right; white-space: nowrap }
th { border-bottom: 1px solid #a1a1aa } td:nth-child(2), th:nth-child(2) { text-align: left; white-space: normal }
small { display: block; color: #71717a }
tr.best { background: #fef3c7 } .wide { overflow-x: auto } p.note { color: #71717a }
"""
_SHOWN = 12
"""Microbatches in the drawing of the pipeline, per rank at most this many times the stages."""


def write_report(plan: Plan, path: str | Path) -> Path:
    """Write the page.

    Raises:
        ConfigurationError: The path does not end in .html, or its folder does not exist.
    """
    file = Path(path)
    if file.suffix not in (".html", ".htm"):
        raise ConfigurationError(f"a report is a page; {str(file)!r} must end in .html.")
    if not file.parent.is_dir():
        raise ConfigurationError(f"there is no folder {str(file.parent)!r} for the report.")
    file.write_text(page(plan), encoding="utf-8")
    return file


def page(plan: Plan) -> str:
    """The page as text."""
    best = plan.best
    title = f"{plan.chain.name} on {plan.cluster.gpus} x {plan.cluster.gpu.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{plan.chain.params / 1e9:.4g} billion parameters; global batch {plan.job.global_batch} x {plan.job.seq} "
        f"tokens; {escape(plan.job.precision)}; {escape(str(plan.cluster))}. Best: <b>{escape(str(best))}</b>, "
        f"{seconds_text(best.seconds)} s a step, {best.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, "
        f"{100 * best.mfu():.1f} % of the peak. {escape(not_run(plan.job) or '')}</p>",
        "<h2>Layouts that fit</h2>",
        _table(plan),
        "<h2>Memory of a GPU by stage (GiB), best layout</h2>",
        svg.legend(MEMORY_PARTS, svg.COLOURS),
        _memory(best, plan),
        "<h2>Seconds of a step by part</h2>",
        svg.legend(TIME_PARTS, svg.COLOURS_OF_TIME),
        _times(plan.ranked),
        "<h2>Pipeline of the best layout with one, as its schedule's action list runs</h2>",
        _timeline(plan.ranked),
        "<h2>All layouts: memory and speed</h2>",
        _scatter(plan),
        "<h2>Rejected</h2>",
        "<ul>" + "".join(f"<li><b>{escape(n)}</b>: {escape(w)}</li>" for n, w in plan.rejected) + "</ul>",
        '<p class="note">Predicted, not measured. How, and how well it does on published runs: docs/planner.md.</p>',
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _table(plan: Plan) -> str:
    head = [
        "#",
        "layout",
        "m",
        "GiB",
        "s/step",
        "tokens/s/GPU",
        *(f"MFU {c.replace('_', ' ')}" for c in CONVENTIONS),
    ]
    lines = ["<tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"]
    for number, p in enumerate(plan.ranked, 1):
        cells = [
            str(number),
            str(p),
            str(p.run.candidate.microbatches),
            f"{p.memory.peak.total / GIB:.1f}",
            seconds_text(p.seconds),
            f"{p.tokens_per_second_per_gpu:,.0f}",
            *(f"{100 * p.mfu(name):.1f} %" for name in CONVENTIONS),
        ]
        mark = ' class="best"' if number == 1 else ""
        made = [f"<td>{escape(c)}</td>" for c in cells]
        made[1] = f"<td>{escape(cells[1])}<small>{escape(slower_because(p, plan.best))}</small></td>"
        lines.append(f"<tr{mark}>" + "".join(made) + "</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _memory(best: Priced, plan: Plan) -> str:
    rows = [
        (f"stage {n}, {s.in_flight:.3g} in flight", [(part, getattr(s, part) / GIB) for part in MEMORY_PARTS])
        for n, s in enumerate(best.memory.stages)
    ]
    return svg.stacked_bars(rows, svg.COLOURS, "GiB", best.memory.available / GIB)


def _times(ranked: Sequence[Priced]) -> str:
    rows = [(str(p), [(part, getattr(p.time, part)) for part in TIME_PARTS]) for p in ranked]
    return svg.stacked_bars(rows, svg.COLOURS_OF_TIME, "s")


def _timeline(ranked: Sequence[Priced]) -> str:
    piped = next((p for p in ranked if p.run.candidate.layout.pp > 1), None)
    if piped is None:
        return "<p>None of the layouts has a pipeline.</p>"
    layout = piped.run.candidate.layout
    count = min(piped.run.candidate.microbatches, max(_SHOWN, 2 * layout.pp))
    windows = window_seconds(piped.run)
    played = timing(
        layout.schedule, layout.pp, count, layout.virtual, windows, message_seconds(piped.run), layout.order
    )
    rows = [
        [(t.action.kind, t.start, t.end, f"{t.action}: {t.start:.4g} to {t.end:.4g} s") for t in played.of_rank(rank)]
        for rank in range(layout.pp)
    ]
    said = f"{piped}, the first {count} of {piped.run.candidate.microbatches} microbatches"
    labels = [f"stage {rank}" for rank in range(layout.pp)]
    kinds = [kind for kind in ("F", "B", "I", "W") if any(box[0] == kind for row in rows for box in row)]
    return f"<p>{escape(said)}</p>" + svg.legend(kinds, svg.COLOURS) + svg.lanes(rows, labels, played.length, "s")


def _scatter(plan: Plan) -> str:
    points = [
        (p.memory.peak.total / GIB, p.tokens_per_second_per_gpu, p is plan.best, f"{p}: {seconds_text(p.seconds)} s")
        for p in plan.ranked
    ]
    limit = plan.best.memory.available / GIB
    return svg.scatter(points, "GiB of the worst stage", "tokens/s per GPU", limit)
