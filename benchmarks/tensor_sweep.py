"""HOW broad is tensor parallelism?  Plan and prove every causal language model of the installed transformers.

    python benchmarks/tensor_sweep.py                        # all architectures, tp=2 and tp=4; writes the page
    python benchmarks/tensor_sweep.py --only llama,bloom --no-write --plans

Every architecture is built from its configuration class with tiny sizes and random weights. The plan is made for 2 and
for 4 ranks, and `verify_tensor_plan` compares loss and every gradient with one process, in float64. Exit code 1 if any
result is wrong.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import signal
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # started as a file
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.tiny_models import NAMES, VOCABULARY, build  # noqa: E402
from lightning_3d.errors import TensorPlanError  # noqa: E402
from lightning_3d.observe import plain_table, show  # noqa: E402
from lightning_3d.tensor import TensorPlan, plan_tensor_parallel, verify_tensor_plan  # noqa: E402

PAGE = ROOT / "docs" / "tensor-sweep.md"
SIZES = (2, 4)
EXACT = 1e-9
GOOD = 0.9


class OutOfTime(BaseException):
    """Not an `Exception`: model code must not catch it."""


@dataclass
class Run:
    """One architecture on one number of ranks.

    Attributes:
        status: "exact", "wrong", "refused" (an error that says so) or "no time".
        whole: Why the largest parameters that stay whole do so.
    """

    size: int
    status: str = "refused"
    error: float = float("nan")
    share: float = float("nan")
    gathers: int = 0
    reason: str = ""
    whole: list[str] = field(default_factory=list)


@dataclass
class Architecture:
    """What the sweep found about one architecture; `reason` says why its reference does not run, if it does not."""

    name: str
    reason: str = ""
    runs: list[Run] = field(default_factory=list)
    seconds: float = 0.0


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `OutOfTime` when this process has used so many seconds of CPU (what others do does not count)."""

    def over(*_: Any) -> None:
        raise OutOfTime(f"longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def step(model: Any) -> Tensor:
    """One training step on twelve tokens; the loss of the model itself. Decoders made for an encoder get its states."""
    generator = torch.Generator().manual_seed(2)
    index = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    extra = {}
    if reads_encoder(model):
        some = next(model.parameters())
        states = torch.randn(2, 8, model.config.get_text_config(decoder=True).hidden_size, generator=generator)
        extra["encoder_hidden_states"] = states.to(some.dtype)
    return model(input_ids=index, labels=index, **extra).loss


def reads_encoder(model: nn.Module) -> bool:
    """Its blocks have cross-attention."""
    crosses = any("encoder_attn" in name or "cross_attn" in name for name, _ in model.named_modules())
    return crosses and "encoder_hidden_states" in inspect.signature(model.forward).parameters


def one_line(error: BaseException) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder="...")


def sweep_one(name: str, sizes: Sequence[int], limit: int, plans: bool, trace: bool) -> Architecture:
    """Build, run the reference, then plan and prove for every number of ranks."""
    found, begin = Architecture(name), time.process_time()
    try:
        with time_limit(limit):
            model = build(name)
            loss = step(model)
            loss.backward()
            unused = {n for n, p in model.named_parameters() if p.grad is None}
            model.zero_grad()
            if not torch.isfinite(loss):
                raise FloatingPointError("the loss is not finite")
    except (Exception, OutOfTime) as error:
        found.reason = one_line(error)
        if trace:
            traceback.print_exc()
        return found
    for size in sizes:
        found.runs.append(prove(model, unused, size, limit, plans, trace))
    found.seconds = time.process_time() - begin
    return found


def prove(model: nn.Module, unused: set[str], size: int, limit: int, plans: bool, trace: bool) -> Run:
    """Plan for `size` ranks and compare with one process."""
    run = Run(size)
    try:
        with time_limit(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = plan_tensor_parallel(model, step, size)
            run.share, run.whole = share_and_rest(plan, unused)
            if plans:
                print(plan, flush=True)
            report = verify_tensor_plan(model, plan, step)
            run.error, run.gathers = report.worst, report.gathers
            run.status = "exact" if report.worst <= EXACT else "wrong"
            if run.status == "wrong":
                run.reason = str(report)
    except OutOfTime as error:
        run.status, run.reason = "no time", str(error)
    except Exception as error:
        run.reason = one_line(error)
        run.status = "refused" if isinstance(error, TensorPlanError) else "wrong"
        if trace:
            traceback.print_exc()
    return run


def share_and_rest(plan: TensorPlan, unused: set[str], count: int = 4) -> tuple[float, list[str]]:
    """Part of the parameters this step uses that is divided; the largest that stay whole, with the reason."""
    sizes = {n: math.prod(shape) for n, shape in plan.shapes.items() if n not in plan.aliases and n not in unused}
    total = sum(sizes.values())
    whole: dict[tuple[str, tuple[int, ...], str], int] = {}
    for name, elements in sizes.items():
        decision = plan.decisions[name]
        if decision.placement is None:
            key = (plan.patterns[name], plan.shapes[name], decision.reason)
            whole[key] = whole.get(key, 0) + elements
    rest = sorted(whole.items(), key=lambda item: -item[1])[:count]
    texts = [f"{n / total:.0%} {name} {shape}: {reason[:140]}" for (name, shape, reason), n in rest]
    return 1 - sum(whole.values()) / total, texts


# ---------------------------------------------------------------- what is shown
def cells(found: Architecture) -> list[str]:
    """One row of the table."""
    if not found.runs:
        return [found.name, *[""] * (3 * len(SIZES)), f"not run: {found.reason}"]
    row = [found.name]
    for run in found.runs:
        share = "" if run.share != run.share else f"{run.share:.2f}"
        row += [f"{run.error:.0e}" if run.error == run.error else "", share, str(run.gathers)]
    states = list(dict.fromkeys(run.status for run in found.runs))
    text = "/".join(run.status for run in found.runs) if len(states) > 1 else states[0]
    reasons = [run.reason for run in found.runs if run.reason]
    row += [""] * (len(COLUMNS) - 1 - len(row))
    return [*row, f"{text}: {reasons[0]}" if reasons else text]


COLUMNS = ["architecture", *(f"{what}, tp={n}" for n in SIZES for what in ("error", "share", "gathers")), "result"]


def summary(results: Sequence[Architecture], sizes: Sequence[int]) -> list[str]:
    """The counts, in sentences."""
    ran = [r for r in results if r.runs]
    lines = [
        f"{len(results)} architectures of transformers {transformers.__version__}; {len(ran)} run with a tiny "
        f"configuration, {len(results) - len(ran)} do not (the reason is in the table)."
    ]
    for i, size in enumerate(sizes):
        runs = [r.runs[i] for r in ran]
        count = {s: sum(r.status == s for r in runs) for s in ("exact", "wrong", "refused", "no time")}
        shares = [r.share for r in runs if r.status == "exact"]
        good = sum(s >= GOOD for s in shares)
        worst = max((r.error for r in runs if r.status == "exact"), default=0.0)
        lines.append(
            f"tp={size}: {count['exact']} exact (largest relative error of loss and gradients {worst:.0e}), "
            f"{count['wrong']} wrong, {count['refused']} refused with an error, {count['no time']} out of time; at "
            f"least {GOOD:.0%} of the parameters divided in {good}, median {median(shares or [0]):.0%}."
        )
    return lines


def markdown(results: Sequence[Architecture]) -> str:
    below = [
        f"- **{r.name}** ({r.runs[0].share:.2f}): " + "; ".join(r.runs[0].whole)
        for r in results
        if r.runs and r.runs[0].status == "exact" and r.runs[0].share < GOOD
    ]
    head = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 2)}---|"
    body = "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in cells(r)) + " |" for r in results)
    return (
        "\n\n".join(
            [
                "# Tensor parallelism: every causal language model of transformers",
                "Written by `benchmarks/tensor_sweep.py`. Each architecture is built from its configuration class with "
                "tiny sizes and random weights, planned without any hint, and proved: loss and the gradient of every "
                f"parameter against one process, in float64; exact means within {EXACT:.0e}. *Share* is the part of "
                "the parameters the step uses that is divided over the ranks; *gathers* counts operations without a "
                "sharded form that made a rank gather (right, but slow). Norms, routers and small tables stay whole; "
                "a tiny model they weigh more than in a real one.",
                "\n".join(f"- {line}" for line in summary(results, SIZES)),
                head + "\n" + body,
                f"## Below {GOOD:.0%} at tp={SIZES[0]}\n\nThe largest parameters that stay whole, and why. "
                "What they have in common: recurrences in a Python loop that meet whole tensors at every step; a fused "
                "projection of heads that can be dealt and of one all ranks would need (a single key/value head, a "
                "single group of a state-space block); small layers that feed no second one.",
                "\n".join(below) or "None.",
            ]
        )
        + "\n"
    )


def sweep(names: Sequence[str], each: Callable[[str], Architecture], jobs: int) -> list[Architecture]:
    """All of them, under a progress bar, a line each as they come."""
    console = Console(stderr=True)
    parts = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    results = []
    workers = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
    with Progress(*parts, console=console, disable=not console.is_terminal) as bar, workers as pool:
        task = bar.add_task("", total=len(names))
        for found in pool.map(each, names):
            bar.update(task, description=found.name)
            results.append(found)
            console.print("  ".join(cells(found)), highlight=False, soft_wrap=True)
            bar.advance(task)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="architectures, separated by commas")
    parser.add_argument("--limit", type=int, default=60, help="seconds of CPU for each plan and proof")
    parser.add_argument("--sizes", default="2,4", help="numbers of tensor-parallel ranks")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--no-write", action="store_true", help="do not write the page")
    parser.add_argument("--plans", action="store_true", help="print every plan")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else NAMES
    sizes = [int(n) for n in options.sizes.split(",")]
    each = partial(sweep_one, sizes=sizes, limit=options.limit, plans=options.plans, trace=options.trace)
    results = sweep(names, each, options.jobs)
    rows = [cells(r) for r in results]
    show(plain_table("tensor parallelism, every causal LM", COLUMNS, rows, right=COLUMNS[1:-1], wrap=COLUMNS[-1:]))
    show(*summary(results, sizes))
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))
    if not options.no_write:
        PAGE.write_text(markdown(results))
    return int(any(run.status == "wrong" for r in results for run in r.runs))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
