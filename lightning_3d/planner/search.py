"""WHICH candidates are there, and which of them are best?  Enumeration, memory, an estimate, then the played step.

Nothing here is random and ties are broken by name, so the same question has the same answer on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.pipeline.schedule import windows_per_rank
from lightning_3d.planner.candidate import Candidate, Job
from lightning_3d.planner.chain import Chain
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.memory import Memory, memory
from lightning_3d.planner.pricing import Priced, price
from lightning_3d.planner.step_time import Run, estimated_seconds, step_time

_GROUPS, _VARIANTS = 12, 2
"""So many sizes of axes, by the best estimate, are played through action by action, and so many ways to run each."""
_CLOSE = 1.4
"""Only estimates at most this much worse than the best are."""
HEADROOM = 0.05
"""Share of a device that a plan leaves free: about the mean error of the memory model on measured runs."""
LONG = 32768
"""From this sequence length on context parallelism is worth a look."""


@dataclass
class Found:
    """What a search found.

    Attributes:
        ranked: Candidates that fit, best first.
        too_large: Of sizes of which no candidate fits, the smallest one, by estimated seconds, with its memory.
        refused: Sizes that do not go with the model, with the reason.
        counted: How many candidates were looked at, by what became of them.
        headroom: Share of every device that must stay free.
    """

    ranked: list[Priced] = field(default_factory=list)
    too_large: list[tuple[float, Run, Memory]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    counted: Counter[str] = field(default_factory=Counter)
    headroom: float = 0.0


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def search(
    chain: Chain,
    cluster: Cluster,
    job: Job,
    keep: int = 20,
    headroom: float = HEADROOM,
    axes: tuple[str, ...] = ("cp", "ep"),
) -> Found:
    """The best ways to run a job.

    Args:
        chain: The model.
        cluster: Where.
        job: What.
        keep: How many are returned, best first.
        headroom: Share of every device that must stay free.
        axes: Which of "cp" and "ep" to look at besides tp, pp and dp.
    """
    found = Found(headroom=headroom)
    fitting: list[tuple[float, str, Run]] = []
    for layout in layouts(chain, cluster, job, found, axes):
        for run in _of_layout(chain, cluster, job, layout, found):
            fitting.append((estimated_seconds(run), str(run.candidate), run))
    fitting.sort(key=lambda entry: entry[:2])
    found.too_large = _hopeless(found.too_large, {_sizes(run) for _, _, run in fitting})
    played = [(step_time(run, split=False).total, str(run.candidate), run) for run in _worth_playing(fitting)]
    found.counted["played"] = len(played)
    found.ranked = [price(run) for _, _, run in sorted(played, key=lambda entry: entry[:2])[:keep]]
    return found


def _sizes(run: Run) -> tuple[int, ...]:
    layout = run.candidate.layout
    return (layout.tp, layout.pp, layout.cp, layout.ep)


def _hopeless(
    too_large: list[tuple[float, Run, Memory]], fitting: set[tuple[int, ...]]
) -> list[tuple[float, Run, Memory]]:
    """Of each size of which nothing fits, what needs least memory; the fastest first."""
    smallest: dict[tuple[int, ...], tuple[float, Run, Memory]] = {}
    for entry in too_large:
        sizes = _sizes(entry[1])
        if sizes not in fitting and (sizes not in smallest or entry[2].peak.total < smallest[sizes][2].peak.total):
            smallest[sizes] = entry
    return sorted(smallest.values(), key=lambda entry: (entry[0], str(entry[1].candidate)))


def _worth_playing(fitting: list[tuple[float, str, Run]]) -> list[Run]:
    """The best estimates, but few of the same sizes, so that the table shows different layouts."""
    groups: dict[tuple[int, ...], list[Run]] = {}
    for seconds, _, run in fitting:
        if seconds > _CLOSE * fitting[0][0]:
            break
        sizes = _sizes(run)
        if sizes in groups or len(groups) < _GROUPS:
            variants = groups.setdefault(sizes, [])
            if len(variants) < _VARIANTS:
                variants.append(run)
    return [run for variants in groups.values() for run in variants]


def layouts(
    chain: Chain, cluster: Cluster, job: Job, found: Found, axes: tuple[str, ...] = ("cp", "ep")
) -> Iterator[Layout]:
    """All sizes of axes and schedules that go with the model, the machines and the batch."""
    blocks = len(chain.kinds) - 2
    for tp in divisors(cluster.gpus):
        for cp in divisors(cluster.gpus // tp) if job.seq >= LONG and "cp" in axes else [1]:
            if cp > 64 or job.seq % cp:
                continue
            for ep in _expert_sizes(chain, cluster.gpus // (tp * cp)) if "ep" in axes else [1]:
                reason = _refusal(chain, cluster, tp, cp, ep)
                if reason:
                    found.refused.setdefault(*reason)
                    continue
                for pp in divisors(cluster.gpus // (tp * cp)):
                    dp = cluster.gpus // (tp * cp * pp)
                    if pp > max(1, blocks) or dp % ep:
                        continue
                    if job.global_batch % dp:
                        found.counted["batch not divisible by dp"] += 1
                        continue
                    sizes = Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
                    ours = job.software.startswith("lightning_3d")
                    yield from _scheduled(sizes, blocks, job.global_batch // dp, ours)


def _expert_sizes(chain: Chain, ranks: int) -> list[int]:
    """Sizes of the expert axis that divide the experts (all of a domain's size or less)."""
    return [ep for ep in divisors(ranks) if ep == 1 or (ep <= 64 and chain.check(1, 1, ep) is None)]


def _refusal(chain: Chain, cluster: Cluster, tp: int, cp: int, ep: int) -> tuple[str, str] | None:
    if tp > cluster.domain:
        return f"TP={tp}", f"TP={tp} leaves the machine"
    why = chain.check(tp, cp, ep)
    return (f"TP={tp}" if tp > 1 else f"EP={ep}", why) if why else None


def _scheduled(layout: Layout, blocks: int, samples: int, zero_bubble: bool) -> Iterator[Layout]:
    """The schedules of these sizes; frameworks other than this library do not split backwards."""
    if layout.pp == 1:
        yield layout
        return
    yield layout
    for virtual in (2, 3, 4, 6, 8):
        if virtual * layout.pp <= blocks and samples >= layout.pp:
            yield replace(layout, schedule="interleaved_1f1b", virtual=virtual)
    if not zero_bubble:
        return
    yield replace(layout, schedule="zb_h1")
    if 2 * layout.pp <= blocks:
        yield replace(layout, schedule="zb_v", virtual=2)


def _of_layout(chain: Chain, cluster: Cluster, job: Job, layout: Layout, found: Found) -> Iterator[Run]:
    """For each size of a microbatch, the least ZeRO stage and the least recomputation that fit."""
    samples = job.global_batch // layout.dp
    windows = layout.pp * windows_per_rank(layout.schedule, layout.virtual)
    for micro in (m for m in (1, 2, 4, 8, 16, 32) if samples % m == 0):
        microbatches = samples // micro
        if layout.pp > 1 and (microbatches < layout.pp and micro > 1):
            continue  # a smaller microbatch fills the pipeline better
        if layout.virtual > 1 and layout.schedule == "interleaved_1f1b" and microbatches % layout.pp:
            continue
        assert windows <= len(chain.kinds)
        yield from _least(chain, cluster, job, Candidate(layout, micro, microbatches, "none", layout.tp > 1), found)


def _least(chain: Chain, cluster: Cluster, job: Job, candidate: Candidate, found: Found) -> Iterator[Run]:
    layout = candidate.layout
    fits = False
    for zero in (1, 2, 3) if layout.dp * layout.cp > 1 else (1,):
        for recompute in ("none", "selective", "full"):
            way = replace(candidate, layout=replace(layout, zero=zero), recompute=recompute)
            run = Run(chain, cluster, job, way)
            needed = memory(run)
            found.counted["looked at"] += 1
            if needed.fits_with(found.headroom):
                fits = True
                yield run
                break
            if recompute == "none" and zero == 1:
                first = (run, needed)
        if fits and recompute == "none":
            return
    if not fits:
        found.counted["too large"] += 1
        found.too_large.append((estimated_seconds(first[0]), *(run, needed)))


def least_gpus(chain: Chain, cluster: Cluster, job: Job, most: int = 65536) -> int | None:
    """The smallest number of GPUs (whole machines, or a part of one) on which some layout fits.

    The number of samples is not looked at, only memory: full recomputation, microbatches of one sample, ZeRO 3.
    """
    sizes = [n for n in divisors(cluster.gpus_per_node) if n < cluster.gpus_per_node]
    step = cluster.gpus_per_node
    low, high = 0, 1
    for gpus in sizes:
        if _some_fits(chain, cluster, job, gpus):
            return gpus
    while not _some_fits(chain, cluster, job, high * step):
        low, high = high, high * 2
        if high * step > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _some_fits(chain, cluster, job, middle * step) else (middle, high)
    return high * step


def _some_fits(chain: Chain, cluster: Cluster, job: Job, gpus: int) -> bool:
    smaller = replace(cluster, gpus=gpus, gpus_per_node=min(gpus, cluster.gpus_per_node), nics=0)
    for tp in divisors(gpus):
        if tp > smaller.domain or chain.check(tp, 1, 1):
            continue
        for pp in divisors(gpus // tp):
            if pp > max(1, len(chain.kinds) - 2):
                continue
            layout = Layout(tp=tp, pp=pp, dp=gpus // tp // pp, zero=3 if gpus > tp * pp else 1)
            run = Run(chain, smaller, job, Candidate(layout, 1, max(1, 4 * pp), "full", tp > 1))
            if memory(run).fits_with(HEADROOM):
                return True
    return False


def check_shapes(chain: Chain, cluster: Cluster, candidate: Candidate) -> None:
    """Refuse a candidate whose sizes do not go with the model or the machines.

    Raises:
        ConfigurationError: They do not.
    """
    layout = candidate.layout
    why = chain.check(layout.tp, layout.cp, layout.ep)
    if why:
        raise ConfigurationError(f"{layout}: {why} of {chain.name}. Choose a size that divides it.")
    windows = layout.pp * windows_per_rank(layout.schedule, layout.virtual)
    if windows > len(chain.kinds) - 2 > 0:
        raise ConfigurationError(
            f"{layout}: {len(chain.kinds) - 2} layers cannot be cut into {windows} parts (pp {layout.pp} x virtual "
            f"{windows // layout.pp}). Choose a smaller pp, or fewer parts per rank."
        )
    if layout.world_size != cluster.gpus:
        raise ConfigurationError(f"{layout} needs {layout.world_size} GPUs, but the cluster has {cluster.gpus}.")
