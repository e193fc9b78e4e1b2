"""WHAT is not to be chosen?  What somebody has said already; the search looks at the rest (no torch here)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lightning_3d.layout import Layout
from lightning_3d.planner.candidate import Candidate, Job, Named, candidate_for


def _nothing(layout: Layout) -> str | None:
    return None


@dataclass(frozen=True)
class Given:
    """Choices that are made. None: open.

    Attributes:
        tp, pp, dp, zero, schedule, virtual, order: As in `Layout`.
        microbatches: Into how many a batch is cut in a pipeline.
        recompute: As in `Candidate`.
        sequence_parallel: As in `Candidate`; None: wherever there is tensor parallelism.
        batch: Samples that the loader gives one replica. The global batch then follows from dp, and a batch is cut
            only for a pipeline. None: the job's global batch is what is given, and microbatches are free.
        refuses: Why a layout cannot be run, for reasons that the planner does not know; None: it can.
    """

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    zero: int | None = None
    schedule: str | None = None
    virtual: int | None = None
    order: str = "looped"
    microbatches: int | None = None
    recompute: str | None = None
    sequence_parallel: bool | None = None
    batch: int | None = None
    refuses: Callable[[Layout], str | None] = field(default=_nothing, compare=False)

    def allows(self, **sizes: int) -> bool:
        """Whether sizes are those that are given."""
        return all(getattr(self, name) in (None, size) for name, size in sizes.items())

    def job_of(self, job: Job, layout: Layout) -> Job:
        """The job with the global batch that a layout has."""
        if self.batch is None:
            return job
        return replace(job, global_batch=layout.dp * self.batch * job.accumulate)

    def sequence(self, tp: int) -> bool:
        """Whether activations are cut along the sequence."""
        return tp > 1 and self.sequence_parallel is not False

    def recomputations(self) -> tuple[str, ...]:
        """What may be computed again, the least first."""
        return ("none", "selective", "full") if self.recompute is None else (self.recompute,)

    def stages(self, layout: Layout) -> tuple[int, ...]:
        """ZeRO stages to look at, the cheapest first."""
        if self.zero is not None:
            return (self.zero,)
        return (1, 2, 3) if layout.dp * layout.cp > 1 else (1,)

    def slices(self, layout: Layout, samples: int) -> list[tuple[int, int]]:
        """(samples of a microbatch, microbatches) that `samples` of a replica may be cut into."""
        if self.batch is None:
            return [(micro, samples // micro) for micro in (1, 2, 4, 8, 16, 32) if samples % micro == 0]
        if layout.pp == 1:
            return [(samples, 1)]
        if self.microbatches is not None:  # also uneven ones: the largest counts
            return [(-(-samples // self.microbatches), self.microbatches)] if self.microbatches <= samples else []
        return [(samples // count, count) for count in divisors(samples)]

    def candidate(self, named: Named, job: Job) -> Candidate:
        """A named candidate of this job; where it says nothing of microbatches, those of the strategy's default.

        Raises:
            LayoutError: The batch cannot be cut this way.
        """
        layout, micro = named.layout, named.micro_batch
        if micro is None:
            micro = 1
            if self.batch is not None:
                count = 1 if layout.pp == 1 else self.microbatches or min(4 * layout.pp, self.batch)
                micro = next(m for m in divisors(self.batch) if self.batch // m <= count)
        return candidate_for(layout, self.job_of(job, layout), micro, named.recompute, named.sequence_parallel)

    def __str__(self) -> str:
        names = ("tp", "pp", "dp", "zero", "schedule", "virtual", "microbatches", "recompute", "sequence_parallel")
        return ", ".join(f"{name} {getattr(self, name)}" for name in names if getattr(self, name) is not None)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
