"""WHAT was decided for each parameter?  The plan: printable, comparable, plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_3d.tensor.placement import Placement

Kind = Literal["column", "row", "vocab", "replicated"]


@dataclass(frozen=True)
class Decision:
    """What becomes of one parameter.

    Args:
        kind: "column" (cut over outputs), "row" (over inputs), "vocab" (over tokens), or "replicated".
        placement: How it is cut; None if replicated.
        reason: Why, in words.
        heads: Number of attention heads the code splits its output into, if that is why it could not be cut.
    """

    kind: Kind
    placement: Placement | None = None
    reason: str = ""
    heads: int | None = None


@dataclass(frozen=True)
class PlanRow:
    """A line of the printed plan: parameters of repeated blocks that were decided alike."""

    pattern: str
    shape: tuple[int, ...]
    kind: Kind
    segments: tuple[int, ...]
    padding: int
    reason: str
    count: int
    why: str = ""

    @property
    def elements(self) -> int:
        return self.count * math.prod(self.shape)


_HARDLY = 0.1
"""A plan that divides less than this part of the parameters is not what was hoped for."""


def _around(name: str) -> str:
    """The module around a parameter's module: the attention for a projection."""
    return name.rpartition(".")[0].rpartition(".")[0]


@dataclass
class TensorPlan:
    """How a model is cut over `size` tensor-parallel ranks.

    Args:
        size: Number of ranks.
        decisions: Decision for every parameter name (tied names included).
        shapes: Global shape for every parameter name.
        patterns: Name with the indices of repeated blocks replaced by `*`.
        aliases: Tied names -> the name that is counted.
        sequence: Activations between the blocks are cut along the sequence.
        runs: How often the user's step was followed.
        seconds: How long planning took.
        conversions: Collectives in one step that a hand-written tensor-parallel model would not have.
        dealt: Names of weights whose output the user's code splits into heads, which the ranks share.
        used: Names of weights that the step uses.
        used_values: Shapes depended on values, so parameters had to be real while planning.
    """

    size: int
    decisions: dict[str, Decision] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    patterns: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    sequence: bool = False
    runs: int = 0
    seconds: float = 0.0
    conversions: int = 0
    used_values: bool = False
    dealt: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)

    @property
    def sharded_fraction(self) -> float:
        """Part of all parameter elements that is cut over the ranks."""
        total = cut = 0
        for name, decision in self.decisions.items():
            if name not in self.aliases:
                elements = math.prod(self.shapes[name])
                total += elements
                cut += elements if decision.placement is not None else 0
        return cut / total if total else 0.0

    @property
    def held_fraction(self) -> float:
        """Part of all parameter elements that one rank holds, padding included; 1 / size at best."""
        total = held = 0
        for name, decision in self.decisions.items():
            if name not in self.aliases:
                shape = self.shapes[name]
                total += math.prod(shape)
                cut = decision.placement
                held += math.prod(shape if cut is None else cut.local_shape(shape, self.size))
        return held / total if total else 1.0

    def whole_heads(self) -> list[str]:
        """Attention that every rank holds whole because its heads cannot be dealt: what to tell the user.

        Key and value heads may be fewer than the ranks (they are shared) as long as the rest of their module is cut.
        """
        dealt = {_around(name) for name in self.dealt}
        told: dict[str, str] = {}
        for name, decision in self.decisions.items():
            attention = _around(self.patterns.get(name, name))
            if decision.heads is None or decision.placement is not None or _around(name) in dealt:
                continue
            advice = f" Choose a size that divides {decision.heads} to cut it." if decision.heads > 1 else ""
            told.setdefault(
                attention,
                f"tensor_parallel_size={self.size}, but the code of {attention or name} splits the output of {name} "
                f"{self.shapes[name]} into {decision.heads}, which {self.size} ranks cannot share: it stays whole, so "
                f"every rank holds and computes all of it.{advice}",
            )
        return list(told.values())

    def hardly_divides(self) -> str | None:
        """What to tell the user when (nearly) nothing of the model is divided, or None."""
        part = self.sharded_fraction
        if part >= _HARDLY:
            return None
        much, nearly = (f"only {part:.0%}", "nearly ") if part else ("nothing", "")
        return (
            f"tensor_parallel_size={self.size} divides {much} of this model, so every rank holds and computes {nearly}"
            "all of it. print(strategy.explain()) says why for each parameter, most often sizes or heads that are no "
            f"multiple of {self.size}; use pipeline or data parallelism instead, or name layers in "
            "tensor_parallel_plan."
        )

    def why(self, name: str) -> str:
        """Why a parameter is cut as it is, in terms of its sizes where they say it; `reason` has all that was tried."""
        decision, shape = self.decisions[name], self.shapes[name]
        if decision.kind != "replicated":
            return decision.reason
        if decision.heads is not None and decision.heads % self.size:
            return f"its output is split into {decision.heads} (heads, groups), which {self.size} ranks cannot share"
        if len(shape) > 1 and not any(size % self.size == 0 for size in shape):
            return f"none of its sizes {' x '.join(map(str, shape))} is divisible by {self.size} ranks"
        if not decision.reason:
            return "a vector that no divided layer uses" if len(shape) < 2 else "no product with it was seen"
        first, *others = decision.reason.split("; then ")
        return first + (f" (and {len(others)} other ways to divide it failed)" if others else "")

    def rows(self) -> list[PlanRow]:
        """The plan as a table, repeated blocks in one line each."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, decision in self.decisions.items():
            if name not in self.aliases:
                key = (self.patterns.get(name, name), self.shapes[name], decision)
                groups.setdefault(key, []).append(name)
        rows = []
        for (pattern, shape, decision), names in groups.items():
            cut = decision.placement
            rows.append(
                PlanRow(
                    pattern if len(names) > 1 else names[0],
                    shape,
                    decision.kind,
                    cut.segments if cut else (),
                    cut.padding if cut else 0,
                    decision.reason,
                    len(names),
                    self.why(names[0]),
                )
            )
        return rows

    def __str__(self) -> str:
        lines = [f"tensor plan for {self.size} ranks: {self.sharded_fraction:.1%} of the parameters are cut"]
        for row in self.rows():
            shape = "x".join(map(str, row.shape)) or "scalar"
            cut = "+".join(map(str, row.segments)) + (f"+{row.padding} padding" if row.padding else "")
            lines.append(f"  {row.pattern:40s} {shape:>12s} {row.kind:10s} {cut:16s} {row.reason}".rstrip())
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON)."""
        decisions = {}
        for name, d in self.decisions.items():
            cut = d.placement
            data = None
            if cut is not None:
                data = [cut.dim, list(cut.segments), cut.padding, cut.axis, cut.copies, list(cut.shares)]
            decisions[name] = {"kind": d.kind, "placement": data, "reason": d.reason, "heads": d.heads}
        return {
            "size": self.size,
            "sequence": self.sequence,
            "decisions": decisions,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "patterns": dict(self.patterns),
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorPlan:
        """The inverse of `to_dict`."""
        decisions = {}
        for name, d in data["decisions"].items():
            cut = d["placement"]
            place = None if cut is None else Placement(cut[0], tuple(cut[1]), cut[2], cut[3], cut[4], tuple(cut[5]))
            decisions[name] = Decision(d["kind"], place, d["reason"], d["heads"])
        return cls(
            data["size"],
            decisions,
            {name: tuple(shape) for name, shape in data["shapes"].items()},
            dict(data["patterns"]),
            dict(data["aliases"]),
            data["sequence"],
        )
