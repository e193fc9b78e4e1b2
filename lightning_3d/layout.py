"""HOW MANY ranks along each axis?  The frozen, validated description of one parallel layout (no torch here)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_3d.errors import LayoutError, near, not_yet

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
Order = Literal["looped", "contiguous"]
AXES = ("dp", "pp", "cp", "tp")
"""Mesh axes, outermost first: tensor-parallel peers are neighbours in one machine, replicas are far apart."""


@dataclass(frozen=True)
class Layout:
    """Sizes of all mesh axes, the ZeRO stage and the pipeline schedule.

    Args:
        tp: Tensor-parallel size: ranks that share every large matrix.
        pp: Pipeline-parallel size: consecutive parts of the model.
        dp: Data-parallel size: replicas of the model, each with its own samples.
        cp: Context-parallel size: ranks that share one sequence.
        ep: Expert-parallel size: ranks (taken from dp) that share the experts.
        zero: ZeRO stage, 0 to 3: what the dp ranks share (1 optimizer state, 2 also gradients, 3 also parameters).
        schedule: Order of forwards and backwards of the microbatches in the pipeline: a name, or the path of a file
            with one's own lists of actions.
        virtual: Parts of the model per pipeline rank (interleaved schedules).
        order: How these parts are dealt: "looped" (1 2 3 4 1 2 3 4) or "contiguous" (1 1 2 2 3 3 4 4).

    Raises:
        LayoutError: A size is not a positive integer, or two settings exclude each other.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    order: str = "looped"

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "virtual"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LayoutError(f"{LONG_NAMES[name]} is {size!r}; it must be an integer of at least 1.")
        if isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3):
            raise LayoutError(
                f"zero_stage is {self.zero!r}; ZeRO has the stages 0, 1, 2 and 3: 1 shares the optimizer's state over "
                "the replicas, 2 gradients, too, and 3 parameters, too."
            )
        if self.schedule == "zero_bubble":
            object.__setattr__(self, "schedule", "zb_h1")
        if self.schedule not in SCHEDULES and not self.schedule_is_file:
            raise LayoutError(
                f"pipeline_schedule is {self.schedule!r}; known schedules are {', '.join(SCHEDULES)}, or the path of a "
                "file with lists of actions (.txt, .json; docs/schedules.md)." + near(str(self.schedule), SCHEDULES)
            )
        self._check_virtual()

    def _check_virtual(self) -> None:
        if self.order not in get_args(Order):
            raise LayoutError(f"virtual_pipeline_order is {self.order!r}; it must be 'looped' or 'contiguous'.")
        if self.order != "looped" and self.schedule != "interleaved_1f1b":
            raise LayoutError(
                f"virtual_pipeline_order={self.order!r} has no effect with pipeline_schedule={self.schedule!r}: only "
                "'interleaved_1f1b' deals parts of the model in an order of choice. Remove it, or choose "
                "pipeline_schedule='interleaved_1f1b'."
            )
        if self.schedule == "interleaved_1f1b" and self.virtual < 2:
            raise LayoutError(
                f"pipeline_schedule='interleaved_1f1b' with virtual_pipeline_size={self.virtual}: interleaving means "
                "that every pipeline rank runs several parts of the model. Set virtual_pipeline_size=2 or more, or "
                "choose '1f1b'."
            )
        if self.virtual > 1 and self.schedule != "interleaved_1f1b" and (self.schedule, self.virtual) != ("zb_v", 2):
            raise LayoutError(
                f"virtual_pipeline_size={self.virtual} with pipeline_schedule={self.schedule!r}: only "
                "'interleaved_1f1b' deals several parts of the model to a rank ('zb_v' always two, a file what it "
                "says). Choose pipeline_schedule='interleaved_1f1b', or virtual_pipeline_size=1."
            )

    @property
    def schedule_is_file(self) -> bool:
        """Whether `schedule` is the path of a file."""
        return str(self.schedule).endswith((".txt", ".json", ".yaml", ".yml"))

    @property
    def world_size(self) -> int:
        """Number of processes the layout needs (experts are spread inside dp and need no extra ones)."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def replica_size(self) -> int:
        """Number of processes that hold one copy of the model together."""
        return self.tp * self.pp * self.cp

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        parts += [f"{axis}{getattr(self, axis)}" for axis in ("cp", "ep") if getattr(self, axis) > 1]
        parts.append(f"zero{self.zero}")
        if self.pp > 1:
            parts.append(self.schedule)
        if self.virtual > 1:
            parts.append(f"v{self.virtual}")
        if self.order != "looped":
            parts.append(self.order)
        return "-".join(parts)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `"tp2-pp2-dp2-zero1-1f1b"`; parts may come in any order, missing ones keep their defaults.

        Raises:
            LayoutError: A part is not known.
        """
        return cls(**read_parts(text))  # type: ignore[arg-type]

    def with_world_size(self, world_size: int) -> Layout:
        """The same layout with dp chosen so that it uses `world_size` processes.

        Raises:
            LayoutError: tp x pp x cp does not divide the number of processes.
        """
        if world_size % self.replica_size:
            sizes = f"tensor {self.tp} x pipeline {self.pp}" + (f" x context {self.cp}" if self.cp > 1 else "")
            fitting = list(range(self.replica_size, world_size + self.replica_size, self.replica_size))
            raise LayoutError(
                f"{world_size} process{'es' if world_size > 1 else ''} cannot be divided into model replicas of "
                f"{self.replica_size} ({sizes}): {world_size} is not a multiple of {self.replica_size}. "
                f"Run on {' or '.join(map(str, fitting[-2:]))} processes (devices x num_nodes), or change "
                "tensor_parallel_size or pipeline_parallel_size."
            )
        return replace(self, dp=world_size // self.replica_size)

    def check_world_size(self, world_size: int) -> None:
        """Raise `LayoutError` unless the layout needs exactly `world_size` processes."""
        if self.world_size != world_size:
            raise LayoutError(
                f"the layout {self} needs {self.world_size} processes (tp {self.tp} x pp {self.pp} x cp {self.cp} x "
                f"dp {self.dp}), but the Trainer runs {world_size} (devices x num_nodes). Set "
                f"data_parallel_size='auto' to use what is there, or run on {self.world_size} processes."
            )

    def check_supported(self) -> None:
        """Refuse what this version cannot do.

        Raises:
            ConfigurationError: A feature of the interface that is not built yet.
        """
        if self.cp > 1:
            raise not_yet(f"context_parallel_size={self.cp}", "Use tensor_parallel_size for long sequences.")
        if self.ep > 1:
            raise not_yet(f"expert_parallel_size={self.ep}", "Use tensor_parallel_size to share the experts.")


def read_parts(text: str) -> dict[str, int | str]:
    """The fields of `Layout` that a text like `"tp2-pp2"` gives.

    Raises:
        LayoutError: A part is not known, or there twice.
    """
    values: dict[str, int | str] = {}
    for part in text.strip().lower().split("-"):
        if part in SCHEDULES:
            key, value = "schedule", part
        elif part in get_args(Order):
            key, value = "order", part
        else:
            match = re.fullmatch(r"(tp|pp|dp|cp|ep|zero|v)(\d+)", part)
            if match is None:
                raise LayoutError(
                    f"layout {text!r}: cannot read {part!r}. A layout is written like 'tp2-pp2-dp2-zero1-1f1b', "
                    f"with sizes tp, pp, dp, cp, ep, zero, v and a schedule out of {', '.join(SCHEDULES)}."
                )
            key, value = {"v": "virtual"}.get(match[1], match[1]), match[2]
        if key in values:
            raise LayoutError(f"layout {text!r} gives {key} twice.")
        values[key] = value if key in ("schedule", "order") else int(value)
    return values


LONG_NAMES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "zero": "zero_stage",
    "virtual": "virtual_pipeline_size",
    "schedule": "pipeline_schedule",
    "order": "virtual_pipeline_order",
}
