"""WHAT do all benchmarks share?  The result they give, statistics, the machine, tables as text and as Markdown."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

Progress = Callable[[str], None]
"""Called when a part of a benchmark begins, with what it is."""


@dataclass
class Table:
    """One table, as strings: what is printed and what stands in the documentation."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass
class Result:
    """What a benchmark gives.

    Args:
        name: Marker of its section in docs/benchmarks.md.
        setting: One paragraph: sizes, processes, how it was measured.
        tables: Its tables.
        data: Every number behind them, as plain data.
    """

    name: str
    setting: str
    tables: list[Table] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def markdown(self) -> str:
        parts = [self.setting]
        for table in self.tables:
            head = f"| {' | '.join(table.columns)} |"
            rule = "|" + "|".join(["---"] + ["---:"] * (len(table.columns) - 1)) + "|"
            parts.append(
                "\n".join([f"**{table.title}**", "", head, rule, *(f"| {' | '.join(r)} |" for r in table.rows)])
            )
        return "\n\n".join(parts)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(ordered[round(last / 4)], median(ordered), ordered[round(3 * last / 4)])

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        low, middle, high = (f"{scale * v:.{digits}f}" for v in (self.low, self.middle, self.high))
        return f"{middle} ({low} to {high})"

    def plain(self) -> list[float]:
        return [self.low, self.middle, self.high]


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    import lightning

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "backend": "gloo",
    }


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def quiet() -> None:
    """No hints about loaders and loggers from the processes of a launch."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
