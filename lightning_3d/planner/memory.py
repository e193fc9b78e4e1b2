"""HOW MUCH memory does a rank need, and for what?  Stage by stage, at the worst moment of a step (no torch here)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lightning_3d.pipeline.schedule import placement, windows_per_rank
from lightning_3d.planner.playing import in_flight
from lightning_3d.planner.recipes import Recipe, States, recipe_named, states
from lightning_3d.planner.step_time import Run, block_times, halved_windows, windows_of
from lightning_3d.planner.work import Params, Work

_UNFIT = 0.5
"""Share of what passes in one kind of block that the allocator cannot put where another kind's was (sizes differ)."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one pipeline rank by part.

    Attributes:
        weights, gradients, optimizer: Model states.
        buffers: Communication: buckets; in ZeRO-3 the parameters that are gathered.
        activations: What is kept for the backward, of all microbatches in flight.
        passing: What lives only while a block runs: a layer that is computed again, gathered inputs, logits.
        reserve: What the allocator holds besides.
        context: The device's context and the communication library.
        blocks: How many blocks of the chain it holds.
        in_flight: Microbatches whose forward has run and whose backward has not, at the worst moment, in all windows.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    passing: float
    reserve: float
    context: float
    blocks: int
    in_flight: float

    @property
    def states(self) -> float:
        """Model states."""
        return self.weights + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """What `torch.cuda.max_memory_allocated` shows."""
        return self.states + self.buffers + self.activations + self.passing

    @property
    def reserved(self) -> float:
        """What `torch.cuda.max_memory_reserved` shows."""
        return self.allocated + self.reserve

    @property
    def total(self) -> float:
        """What the device must have."""
        return self.reserved + self.context


@dataclass(frozen=True)
class Memory:
    """Bytes of every stage.

    Attributes:
        stages: By pipeline rank, 0 is the first part of the model.
        available: Bytes of a device that may be used.
    """

    stages: tuple[StageMemory, ...]
    available: float

    @property
    def worst(self) -> int:
        """The stage that needs most."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)

    @property
    def peak(self) -> StageMemory:
        """What the worst stage needs."""
        return self.stages[self.worst]

    @property
    def fits(self) -> bool:
        """Whether every stage fits."""
        return self.fits_with(0.0)

    def fits_with(self, headroom: float) -> bool:
        """Whether every stage fits, and leaves a share of the device free (the model errs by a few percent)."""
        return self.peak.total <= self.available * (1 - headroom)


def memory(run: Run) -> Memory:
    """Bytes of every stage at its worst moment."""
    layout, cluster = run.candidate.layout, run.cluster
    works, _ = block_times(run)
    windows = windows_of(run)
    virtual = windows_per_rank(layout.schedule, layout.virtual)
    owners = placement(layout.schedule, layout.pp, virtual, layout.order)
    live = in_flight(
        layout.schedule,
        layout.pp,
        run.candidate.microbatches,
        layout.virtual,
        layout.order,
        run.software.after_inputs,
        halved_windows(run, windows),
    )
    stages = []
    for rank in range(layout.pp):
        mine = [blocks for blocks, owner in zip(windows, owners, strict=True) if owner == rank]
        stages.append(_stage(run, works, mine, live[rank]))
    return Memory(tuple(stages), cluster.gpu.memory - cluster.reserve)


def _stage(run: Run, works: tuple[Work, ...], windows: list[tuple[int, ...]], live: tuple[float, ...]) -> StageMemory:
    kinds, software, recompute = run.chain.kinds, run.software, run.candidate.recompute
    ends = (kinds[0], kinds[-1])
    counts = [Counter(kinds[block] for block in window) for window in windows]
    here: Counter[int] = sum(counts, Counter())
    params = Params(
        sum(count * works[kind].params.dense for kind, count in here.items()),
        sum(count * works[kind].params.experts for kind, count in here.items()),
        sum(count * works[kind].params.frozen for kind, count in here.items()),
    )
    if run.chain.tied and ends[1] in here and ends[0] not in here:
        tied = run.chain.embedding_params / (1 if run.setting.whole_head else run.candidate.layout.tp)
        params = Params(params.dense + tied, params.experts, params.frozen)
    held = model_states(run, params)
    activations = 0.0
    for window, flying in zip(counts, live, strict=True):
        activations += flying * sum(n * kept_bytes(works[kind], recompute, kind in ends) for kind, n in window.items())
    working = sorted(_passing(works[kind], recompute, kind in ends) for kind in here)
    passing = working[-1]
    buffers = software.buffers + _gathered(run, [(works[kind].params.total, count) for kind, count in here.items()])
    allocated = held.total + buffers + activations + passing
    return StageMemory(
        weights=held.weights,
        gradients=held.gradients,
        optimizer=held.optimizer,
        buffers=buffers,
        activations=activations,
        passing=passing,
        reserve=software.reserve * allocated + _UNFIT * sum(working[-2:-1]),
        context=software.context,
        blocks=sum(here.values()),
        in_flight=sum(live),
    )


def model_states(run: Run, params: Params) -> States:
    """Bytes of parameters, gradients and optimizer on one rank; experts are shared by fewer replicas."""
    layout, recipe = run.candidate.layout, recipe_named(run.job.recipe)
    replicas = layout.dp * layout.cp
    dense = states(params.dense - params.frozen, recipe, layout.zero, replicas)
    frozen = States(params.frozen * recipe.weight / (replicas if layout.zero == 3 else 1), 0.0, 0.0)
    experts = states(params.experts, recipe, layout.zero, max(1, replicas // layout.ep))
    held = States(*(sum(parts) for parts in zip(dense, frozen, experts, strict=True)))
    software = run.software
    if _adds_whole(run):
        return held._replace(gradients=params.trained * recipe.reduced)
    if not software.buckets_in_flight or layout.zero == 0 or replicas == 1:
        return held
    # this rank's part of the reduced gradient, and full-size buffers: those under way, or all while gradients add up
    full = params.trained * recipe.gradient
    adds_up = layout.zero == 1 and (layout.pp > 1 or run.candidate.microbatches * run.job.accumulate > 1)
    flying = full if adds_up else min(full, software.buckets_in_flight * software.bucket)
    return held._replace(gradients=full / replicas + flying)


def _adds_whole(run: Run) -> bool:
    """Whether ZeRO-3 keeps a whole gradient until the step's last microbatch."""
    several = run.candidate.microbatches * run.job.accumulate > 1
    return run.software.adds_whole and several and run.candidate.layout.zero == 3 and run.group("dp").size > 1


def kept_bytes(work: Work, recompute: str, end: bool) -> float:
    """Bytes that a block keeps of one microbatch; the embedding and the head (`end`) compute nothing again."""
    if end or recompute == "none":
        return work.kept
    if recompute == "selective":
        return work.kept_selective
    if recompute == "alternate":
        return min(work.kept, work.kept_alternate)
    return (work.kept + work.entry) / 2 if recompute == "half" else work.entry


def _passing(work: Work, recompute: str, end: bool) -> float:
    """Bytes while the block runs: what it computes again, and what it needs besides."""
    again = 0.0 if end else work.kept - kept_bytes(work, "full" if recompute == "half" else recompute, end)
    return again + work.passing


def _gathered(run: Run, blocks: list[tuple[float, int]]) -> float:
    """ZeRO-3: two units are whole at a time, and the gradient of one; with a pipeline that gathers once, all are.

    Args:
        run: What runs.
        blocks: Parameters of a block, and how many there are of them.
    """
    layout = run.candidate.layout
    if layout.zero < 3 or layout.dp * layout.cp == 1:
        return 0.0
    recipe: Recipe = recipe_named(run.job.recipe)
    counted = _adds_whole(run)  # among the states
    if layout.pp > 1 and run.software.gathers_once:
        return sum(params * count for params, count in blocks) * (recipe.compute + (0 if counted else recipe.gradient))
    largest = sorted((params for params, count in blocks for _ in range(min(2, count))), reverse=True)
    return sum(largest[:2]) * recipe.compute + (0 if counted else largest[0] * recipe.reduced)
