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
from lightning_3d.planner.given import Given, divisors
from lightning_3d.planner.memory import Memory, memory
from lightning_3d.planner.pricing import Priced, price
from lightning_3d.planner.step_time import Run, estimated_seconds, step_time

_GROUPS, _VARIANTS = 12, 2
"""So many sizes of axes, by the best estimate, are played through action by action, and so many ways to run each."""
_CLOSE = 1.4
"""By default only estimates at most this much worse than the best are."""
HEADROOM = 0.05
"""Share of a device that a plan leaves free: about the mean error of the memory model on measured runs."""
LONG = 32768
"""From this sequence length on context parallelism is worth a look."""
_NOTHING_GIVEN = Given()


@dataclass
class Found:
    """What a search found.

    Attributes:
        ranked: Candidates that fit, best first.
        too_large: Of sizes of which no candidate fits, the smallest one, by estimated seconds of a sample, with its
            memory.
        refused: Sizes that do not go with the model, with the reason.
        counted: How many candidates were looked at, by what became of them.
        headroom: Share of every device that must stay free.
    """

    ranked: list[Priced] = field(default_factory=list)
    too_large: list[tuple[float, Run, Memory]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    counted: Counter[str] = field(default_factory=Counter)
    headroom: float = 0.0

    def reasons_once(self) -> list[tuple[str, str]]:
        """The sizes that were refused, those of one reason together."""
        by_reason: dict[str, list[str]] = {}
        for sizes, why in self.refused.items():
            by_reason.setdefault(why, []).append(sizes)
        return [
            (found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more", why)
            for why, found in by_reason.items()
        ]


def search(
    chain: Chain,
    cluster: Cluster,
    job: Job,
    keep: int = 20,
    headroom: float = HEADROOM,
    axes: tuple[str, ...] = ("cp", "ep"),
    given: Given = _NOTHING_GIVEN,
    close: float = _CLOSE,
) -> Found:
    """The best ways to run a job, by seconds of a sample.

    Args:
        chain: The model.
        cluster: Where.
        job: What.
        keep: How many are returned, best first.
        headroom: Share of every device that must stay free.
        axes: Which of "cp" and "ep" to look at besides tp, pp and dp.
        given: What is not to be chosen.
        close: Only estimates at most so many times as long as the best one are played.
    """
    found = Found(headroom=headroom)
    fitting: list[tuple[float, str, Run]] = []
    for layout in layouts(chain, cluster, job, found, axes, given):
        for run in _of_layout(chain, cluster, given.job_of(job, layout), layout, found, given):
            fitting.append((_of_a_sample(estimated_seconds(run), run), str(run.candidate), run))
    fitting.sort(key=lambda entry: entry[:2])
    found.too_large = _hopeless(found.too_large, {_sizes(run) for _, _, run in fitting})
    played = [
        (_of_a_sample(step_time(run, split=False).total, run), str(run.candidate), run)
        for run in _worth_playing(fitting, close)
    ]
    found.counted["played"] = len(played)
    found.ranked = [price(run) for _, _, run in sorted(played, key=lambda entry: entry[:2])[:keep]]
    return found


def _of_a_sample(seconds: float, run: Run) -> float:
    return seconds / run.job.global_batch


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


def _worth_playing(fitting: list[tuple[float, str, Run]], close: float) -> list[Run]:
    """The best estimates, but few of the same sizes, so that the table shows different layouts."""
    groups: dict[tuple[int, ...], list[Run]] = {}
    for seconds, _, run in fitting:
        if seconds > close * fitting[0][0]:
            break
        sizes = _sizes(run)
        if sizes in groups or len(groups) < _GROUPS:
            variants = groups.setdefault(sizes, [])
            if len(variants) < _VARIANTS:
                variants.append(run)
    return [run for variants in groups.values() for run in variants]


def layouts(
    chain: Chain,
    cluster: Cluster,
    job: Job,
    found: Found,
    axes: tuple[str, ...] = ("cp", "ep"),
    given: Given = _NOTHING_GIVEN,
) -> Iterator[Layout]:
    """All sizes of axes and schedules that go with the model, the machines, the batch and what is given."""
    for tp in divisors(cluster.gpus) if given.tp is None else [given.tp]:
        for cp in divisors(cluster.gpus // tp) if job.seq >= LONG and "cp" in axes else [1]:
            if cp > 64 or job.seq % cp:
                continue
            for ep in _expert_sizes(chain, cluster.gpus // (tp * cp)) if "ep" in axes else [1]:
                reason = _refusal(chain, cluster, tp, cp, ep) if given.tp is None else None
                if reason:
                    found.refused.setdefault(*reason)
                    continue
                for pp in divisors(cluster.gpus // (tp * cp)):
                    dp = cluster.gpus // (tp * cp * pp)
                    if dp % ep or not given.allows(pp=pp, dp=dp):
                        continue
                    yield from _of_sizes(chain, job, Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep), found, given)


def _of_sizes(chain: Chain, job: Job, sizes: Layout, found: Found, given: Given) -> Iterator[Layout]:
    """The schedules of these sizes that go with the rest."""
    blocks = len(chain.kinds) - 2
    if given.pp is not None:
        blocks = len(chain.kinds)  # the user's stages may hold the first or the last block alone
    if sizes.pp > max(1, blocks):
        if given.batch is not None:
            found.refused[f"PP={sizes.pp}"] = f"the model has {len(chain.kinds)} pieces to cut between"
        return
    if given.batch is None and job.global_batch % sizes.dp:
        found.counted["batch not divisible by dp"] += 1
        return
    samples = given.batch or job.global_batch // sizes.dp
    if not given.slices(sizes, samples):
        found.refused[f"PP={sizes.pp}"] = f"a batch of {samples} samples has no {given.microbatches} microbatches"
        return
    for layout in _scheduled(sizes, blocks, samples, job.software.startswith("lightning_3d"), given):
        why = given.refuses(replace(layout, zero=given.stages(layout)[0]))
        if why:
            found.refused.setdefault(str(layout), why)
        else:
            yield layout


def _expert_sizes(chain: Chain, ranks: int) -> list[int]:
    """Sizes of the expert axis that divide the experts (all of a domain's size or less)."""
    return [ep for ep in divisors(ranks) if ep == 1 or (ep <= 64 and chain.check(1, 1, ep) is None)]


def _refusal(chain: Chain, cluster: Cluster, tp: int, cp: int, ep: int) -> tuple[str, str] | None:
    if tp > cluster.domain:
        return f"TP={tp}", f"TP={tp} leaves the machine"
    why = chain.check(tp, cp, ep)
    return (f"TP={tp}" if tp > 1 else f"EP={ep}", why) if why else None


def _scheduled(layout: Layout, blocks: int, samples: int, zero_bubble: bool, given: Given) -> Iterator[Layout]:
    """The schedules of these sizes; frameworks other than this library do not split backwards."""
    if layout.pp == 1 and given.schedule in (None, "1f1b"):
        yield layout
        return
    ways = [("1f1b", 1), *(("interleaved_1f1b", virtual) for virtual in (2, 3, 4, 6, 8))]
    ways += [("zb_h1", 1), ("zb_v", 2)] if zero_bubble else []
    if given.schedule is not None:  # also one that is never the best: gpipe
        virtuals = {"interleaved_1f1b": (2, 3, 4, 6, 8), "zb_v": (2,)}.get(given.schedule, (1,))
        ways = [(given.schedule, virtual) for virtual in virtuals]
    for schedule, virtual in ways:
        if schedule == "interleaved_1f1b" and given.virtual is not None:
            virtual = given.virtual
        if given.virtual not in (None, virtual) and not (schedule == "zb_v" and given.virtual == 1):
            continue
        if given.order != "looped" and schedule != "interleaved_1f1b":
            continue
        if virtual * layout.pp > blocks or (schedule == "interleaved_1f1b" and samples < layout.pp):
            continue
        order = given.order if schedule == "interleaved_1f1b" else "looped"
        found = replace(layout, schedule=schedule, virtual=virtual, order=order)
        yield found
        if schedule == "interleaved_1f1b" and given.virtual is not None:
            return


def _of_layout(chain: Chain, cluster: Cluster, job: Job, layout: Layout, found: Found, given: Given) -> Iterator[Run]:
    """For each size of a microbatch, the least ZeRO stage and the least recomputation that fit."""
    samples = job.global_batch // layout.dp // job.accumulate
    windows = layout.pp * windows_per_rank(layout.schedule, layout.virtual)
    for micro, microbatches in given.slices(layout, samples):
        if given.microbatches is None:
            if layout.pp > 1 and (microbatches < layout.pp and micro > 1):
                continue  # a smaller microbatch fills the pipeline better
            if layout.virtual > 1 and layout.schedule == "interleaved_1f1b" and microbatches % layout.pp:
                continue
        assert windows <= len(chain.kinds)
        candidate = Candidate(layout, micro, microbatches, "none", given.sequence(layout.tp))
        yield from _least(chain, cluster, job, candidate, found, given)


def _least(chain: Chain, cluster: Cluster, job: Job, candidate: Candidate, found: Found, given: Given) -> Iterator[Run]:
    layout = candidate.layout
    fits = False
    first: Run | None = None
    least: tuple[Run, Memory] | None = None
    stages, ways = given.stages(layout), given.recomputations()
    for zero in stages:
        if zero != stages[0] and given.refuses(replace(layout, zero=zero)):
            continue
        for recompute in ways:
            way = replace(candidate, layout=replace(layout, zero=zero), recompute=recompute)
            run = Run(chain, cluster, job, way)
            needed = memory(run)
            found.counted["looked at"] += 1
            if needed.fits_with(found.headroom):
                fits = True
                yield run
                break
            first = first or run
            # not always the last: ZeRO-3 in a pipeline gathers all parameters of a stage
            if least is None or needed.peak.total < least[1].peak.total:
                least = run, needed
        if fits and recompute == ways[0]:
            return
    if not fits:
        assert first is not None
        assert least is not None
        found.counted["too large"] += 1
        found.too_large.append((_of_a_sample(estimated_seconds(first), first), *least))


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
