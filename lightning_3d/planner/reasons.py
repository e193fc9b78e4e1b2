"""WHY this layout and not another?  One sentence each, with the numbers that decide (no torch here)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.planner.candidate import Candidate, Job
from lightning_3d.planner.hardware import GB, GIB
from lightning_3d.planner.memory import Memory, StageMemory
from lightning_3d.planner.pricing import Priced, price
from lightning_3d.planner.search import Found
from lightning_3d.planner.step_time import Run, block_times

if TYPE_CHECKING:
    from lightning_3d.planner.planning import Plan

_PARTS = {
    "compute": "computes longer (smaller or more awkward products)",
    "recompute": "computes more activations twice",
    "tensor": "waits longer for tensor-parallel communication",
    "context": "waits longer for keys and values",
    "expert": "waits longer for experts",
    "pipeline": "waits longer for messages between stages",
    "bubble": "has stages that idle longer",
    "data": "waits longer for the data-parallel axis",
    "optimizer": "updates more parameters per GPU",
}
_TOO_LARGE = 4
LEAST = "Nothing else with these sizes needs less."


def slower_because(other: Priced, best: Priced) -> str:
    """What costs another layout most of its time, relative to the best."""
    if other is best:
        return "the shortest step"
    batches = other.run.job.global_batch, best.run.job.global_batch
    more = {part: getattr(other.time, part) / batches[0] - getattr(best.time, part) / batches[1] for part in _PARTS}
    worst = max(more, key=lambda part: more[part])
    return f"{_PARTS[worst]}: +{100 * more[worst] / best.seconds_per_sample:.1f} %"


def why_best(plan: Plan) -> str:
    """Why the best layout is the best, in a sentence or two, with what came next and what is out."""
    best = plan.best
    said = f"{best} trains most samples per second: {best.samples_per_second:.4g} predicted"
    others = [p for p in plan.ranked[1:] if p.run.candidate.layout != best.run.candidate.layout]
    if others:
        less = 100 * (1 - others[0].samples_per_second / best.samples_per_second)
        said += f"; next is {others[0]} with {less:.1f} % fewer, because it {slower_because(others[0], best)}"
    out = [f"{sizes}: {why.removesuffix('.')}" for sizes, why in plan.rejected[:2]]
    return f"{said}. " + (f"Ruled out: {'; '.join(out)}." if out else "No faster one is ruled out.")


def rejections(found: Found, best: Priced | None) -> list[tuple[str, str]]:
    """The most tempting candidates that are out, each with its reason."""
    reasons: list[tuple[str, str]] = []
    if best is not None:
        leaving = _leaves_the_machine(best)
        if leaving:
            reasons.append(leaving)
    reasons += [(size, f"{why}.") for size, why in found.reasons_once() if "leaves" not in why][:_TOO_LARGE]
    for seconds, run, needed in found.too_large:
        if best is not None and seconds >= best.seconds_per_sample:
            break
        reasons.append((str(run.candidate), f"{too_large_because(needed)} {LEAST}"))
        if len(reasons) >= 2 * _TOO_LARGE:
            break
    skipped = found.counted["batch not divisible by dp"]
    if skipped:
        reasons.append((f"{skipped} sizes", "their dp does not divide the global batch."))
    return reasons


def too_large_because(needed: Memory) -> str:
    """Which stage does not fit, and what fills it."""
    stage, peak = needed.worst, needed.peak
    where = f"stage {stage}" if len(needed.stages) > 1 else "every GPU"
    return (
        f"{where} would need {peak.total / GIB:.1f} GiB of {needed.available / GIB:.1f}: model states "
        f"{peak.states / GIB:.1f}, activations of {peak.in_flight:.4g} microbatch{'es' if peak.in_flight != 1 else ''} "
        f"in flight {peak.activations / GIB:.1f}, {_largest(peak)} {getattr(peak, _largest(peak)) / GIB:.1f}, the rest "
        f"{(peak.total - peak.states - peak.activations - getattr(peak, _largest(peak))) / GIB:.1f}."
    )


def _largest(stage: StageMemory) -> str:
    """The largest part of what is neither model states nor activations."""
    return max(("buffers", "passing", "reserve", "context"), key=lambda part: float(getattr(stage, part)))


def _leaves_the_machine(best: Priced) -> tuple[str, str] | None:
    """What the next larger tensor-parallel size would cost, if it had to go over the network."""
    run = best.run
    cluster, layout = run.cluster, run.candidate.layout
    tp = 2 * cluster.domain
    if cluster.gpus % (tp * layout.cp) or run.chain.check(tp, layout.cp, layout.ep):
        return None
    pp = layout.pp
    while cluster.gpus % (tp * layout.cp * pp):
        pp -= 1
    sizes = Layout(tp=tp, pp=pp, dp=cluster.gpus // (tp * layout.cp * pp), cp=layout.cp, zero=1)
    samples = run.job.global_batch / sizes.dp / run.job.accumulate
    if samples != int(samples):
        return None
    micro = next(m for m in (run.candidate.micro_batch, 1) if samples % m == 0)
    candidate = Candidate(sizes, micro, int(samples) // micro, run.candidate.recompute, True)
    try:
        other = price(replace(run, candidate=candidate))
    except ConfigurationError:
        return None
    works, _ = block_times(other.run)
    kinds = other.run.chain.kinds
    calls = sum(2 * works[kind].tp_calls for kind in kinds[1:-1])
    slow = cluster.nic * cluster.nics / cluster.gpus_per_node / GB
    return (
        f"TP={tp}",
        f"TP={tp} leaves the machine: {calls} all-reduces per microbatch of {_mb(other)} MB over {slow:.4g} GB/s per "
        f"GPU instead of {cluster.gpu.link / GB:.4g}; {other.time.tensor:.1f} s of a step of {other.seconds:.1f} s "
        f"(best: {best.seconds:.1f} s), MFU {100 * other.mfu():.0f} % instead of {100 * best.mfu():.0f} %.",
    )


def _mb(priced: Priced) -> str:
    works, _ = block_times(priced.run)
    return f"{max(work.tp_payload for work in works) / 1e6:.3g}"


def not_run(job: Job) -> str | None:
    """What is priced although this version does not run it."""
    if not job.precision.startswith(("fp8", "fp4")) or not job.software.startswith("lightning_3d"):
        return None
    return (
        f"note: {job.precision} is priced, but this version of lightning_3d has no products in {job.precision}: in a "
        "run they are in bf16. For what it does today, plan with --precision bf16."
    )


def not_here_yet(run: Run) -> str | None:
    """Why this version cannot run a layout that the planner can price."""
    if not run.job.software.startswith("lightning_3d"):
        return None
    try:
        run.candidate.layout.check_supported()
    except ConfigurationError as error:
        return str(error)
    return None
