"""HOW is a plan shown?  Tables as text: ranked layouts, one layout's prices, why others are out (no torch here)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_3d.planner.hardware import GIB
from lightning_3d.planner.memory import StageMemory
from lightning_3d.planner.pricing import Priced
from lightning_3d.planner.reasons import slower_because, too_large_because

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
_NARROWEST = 120
CONVENTIONS = ("model_causal", "model_full", "hardware")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A plain table; all but the first `left` columns are right-aligned."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
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
        f"{plan.chain.name}, {plan.chain.params / 1e9:.4g} billion parameters, on {plan.cluster}\n"
        f"{_batch_text(plan)} x {plan.job.seq} tokens, {plan.job.precision}, "
        f"states {plan.job.recipe}, run by {plan.job.software}; {counted['looked at']} ways looked at, "
        f"{counted['too large']} too large, {counted['played']} played action by action"
    )
    tail = f"best: {best}   {_arguments(plan)}"
    return text(head, ranked_table(plan), time_table(plan), rejected_table(plan), tail)


def choice_text(plan: Plan, reason: str, arguments: Mapping[str, Any], where: str, width: int) -> str:
    """What `layout="auto"` says: the layouts it compared, the reason for the first, and how to write it down.

    Args:
        plan: Made for the loader's batch.
        reason: Of `reasons.why_best`.
        arguments: Of the strategy.
        where: Its speeds come from.
        width: Columns of the terminal.
    """
    made = Table(title="lightning_3d: layout='auto'", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("layout", "m", "batch", "GiB", "samples/s", "why"):
        sides = "left" if name in ("layout", "why") else "right"
        made.add_column(name, justify=sides, no_wrap=name != "why")  # type: ignore[arg-type]
    for p in plan.ranked[:_COMPARED]:
        made.add_row(
            str(p),
            str(p.run.candidate.microbatches),
            str(p.run.job.global_batch),
            f"{p.memory.peak.total / GIB:.2f}",
            f"{p.samples_per_second:.4g}",
            "chosen" if p is plan.best else slower_because(p, plan.best),
        )
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    room = (plan.cluster.gpu.memory - plan.cluster.reserve) / GIB
    head = (
        f"{plan.chain.name}, {plan.chain.params / 1e6:,.4g} million parameters, batches of {plan.given.batch} samples "
        f"per replica, on {plan.cluster}; {where}. Predicted: m microbatches, samples of a step of all replicas, "
        f"memory of the fullest device of {room:.1f} GiB, speed:"
    )
    return text(
        head, made, reason, f"to keep this choice: ThreeDStrategy({given}), or strategy.freeze('layout.yaml')",
        width=max(width, _NARROWEST),
    ).replace("\n\n", "\n")  # fmt: skip


def _batch_text(plan: Plan) -> str:
    if plan.given.batch is None:
        return f"global batch {plan.job.global_batch}"
    accumulated = f" x {plan.job.accumulate} accumulated" if plan.job.accumulate > 1 else ""
    return f"batches of {plan.given.batch} samples per replica{accumulated}"


def ranked_table(plan: Plan) -> Table:
    """The layouts, their sizes, memory of the worst stage, speed and MFU."""
    columns = [
        "#", "tp", "pp", "dp", "cp", "ep", "zero", "schedule", "v", "mbs", "m", "recompute", "sp", "GiB", "stage",
        "states", "activations", "rest", "batch", "s/step", "tokens/s/GPU", "MFU causal", "full", "hardware", "why",
    ]  # fmt: skip
    rows = []
    for number, p in enumerate(plan.ranked, 1):
        layout, candidate, peak = p.run.candidate.layout, p.run.candidate, p.memory.peak
        sizes = [layout.tp, layout.pp, layout.dp, layout.cp, layout.ep, layout.zero]
        rows.append(
            [
                str(number),
                *map(str, sizes),
                layout.schedule if layout.pp > 1 else "-",
                str(layout.virtual),
                str(candidate.micro_batch),
                str(candidate.microbatches),
                candidate.recompute,
                "yes" if candidate.sequence_parallel else "no",
                f"{peak.total / GIB:.1f}",
                str(p.memory.worst),
                f"{peak.states / GIB:.1f}",
                f"{peak.activations / GIB:.1f}",
                f"{(peak.total - peak.states - peak.activations) / GIB:.1f}",
                str(p.run.job.global_batch),
                seconds_text(p.seconds),
                f"{p.tokens_per_second_per_gpu:,.0f}",
                *(f"{100 * p.mfu(name):.1f}" for name in CONVENTIONS),
                slower_because(p, plan.best),
            ]
        )
    return table("layouts that fit, best first", columns, rows)


def time_table(plan: Plan) -> Table:
    """Seconds by part."""
    columns = ["#", "layout", *(_says(part) for part in TIME_PARTS), "dp hidden"]
    rows = [
        [
            str(number),
            str(p),
            *(seconds_text(getattr(p.time, part)) for part in TIME_PARTS),
            seconds_text(p.time.data_hidden),
        ]
        for number, p in enumerate(plan.ranked, 1)
    ]
    return table("seconds of a step by part", columns, rows, left=2)


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


def rejected_table(plan: Plan) -> Table | str:
    """What is out, and why."""
    if not plan.rejected:
        return "nothing faster was rejected"
    made = Table(title="rejected", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    made.add_column("layout", no_wrap=True)
    made.add_column("reason", max_width=140)
    for name, why in plan.rejected:
        made.add_row(name, why)
    return made


def explain_text(p: Priced, best: Priced | None = None) -> str:
    """One layout's prices: memory of every stage, seconds by part, the numbers people compare."""
    run = p.run
    fits = "fits" if p.memory.fits else f"DOES NOT FIT: {too_large_because(p.memory)}"
    lines = [
        f"{p} of {run.chain.name} on {run.cluster}",
        f"{run.candidate.microbatches} microbatches of {run.candidate.micro_batch} x {run.job.seq} tokens; {fits}",
    ]
    against = [f"against {best}: {slower_because(p, best)}"] if best is not None and str(best) != str(p) else []
    numbers = [
        [name.replace("_", " "), f"{p.flops_per_second(name) / 1e12:.1f}", f"{100 * p.mfu(name):.1f} %"]
        for name in CONVENTIONS
    ]
    parts = [
        [_says(part), seconds_text(getattr(p.time, part)), _share(getattr(p.time, part), p)] for part in TIME_PARTS
    ]
    parts += [["total", seconds_text(p.seconds), "100 %"], ["DP hidden", seconds_text(p.time.data_hidden), ""]]
    return text(
        "\n".join(lines + against),
        memory_table(p.memory.stages),
        table("seconds of a step", ["part", "s", "share"], parts),
        table("speed", ["operations counted", "TFLOP/s per GPU", "MFU"], numbers),
        f"{p.tokens_per_second:,.0f} tokens/s, {p.tokens_per_second_per_gpu:,.0f} per GPU",
    )


def memory_table(stages: Sequence[StageMemory]) -> Table:
    """GiB of every stage by part."""
    columns = ["stage", "blocks", "in flight", *MEMORY_PARTS, "total"]
    rows = [
        [
            str(number),
            str(stage.blocks),
            f"{stage.in_flight:.4g}",
            *(f"{getattr(stage, part) / GIB:.2f}" for part in MEMORY_PARTS),
            f"{stage.total / GIB:.2f}",
        ]
        for number, stage in enumerate(stages)
    ]
    return table("GiB of a GPU by stage", columns, rows)


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
