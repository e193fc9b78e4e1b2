"""HOW is a plan shown?  Tables as text: ranked layouts, one layout's prices, why others are out (no torch here)."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_3d.planner.hardware import GIB
from lightning_3d.planner.memory import StageMemory
from lightning_3d.planner.pricing import Priced
from lightning_3d.planner.reasons import not_run, slower_because, too_large_because

if TYPE_CHECKING:
    from lightning_3d.planner.planning import Plan

MEMORY_PARTS = ("weights", "gradients", "optimizer", "buffers", "activations", "passing", "reserve", "context")
TIME_PARTS = (
    "compute",
    "recompute",
    "tensor",
    "context",
    "expert",
    "pipeline",
    "bubble",
    "data",
    "optimizer",
)
_COMPARED = 6
"""So many layouts are shown where one is only to be chosen."""
_WIDTH = 80
CONVENTIONS = ("model_causal", "model_full", "hardware")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A plain table; all but the first `left` columns are right-aligned."""
    made = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def text(*parts: Table | str, width: int = 400) -> str:
    """Tables and lines as text, by default as wide as they need to be."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, highlight=False)
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, soft_wrap=True)
        else:
            console.print(part)
        console.print()
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).rstrip() + "\n"


def plan_text(plan: Plan) -> str:
    """The whole answer."""
    best = plan.best
    counted = plan.found.counted
    head = (
        f"{plan.chain.name}, {_count_text(plan.chain.params)} parameters, on {plan.cluster}\n"
        f"{_batch_text(plan)} x {plan.job.seq} tokens, {plan.job.precision}, "
        f"states {plan.job.recipe}, run by {plan.job.software}; {counted['looked at']} ways looked at, "
        f"{counted['too large']} too large, {counted['played']} played action by action"
    )
    tail = f"best: {best}   {_arguments(plan)}"
    tables = (ranked_table(plan), memory_of_ranked(plan), speed_table(plan), time_table(plan))
    notes = [note for note in [not_run(plan.job)] if note]
    return text(*map(_wrapped, (head, *notes)), *tables, reasons_text(plan), rejected_text(plan), _wrapped(tail))


def _count_text(count: int) -> str:
    return f"{count / 1e9:.4g} billion" if count >= 1e9 else f"{count / 1e6:.4g} million"


def _wrapped(lines: str, indent: str = "") -> str:
    """Lines of text no wider than a terminal."""
    return "\n".join(
        textwrap.fill(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in lines.splitlines()
    )


def choice_text(plan: Plan, reason: str, arguments: Mapping[str, Any], where: str) -> str:
    """What `layout="auto"` says: the layouts it compared, the reason for the first, and how to write it down.

    Args:
        plan: Made for the loader's batch.
        reason: Of `reasons.why_best`.
        arguments: Of the strategy.
        where: Its speeds come from.
    """
    compared = plan.ranked[:_COMPARED]
    rows = [
        [
            str(p),
            str(p.run.candidate.microbatches),
            str(p.run.job.global_batch),
            f"{p.memory.peak.total / GIB:.2f}",
            f"{p.samples_per_second:.4g}",
        ]
        for p in compared
    ]
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    room = (plan.cluster.gpu.memory - plan.cluster.reserve) / GIB
    head = (
        f"{plan.chain.name}, {_count_text(plan.chain.params)} parameters, batches of {plan.given.batch} samples "
        f"per replica, on {plan.cluster}; {where}. Predicted: m microbatches, samples of a step of all replicas, "
        f"memory of the fullest device of {room:.1f} GiB, speed:"
    )
    return text(
        head,
        table("lightning_3d: layout='auto'", ["layout", "m", "batch", "GiB", "samples/s"], rows),
        "\n".join(f"{p}: {slower_because(p, plan.best)}" for p in compared[1:]),
        reason,
        f"to keep this choice: ThreeDStrategy({given}), or strategy.freeze('layout.yaml')",
    ).replace("\n\n", "\n")


def _batch_text(plan: Plan) -> str:
    if plan.given.batch is None:
        return f"global batch {plan.job.global_batch}"
    accumulated = f" x {plan.job.accumulate} accumulated" if plan.job.accumulate > 1 else ""
    return f"batches of {plan.given.batch} samples per replica{accumulated}"


def ranked_table(plan: Plan) -> Table:
    """The layouts, whose names say everything that is chosen, their memory and their speed."""
    rows = [
        [str(number), str(p), f"{p.memory.peak.total / GIB:.1f}", seconds_text(p.seconds)]
        for number, p in enumerate(plan.ranked, 1)
    ]
    return table("layouts that fit, best first", ["#", "layout", "GiB", "s/step"], rows, left=2)


def memory_of_ranked(plan: Plan) -> Table:
    """What fills the worst stage of every layout."""
    columns = ["#", "m", "batch", "GiB", "of stage", "states", "activations", "rest"]
    rows = []
    for number, p in enumerate(plan.ranked, 1):
        peak = p.memory.peak
        parts = (peak.states, peak.activations, peak.total - peak.states - peak.activations)
        rows.append(
            [
                str(number),
                str(p.run.candidate.microbatches),
                str(p.run.job.global_batch),
                f"{peak.total / GIB:.1f}",
                str(p.memory.worst),
                *(f"{part / GIB:.1f}" for part in parts),
            ]
        )
    return table("batch, and GiB of the fullest stage", columns, rows)


def speed_table(plan: Plan) -> Table:
    """Tokens per second, and the share of the peak in three ways of counting."""
    columns = ["#", "tokens/s/GPU", "MFU causal", "full", "hardware"]
    rows = [
        [str(number), f"{p.tokens_per_second_per_gpu:,.0f}", *(f"{100 * p.mfu(name):.1f}" for name in CONVENTIONS)]
        for number, p in enumerate(plan.ranked, 1)
    ]
    return table("speed, and MFU in %", columns, rows)


def time_table(plan: Plan) -> Table:
    """Seconds by part; parts that no layout has are left out."""
    parts = [part for part in TIME_PARTS if any(getattr(p.time, part) for p in plan.ranked)]
    rows = [
        [
            str(number),
            *(seconds_text(getattr(p.time, part)) for part in parts),
            seconds_text(p.time.data_hidden),
        ]
        for number, p in enumerate(plan.ranked, 1)
    ]
    return table("seconds of a step by part", ["#", *(_says(part) for part in parts), "dp hidden"], rows)


def reasons_text(plan: Plan) -> str:
    """What costs the others their time."""
    lines = [f"{number}  {slower_because(p, plan.best)}" for number, p in enumerate(plan.ranked, 1)]
    return "\n".join(["why (relative to the best)", *(_wrapped(line, "   ") for line in lines)])


def _says(part: str) -> str:
    names = {
        "tensor": "TP",
        "context": "CP",
        "expert": "EP",
        "pipeline": "PP",
        "data": "DP exposed",
        "optimizer": "update",
    }
    return names.get(part, part)


def rejected_text(plan: Plan) -> str:
    """What is out, and why."""
    if not plan.rejected:
        return "nothing faster was rejected"
    lines = (f"{name}: {why}" for name, why in plan.rejected)
    return "\n".join(["rejected", *(_wrapped(line, "    ") for line in lines)])


def explain_text(p: Priced, best: Priced | None = None) -> str:
    """One layout's prices: memory of every stage, seconds by part, the numbers people compare."""
    run = p.run
    fits = "fits" if p.memory.fits else f"DOES NOT FIT: {too_large_because(p.memory)}"
    lines = [
        f"{p} of {run.chain.name} on {run.cluster}",
        f"{run.candidate.microbatches} microbatches of {run.candidate.micro_batch} x {run.job.seq} tokens; {fits}",
    ]
    against = []
    if best is not None and str(best) != str(p):
        against = [f"against {best}, {seconds_text(best.seconds)} s: {slower_because(p, best)}"]
    against += [note for note in [not_run(run.job)] if note]
    numbers = [
        [name.replace("_", " "), f"{p.flops_per_second(name) / 1e12:.1f}", f"{100 * p.mfu(name):.1f} %"]
        for name in CONVENTIONS
    ]
    parts = [
        [_says(part), seconds_text(getattr(p.time, part)), _share(getattr(p.time, part), p)] for part in TIME_PARTS
    ]
    parts += [["total", seconds_text(p.seconds), "100 %"], ["DP hidden", seconds_text(p.time.data_hidden), ""]]
    return text(
        _wrapped("\n".join(lines + against)),
        memory_table(p.memory.stages),
        states_table(p.memory.stages),
        table("seconds of a step", ["part", "s", "share"], parts),
        table("speed", ["operations counted", "TFLOP/s per GPU", "MFU"], numbers),
        f"{p.tokens_per_second:,.0f} tokens/s, {p.tokens_per_second_per_gpu:,.0f} per GPU",
    )


def memory_table(stages: Sequence[StageMemory]) -> Table:
    """GiB of every stage by part."""
    parts = ("states", *MEMORY_PARTS[3:])
    columns = ["stage", "in flight", *parts, "total"]
    rows = [
        [
            str(number),
            f"{stage.in_flight:.4g}",
            *(f"{getattr(stage, part) / GIB:.2f}" for part in parts),
            f"{stage.total / GIB:.2f}",
        ]
        for number, stage in enumerate(stages)
    ]
    return table("GiB of a GPU by stage", columns, rows)


def states_table(stages: Sequence[StageMemory]) -> Table:
    """GiB of the model states of every stage."""
    rows = [
        [str(number), str(stage.blocks), *(f"{getattr(stage, part) / GIB:.2f}" for part in MEMORY_PARTS[:3])]
        for number, stage in enumerate(stages)
    ]
    return table("its blocks, and GiB of its states", ["stage", "blocks", *MEMORY_PARTS[:3]], rows)


def seconds_text(seconds: float) -> str:
    """Seconds with three digits that count."""
    if seconds == 0:
        return "0"
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.1f}"


def _share(seconds: float, p: Priced) -> str:
    return f"{100 * seconds / p.seconds:.1f} %"


def _arguments(plan: Plan) -> str:
    """How this library is told the best layout; other frameworks are told otherwise."""
    if not plan.job.software.startswith("lightning_3d"):
        return ""
    return " ".join(f"{k}={v}" for k, v in plan.strategy_arguments().items())
