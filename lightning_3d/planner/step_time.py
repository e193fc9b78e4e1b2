"""HOW LONG is a step?  Blocks on stages, the pipeline played through, data parallelism beside it (no torch here)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from lightning_3d.pipeline.schedule import placement, windows_per_rank
from lightning_3d.planner.candidate import Candidate, Job
from lightning_3d.planner.chain import Chain, cut
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.collectives import Group, Links, group_of
from lightning_3d.planner.constants import UPDATE_SPEED, Software, software_named
from lightning_3d.planner.kernels import Kernels
from lightning_3d.planner.playing import Played, Window, play
from lightning_3d.planner.recipes import recipe_named
from lightning_3d.planner.stage_time import Seconds, Speed, block_seconds
from lightning_3d.planner.work import Setting, Work

_WIDTH = {"fp32": 4, "fp64": 8}
_UPDATE = 28.0
"""Bytes that Adam reads and writes per parameter: master, moments and gradient read, all but the gradient written."""


@dataclass(frozen=True)
class Run:
    """A model, where it runs, and how."""

    chain: Chain
    cluster: Cluster
    job: Job
    candidate: Candidate

    @property
    def software(self) -> Software:
        return software_named(self.job.software)

    @property
    def setting(self) -> Setting:
        """What the work of a block depends on."""
        layout, job = self.candidate.layout, self.job
        return Setting(
            tokens=-(-self.candidate.micro_batch * job.seq // layout.cp),
            seq=job.seq,
            samples=self.candidate.micro_batch,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            sp=self.candidate.sequence_parallel,
            flash=self.software.flash,
            width=_WIDTH.get(job.precision, 2),
            fused_gate=self.software.fused_gate,
            keeps_gathered=self.software.keeps_gathered,
            logits=self.software.logits * _WIDTH.get(job.precision, 2) / 2,
            whole_logits=self.software.whole_logits,
            whole_embedding=self.software.whole_embedding,
            whole_head=self.software.whole_embedding and layout.pp > 1,
            keeps_products=self.software.keeps_products,
            narrow=self.software.narrow and job.precision.startswith(("fp8", "fp4")),
        )

    @staticmethod
    def probe_setting(job: Job) -> Setting:
        """A setting without parallelism, to look at a model's blocks."""
        return Setting(tokens=job.seq, seq=job.seq, samples=1)

    def group(self, axis: str) -> Group:
        """The ranks of an axis (dp includes cp: they reduce gradients together)."""
        layout = self.candidate.layout
        inner = layout.tp * layout.cp
        if axis == "tp":
            return group_of(self.cluster, layout.tp, 1)
        if axis == "cp":
            return group_of(self.cluster, layout.cp, layout.tp)
        if self.software.data_inside:
            stride = {"dp": layout.tp, "ep": inner, "pp": inner * layout.dp}[axis]
        else:
            stride = {"dp": inner * layout.pp if layout.cp == 1 else layout.tp, "ep": inner * layout.pp, "pp": inner}[
                axis
            ]
        size = {"dp": layout.dp * layout.cp, "ep": layout.ep, "pp": layout.pp}[axis]
        return group_of(self.cluster, size, stride)

    @property
    def speed(self) -> Speed:
        """How fast blocks run."""
        groups = {axis: self.group(axis) for axis in ("tp", "cp", "ep")}
        kernels = Kernels(self.cluster.gpu, self.job.precision)
        return Speed(kernels, Links(self.cluster), self.software, sp=self.candidate.sequence_parallel, **groups)


@dataclass(frozen=True)
class Stage:
    """What a pipeline rank holds: per window, the numbers of its blocks."""

    windows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part: those of the busiest stage, then what comes on top.

    Attributes:
        compute: Products, attention, elementwise operations.
        recompute: What of them is computed a second time.
        tensor, context, expert: Communication of these axes that nothing hides.
        pipeline: Messages between stages that nothing hides.
        bubble: Idle time of the busiest stage.
        data: Communication over dp that nothing hides.
        data_hidden: The rest of it, beside computation.
        optimizer: The update.
    """

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    bubble: float
    data: float
    data_hidden: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = (self.compute, self.recompute, self.tensor, self.context, self.expert)
        return sum(parts) + self.pipeline + self.bubble + self.data + self.optimizer


def block_times(run: Run) -> tuple[tuple[Work, ...], tuple[Seconds, ...]]:
    """The work and the seconds of a block of each kind."""
    return _block_times(run.chain, run.setting, run.speed, run.candidate.recompute)


@lru_cache(maxsize=8192)
def _block_times(
    chain: Chain, setting: Setting, speed: Speed, recompute: str
) -> tuple[tuple[Work, ...], tuple[Seconds, ...]]:
    works = chain.works(setting)
    seconds = []
    for kind, work in enumerate(works):
        ends = kind in (chain.kinds[0], chain.kinds[-1])
        how = "none" if ends else recompute
        one = block_seconds(work, speed, how, launches=not ends)
        if how == "half":
            one = (one + block_seconds(work, speed, "full")).times(0.5)
        seconds.append(one)
    return works, tuple(seconds)


def windows_of(run: Run) -> tuple[tuple[int, ...], ...]:
    """The blocks of each window of the pipeline.

    Raises:
        ConfigurationError: There are fewer layers than windows.
    """
    layout = run.candidate.layout
    windows = layout.pp * windows_per_rank(layout.schedule, layout.virtual)
    _, seconds = block_times(run)
    costs = tuple(s.whole_forward + s.whole_inputs + s.weights for s in seconds)
    return cut(run.chain.kinds, costs, windows, not run.software.balanced)


def halved_windows(run: Run, windows: tuple[tuple[int, ...], ...]) -> tuple[bool, ...]:
    """Per window (of `windows_of`), whether a split backward leaves the gradients of its weights for later."""
    ends = (run.chain.kinds[0], run.chain.kinds[-1])
    always = run.candidate.recompute == "none" or run.software.splits_recomputed
    return tuple(always or all(run.chain.kinds[block] in ends for block in blocks) for blocks in windows)


def step_time(run: Run, split: bool = True) -> StepTime:
    """Seconds of a step by part.

    Args:
        run: What runs.
        split: Play the step a second time with free messages, to tell the bubble from what messages cost; otherwise
            both are `bubble`.
    """
    layout, candidate = run.candidate.layout, run.candidate
    works, seconds = block_times(run)
    windows = windows_of(run)
    sums = [_sum(seconds, run.chain.kinds, blocks) for blocks in windows]
    send = message_seconds(run)
    virtual = windows_per_rank(layout.schedule, layout.virtual)
    blocking = send if layout.pp > 1 and virtual > 1 and not run.software.pipeline_overlap else 0.0
    played = _played(run, _windows(run, windows, sums, blocking), send)
    free = _played(run, _windows(run, windows, sums, 0.0), 0.0) if send and split else played
    owners = placement(layout.schedule, layout.pp, virtual, layout.order)
    of_rank = [Seconds() for _ in range(layout.pp)]
    for total, owner in zip(sums, owners, strict=True):
        of_rank[owner] += total
    busiest = max(range(layout.pp), key=lambda rank: free.busy[rank])
    one = of_rank[busiest].times(candidate.microbatches)
    batches = run.job.accumulate
    busy = one.whole_forward + one.whole_inputs + one.weights
    data, hidden, update = _data_parallel(run, works, windows, owners, of_rank)
    return StepTime(
        compute=batches * (one.forward + one.inputs + one.weights),
        recompute=batches * one.again,
        tensor=batches * (one.tp_forward + one.tp_backward),
        context=batches * one.cp,
        expert=batches * one.ep,
        pipeline=batches * (played.length - free.length),
        bubble=batches * (free.length - busy),
        data=data,
        data_hidden=hidden,
        optimizer=update,
    )


def estimated_seconds(run: Run) -> float:
    """Seconds of a step without playing it: the busiest stage, the papers' bubble, data parallelism."""
    layout, candidate = run.candidate.layout, run.candidate
    works, seconds = block_times(run)
    windows = windows_of(run)
    virtual = windows_per_rank(layout.schedule, layout.virtual)
    owners = placement(layout.schedule, layout.pp, virtual, layout.order)
    of_rank = [Seconds() for _ in range(layout.pp)]
    later = 0.0  # seconds of the gradients of weights that wait, of a mean rank
    for blocks, owner, halved in zip(windows, owners, halved_windows(run, windows), strict=True):
        total = _sum(seconds, run.chain.kinds, blocks)
        of_rank[owner] += total
        later += total.weights / layout.pp if halved else 0.0
    one = [s.whole_forward + s.whole_inputs + s.weights for s in of_rank]
    mean = Seconds()
    for of_one in of_rank:
        mean += of_one.times(1 / layout.pp)
    whole = mean.whole_forward + mean.whole_inputs + mean.weights
    idle = {"zb_h1": whole - 2 * later, "zb_v": max(0.0, whole - 3 * later) / 2}.get(layout.schedule, whole / virtual)
    send = message_seconds(run)
    messages = 2 * send * (layout.pp - 1) * (1 + candidate.microbatches / layout.pp) if layout.pp > 1 else 0.0
    if virtual > 1 and not run.software.pipeline_overlap:
        messages = 2 * send * virtual * candidate.microbatches
    data, _, update = _data_parallel(run, works, windows, owners, of_rank)
    batch = max(one) * candidate.microbatches + (layout.pp - 1) * max(0.0, idle) + messages
    return batch * run.job.accumulate + data + update


def message_seconds(run: Run) -> float:
    """Seconds of one message from stage to stage."""
    layout, setting = run.candidate.layout, run.setting
    if layout.pp == 1:
        return 0.0
    payload = float(setting.tokens * run.chain.hidden * setting.width)
    if run.candidate.sequence_parallel or run.software.scatter:
        payload /= layout.tp
    stride = layout.tp * layout.cp * (layout.dp if run.software.data_inside else 1)
    return Links(run.cluster).message(payload, stride)


def window_seconds(run: Run) -> tuple[Window, ...]:
    """Seconds of one microbatch in each window: for drawing the step."""
    _, seconds = block_times(run)
    windows = windows_of(run)
    return _windows(run, windows, [_sum(seconds, run.chain.kinds, blocks) for blocks in windows], 0.0)


def _windows(
    run: Run, windows: tuple[tuple[int, ...], ...], sums: list[Seconds], blocking: float
) -> tuple[Window, ...]:
    return tuple(_window(s, blocking, halved) for s, halved in zip(sums, halved_windows(run, windows), strict=True))


def _window(s: Seconds, blocking: float, halved: bool) -> Window:
    inputs = s.whole_inputs + blocking
    return Window(s.whole_forward + blocking, inputs if halved else inputs + s.weights, s.weights if halved else 0.0)


def _sum(seconds: tuple[Seconds, ...], kinds: tuple[int, ...], blocks: tuple[int, ...]) -> Seconds:
    total = Seconds()
    for kind, count in Counter(kinds[block] for block in blocks).items():
        total += seconds[kind].times(count)
    return total


def _played(run: Run, windows: tuple[Window, ...], send: float) -> Played:
    layout = run.candidate.layout
    return play(layout.schedule, layout.pp, run.candidate.microbatches, layout.virtual, windows, send, layout.order)


def _data_parallel(
    run: Run,
    works: tuple[Work, ...],
    windows: tuple[tuple[int, ...], ...],
    owners: tuple[int, ...],
    of_rank: list[Seconds],
) -> tuple[float, float, float]:
    """Seconds over dp that are exposed and hidden, and of the update: of the stage that has most of them."""
    params, trained = [0.0] * run.candidate.layout.pp, [0.0] * run.candidate.layout.pp
    layers = [0] * run.candidate.layout.pp
    each, kinds = [work.params for work in works], run.chain.kinds
    for blocks, owner in zip(windows, owners, strict=True):
        params[owner] += sum(each[kinds[block]].total for block in blocks)
        trained[owner] += sum(each[kinds[block]].trained for block in blocks)
        layers[owner] += len(blocks)
    stages = zip(params, trained, layers, of_rank, strict=True)
    found = [_of_stage(run, held, steps, count, s) for held, steps, count, s in stages]
    return max(found, key=lambda f: (f[0] + f[2], f[1]))


def _of_stage(run: Run, params: float, trained: float, layers: int, seconds: Seconds) -> tuple[float, float, float]:
    layout, software, gpu = run.candidate.layout, run.software, run.cluster.gpu
    recipe, group, links = recipe_named(run.job.recipe), run.group("dp"), Links(run.cluster)
    update = trained * _UPDATE / (group.size if layout.zero else 1) / (gpu.memory_bandwidth * UPDATE_SPEED)
    if group.size == 1:
        return 0.0, 0.0, update

    def takes(op: str, width: float, pieces: int = 1, count: float = trained) -> float:
        return pieces * links.seconds(op, count * width / pieces, group, software.rings)

    pieces = max(1, layers)
    forward, backward = seconds.whole_forward, seconds.whole_inputs + seconds.weights
    if layout.zero == 3:
        times = (1 if layout.pp > 1 and software.gathers_once else run.candidate.microbatches) * run.job.accumulate
        reduces = 1 if software.adds_whole else times
        gather = takes("all_gather", recipe.compute, pieces, params)
        reduce = takes("reduce_scatter", recipe.reduced, pieces)
        backwards = _not_hidden(gather + reduce, backward, software.data_overlap, pieces)
        without = _not_hidden(gather, backward, software.data_overlap, pieces)
        exposed = times * _not_hidden(gather, forward, software.data_overlap, pieces)
        exposed += reduces * backwards + (times - reduces) * without
        return exposed, 2 * times * gather + reduces * reduce - exposed, update
    whole = layout.zero == 0 or (layout.zero == 1 and software.reduces_whole)
    reduce = takes("all_reduce" if whole else "reduce_scatter", recipe.reduced, pieces)
    times = run.candidate.microbatches * run.job.accumulate if layout.zero == 2 else 1
    exposed = times * _not_hidden(reduce, backward, software.data_overlap, pieces)
    gather = takes("all_gather", min(recipe.weight, 4), pieces) if layout.zero else 0.0
    if layout.zero:
        update += software.shard_host * layers * group.size
    exposed += _not_hidden(gather, forward, software.gather_overlap, pieces)
    return exposed, times * reduce + gather - exposed, update


def _not_hidden(communication: float, computation: float, overlap: float, pieces: int) -> float:
    """Of communication in pieces beside computation: what is too much for it, and the piece nothing runs beside."""
    hidden = min(overlap * communication * (1 - 1 / (pieces + 1)), overlap * computation)
    return communication - hidden
