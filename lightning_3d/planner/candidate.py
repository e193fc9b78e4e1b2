"""WHICH way of running a job?  A layout with what it leaves open: microbatch, recomputation (no torch here)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_3d.errors import ConfigurationError, LayoutError
from lightning_3d.layout import Layout

Recompute = Literal["none", "selective", "half", "alternate", "full"]
RECOMPUTE: tuple[str, ...] = get_args(Recompute)
"""none; the attention's scores (selective); every second layer whole (half); every second matrix product of all layers
(alternate); all layers (full)."""


@dataclass(frozen=True)
class Job:
    """What is to be trained.

    Args:
        global_batch: Samples of one optimizer step, over all replicas and accumulated batches.
        seq: Tokens of a sample.
        precision: Of the matrix products: fp32, bf16, fp16, fp8, fp4.
        recipe: What is stored per parameter; see `recipes.py`.
        software: Whose way of running; see `constants.SOFTWARE`.
        accumulate: Batches of a step whose gradients are added up; a pipeline is filled and drained for each.
    """

    global_batch: int
    seq: int
    precision: str = "bf16"
    recipe: str = "bf16-true"
    software: str = "lightning_3d"
    accumulate: int = 1

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq", "accumulate"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name} is {value!r}; it must be a positive integer.")

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self.seq


@dataclass(frozen=True)
class Candidate:
    """One way to run the job.

    Args:
        layout: Sizes of the axes, ZeRO stage, schedule.
        micro_batch: Samples of one microbatch on one replica.
        microbatches: Microbatches of a batch (without accumulation: of a step) on one replica.
        recompute: What the backward computes again; one of `RECOMPUTE`.
        sequence_parallel: Whether what tensor parallelism does not divide is divided by sequence.
    """

    layout: Layout
    micro_batch: int
    microbatches: int
    recompute: str = "none"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.microbatches < 1:
            raise LayoutError(f"{self.layout}: a microbatch needs at least one sample, and a step one microbatch.")
        if self.recompute not in RECOMPUTE:
            raise ConfigurationError(f"recompute is {self.recompute!r}; it is one of {', '.join(RECOMPUTE)}.")

    def __str__(self) -> str:
        parts = [str(self.layout), f"mbs{self.micro_batch}"]
        if self.recompute != "none":
            parts.append(self.recompute)
        if self.sequence_parallel:
            parts.append("sp")
        return "-".join(parts)


def candidate_for(layout: Layout, job: Job, micro_batch: int, recompute: str = "none", sp: bool = False) -> Candidate:
    """A candidate whose microbatches make up the global batch.

    Raises:
        LayoutError: The global batch is not a multiple of dp x microbatch (x accumulated batches).
    """
    if micro_batch < 1:
        raise LayoutError(f"{layout}: microbatches of {micro_batch} samples (mbs{micro_batch}); at least 1 is needed.")
    if sp and layout.tp == 1:
        raise LayoutError(
            f"{layout} with sequence parallelism (sp): it divides over the tensor-parallel ranks what TP leaves whole, "
            "and there is one. Leave sp out, or choose tp2 or more."
        )
    per_step = layout.dp * micro_batch * job.accumulate
    if job.global_batch % per_step:
        raise LayoutError(
            f"the global batch of {job.global_batch} cannot be divided over dp {layout.dp} in microbatches of "
            f"{micro_batch}: it is no multiple of {per_step}. Choose a smaller dp or microbatch, or a global batch of "
            f"{(job.global_batch // per_step + 1) * per_step}."
        )
    return Candidate(layout, micro_batch, job.global_batch // per_step, recompute, sp)


@dataclass(frozen=True)
class Named:
    """What the name of a candidate says: `tp8-pp4-zero1-mbs2-full-sp`. dp follows from the number of GPUs.

    Attributes:
        layout: The sizes.
        micro_batch: Samples of a microbatch, if it says.
        recompute, sequence_parallel: As in `Candidate`.
    """

    layout: Layout
    micro_batch: int | None
    recompute: str
    sequence_parallel: bool


def parse_candidate(text: str, gpus: int) -> Named:
    """Read the name of a candidate.

    Raises:
        LayoutError: A part cannot be read, or the sizes do not fit the GPUs.
    """
    parts, micro_batch, recompute, sp = [], None, "none", False
    given: dict[str, str] = {}
    for part in text.strip().lower().split("-"):
        match = re.fullmatch(r"mbs(\d+)", part)
        kind = "mbs" if match else "recomputation" if part in RECOMPUTE else ""
        if kind and kind in given:
            raise LayoutError(f"layout {text!r} gives {kind} twice: {given[kind]!r} and {part!r}.")
        given[kind] = part
        if match:
            micro_batch = int(match[1])
        elif part in RECOMPUTE:
            recompute = part
        elif part == "sp":
            sp = True
        else:
            parts.append(part)
    layout = Layout.parse("-".join(parts)) if parts else Layout()
    if not re.search(r"(^|-)dp\d", text.lower()):
        layout = layout.with_world_size(gpus)
    elif layout.world_size != gpus:
        raise LayoutError(
            f"the layout {layout} needs {layout.world_size} GPUs (tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x "
            f"dp {layout.dp}), but there are {gpus}. Leave dp out to use all."
        )
    if layout.schedule == "zb_v" and layout.virtual == 1:
        layout = replace(layout, virtual=2)
    return Named(layout, micro_batch, recompute, sp)
