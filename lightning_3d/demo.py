"""DOES it work here?  Train a GPT with TP x PP x DP in 8 processes and beside it in one, and compare.

Everything runs on the CPU of this machine (gloo). The two runs are child processes (`lightning_3d.demo_run`); this file
starts them, reads what they wrote, and shows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from lightning_3d.demo_run import load_example
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.observe import (
    LedgerRow,
    ascii_timeline,
    bubble,
    draw_losses,
    draw_timeline,
    ledger_rows_table,
    load_traces,
    plain_table,
    save_chrome_trace,
    show,
    timeline_of,
)
from lightning_3d.observe.tables import byte_text

LAYOUT = Layout(tp=2, pp=2, dp=2, zero=1, schedule="1f1b")
MICROBATCHES = 8
STEPS, FAST_STEPS = 80, 8
TOLERANCE = 3e-4
"""Largest relative difference of two losses that still counts as float32 rounding. Another order of summation starts
1e-7 apart and training amplifies it: one process that adds up the batch in 8 parts ends up to 7e-6 from itself in 80
steps, the layout up to 3e-5 (measured); a gradient that lacks the part of one rank is off by percents at once."""
RUN_TIMEOUT = 900.0


def run_demo(output: Path, *, steps: int | None = None, fast: bool = False) -> bool:
    """Run both trainings and show the comparison.

    Args:
        output: Folder for pictures, traces and results; what an earlier demo left in its subfolders is replaced.
        steps: Optimizer steps of each run.
        fast: A tiny model and few steps.

    Returns:
        Whether the two runs agree within `TOLERANCE`.

    Raises:
        ConfigurationError: There is no examples folder, or a run failed.
    """
    load_example()
    steps = steps or (FAST_STEPS if fast else STEPS)
    began = time.perf_counter()
    show(
        f"A GPT, trained {steps} steps on the source of Python's standard library, in float32, on {os.cpu_count()} CPU "
        f"cores:\n  1. in one process, plain Lightning\n  2. in {LAYOUT.world_size} processes: "
        f"TP {LAYOUT.tp} x PP {LAYOUT.pp} x DP {LAYOUT.dp}, ZeRO-{LAYOUT.zero}, {LAYOUT.schedule.upper()} with "
        f"{MICROBATCHES} microbatches\nThe module is examples/train_gpt.py; it does not know which of the two it is.\n"
    )
    one = _run("one", output / "one", steps, fast)[0]
    ranks = _run("layout", output / "layout", steps, fast)
    agree = _show_losses(one, ranks[0], output)
    _show_speed(one, ranks[0])
    show("", _memory_table(one, ranks))
    show(ledger_rows_table([LedgerRow(**row) for row in ranks[0]["ledger"]], "communication of rank 0 in one step"))
    _show_timeline(output)
    show(f"\nThe whole demo took {time.perf_counter() - began:.0f} s.")
    return agree


def _run(mode: str, folder: Path, steps: int, fast: bool) -> list[dict[str, Any]]:
    """Train in child processes; returns what every rank measured, in order of rank."""
    shutil.rmtree(folder, ignore_errors=True)
    title = "one process" if mode == "one" else f"{LAYOUT.world_size} processes, {LAYOUT}"
    show(f"--- {title}")
    command = [sys.executable, "-m", "lightning_3d.demo_run", "--mode", mode, "--layout", str(LAYOUT)]
    command += ["--microbatches", str(MICROBATCHES), "--output", str(folder.resolve()), "--steps", str(steps)]
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if mode == "layout" else {})}
    code = _wait(subprocess.Popen(command + ["--fast"] * fast, env=environment, start_new_session=True))
    files = sorted(folder.glob("rank*.json"))
    wanted = 1 if mode == "one" else LAYOUT.world_size
    if code != 0 or len(files) != wanted:
        raise ConfigurationError(
            f"the run {title!r} ended with exit code {code} and {len(files)} of {wanted} results; its output above "
            f"says why. To repeat it alone: {' '.join(command)}"
        )
    return [json.loads(file.read_text()) for file in files]


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a run; whatever ends the waiting, none of its processes is left behind."""
    try:
        return process.wait(timeout=RUN_TIMEOUT)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _show_losses(one: dict[str, Any], layout: dict[str, Any], output: Path) -> bool:
    worst = 0.0
    rows = []
    for name in ("train", "validation"):
        pairs = list(zip(one[name], layout[name], strict=True))
        shown = set(range(0, len(pairs), max(1, len(pairs) // 8))) | {len(pairs) - 1} if name == "train" else None
        for i, ((step, a), (_, b)) in enumerate(pairs):
            difference = abs(a - b) / abs(a)
            worst = max(worst, difference)
            if shown is None or i in shown:
                rows.append([name, str(step), f"{a:.6f}", f"{b:.6f}", f"{difference:.1e}"])
    names = ["one process", layout["layout"]]
    show("", plain_table("loss", ["", "step", *names, "relative difference"], rows, right=["step", *names]))
    curves = dict(zip(names, (one["train"], layout["train"]), strict=True))
    points = {f"{n}, validation": v for n, v in zip(names, (one["validation"], layout["validation"]), strict=True)}
    title = f"The same module, two ways (largest relative difference {worst:.1e})"
    path = draw_losses(curves, output / "loss.png", points=points, title=title)
    agree = worst <= TOLERANCE
    verdict = "float32 rounding" if agree else f"MORE THAN ROUNDING (limit {TOLERANCE:g}): please report this"
    show(f"largest relative difference of the losses: {worst:.1e} ({verdict})", f"drawn in {path}")
    return agree


def _show_speed(one: dict[str, Any], layout: dict[str, Any]) -> None:
    rows = []
    for run in (one, layout):
        # the first step holds set-up; the median is not moved by a step that was disturbed
        seconds = median(run["seconds"][1:] or run["seconds"])
        rows.append([run["layout"], f"{1000 * seconds:.0f} ms", f"{run['tokens_per_step'] / seconds:,.0f}"])
    columns = ["run", "median step", "tokens/s"]
    show("", plain_table("speed", columns, rows, right=columns[1:]))
    show(
        f"{LAYOUT.world_size} processes share {os.cpu_count()} cores here: this shows what communication and waiting "
        "cost, not a speed-up."
    )


def _memory_table(one: dict[str, Any], ranks: list[dict[str, Any]]) -> Table:
    kinds = ["parameters", "gradients", "optimizer"]
    rows = []
    for run in [one, *ranks]:
        place = "one process" if run is one else f"rank {run['rank']}: replica {run['dp']} stage {run['stage']}"
        place += "" if run is one else f" tp {run['tp']}"
        cells = [f"{byte_text(run['memory'][k])} ({run['memory'][k] / one['memory'][k]:.0%})" for k in kinds]
        rows.append([place, *cells])
    return plain_table("bytes held", ["", *kinds], rows, right=kinds)


def _show_timeline(output: Path) -> None:
    traces = load_traces(output / "layout")
    timeline = timeline_of(traces)
    note = f"{LAYOUT.world_size} ranks share {os.cpu_count()} cores: an action's length includes waiting for a core"
    picture = draw_timeline(timeline, output / "pipeline.png", note=note)
    viewer = save_chrome_trace(traces, output / "pipeline_trace.json")
    show("", f"one step of replica 0 as measured (step {timeline.step}):", ascii_timeline(timeline.replica()))
    show(str(bubble(timeline)), f"({note})")
    show(f"drawn in {picture}", f"for a trace viewer (Perfetto): {viewer}")
