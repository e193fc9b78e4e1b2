"""HOW do we show what was decided?  Tables of the mesh, the tensor plan and the stages; plain text in a log.

Tables are `rich` tables; `render` turns them into text that is the same in a log file as on a screen, without colours
or line breaks that depend on the terminal.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from lightning_3d.layout import AXES, Layout
from lightning_3d.mesh import Coordinate, rank_of

_AXIS_SAYS = {
    "tp": ("share every large matrix", "several all-reduces per block: fastest link, one machine"),
    "cp": ("share one sequence", "keys and values per block"),
    "pp": ("hold consecutive parts of the model", "one message per microbatch and border: may cross machines"),
    "dp": ("hold replicas with their own samples", "gradients once per step: outermost"),
}


@dataclass(frozen=True)
class TensorRow:
    """How one parameter is cut; `kind` is column, row, vocab or replicated."""

    parameter: str
    kind: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True)
class StageRow:
    """What one pipeline stage runs: its modules in order, the parameters it holds, the values it gets and gives."""

    stage: int
    modules: tuple[str, ...]
    parameters: int
    bytes: int
    receives: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()


_NARROW = 18
"""Columns are not wrapped to less."""


def render(*parts: RenderableType, width: int = 120) -> str:
    """The text of tables and strings without colour; strings stay as they are.

    Tables fit `width` columns unless their names need more: a name that is broken cannot be found or copied.
    """
    probe = Console(width=10_000)
    needed = [Measurement.get(probe, probe.options, part).minimum for part in parts if isinstance(part, Table)]
    width = max([width, *needed])
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, highlight=False)
    _print(console, parts)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def show(*parts: RenderableType) -> None:
    """Print tables and strings: with colour on a terminal, otherwise exactly as `render` gives them."""
    console = Console(highlight=False)
    if not console.is_terminal:
        print(render(*parts), flush=True)
        return
    _print(console, parts)


def _print(console: Console, parts: Iterable[RenderableType]) -> None:
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, soft_wrap=True)
        else:
            console.print(part)


def plain_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    wrap: Sequence[str] = (),
    total: bool = False,
) -> Table:
    """A table of strings.

    Args:
        title: Above the table.
        columns: Their names.
        rows: One string per column.
        right: Columns that are aligned right.
        wrap: Columns that give way where the width does not suffice.
        total: Set the last row apart.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    lines = [list(row) for row in rows]
    for at, column in enumerate(columns):
        longest = max(len(text) for row in [columns, *lines] for text in row[at].splitlines() or [""])
        table.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column not in wrap,
            overflow="fold",
            min_width=min(longest, _NARROW) if column in wrap else longest,
        )
    for i, row in enumerate(lines):
        table.add_row(*row, end_section=total and i == len(lines) - 2)
    return table


def mesh_table(layout: Layout) -> Table:
    """Which rank stands where: one line per replica and stage, one column per tensor-parallel rank."""
    context = range(layout.cp)
    columns = ["replica (dp)", "stage (pp)", *(["cp"] if layout.cp > 1 else [])]
    ranks = [f"tp {tp}" for tp in range(layout.tp)]
    rows = []
    for dp in range(layout.dp):
        for pp in range(layout.pp):
            for cp in context:
                cells = [f"rank {rank_of(layout, Coordinate(dp, pp, cp, tp))}" for tp in range(layout.tp)]
                rows.append([str(dp), _stage_name(pp, layout.pp), *([str(cp)] if layout.cp > 1 else []), *cells])
    return plain_table(f"mesh {layout}: {layout.world_size} processes", [*columns, *ranks], rows)


def axis_table(layout: Layout) -> Table:
    """Size of every axis in use, what its ranks share, how they talk, and the first of its groups of ranks."""
    rows = []
    for axis in reversed(AXES):
        size = getattr(layout, axis)
        if size > 1:
            shares, talk = _AXIS_SAYS[axis]
            first = [rank_of(layout, Coordinate(**{**dict.fromkeys(AXES, 0), axis: i})) for i in range(size)]
            rows.append([axis, str(size), shares, talk, ", ".join(map(str, sorted(first)))])
    columns = ["axis", "size", "its ranks", "traffic", "first group"]
    return plain_table("axes", columns, rows, right=["size"], wrap=["traffic", "first group"])


def tensor_table(rows: Iterable[TensorRow], title: str = "tensor plan") -> Table:
    """How the parameters are cut over tp; equal parameters of numbered blocks share a line."""
    keyed = [(row.parameter, (row.kind, _shape(row.shape), _shape(row.local_shape), row.reason)) for row in rows]
    cells = [[name, *rest] for name, rest in group_blocks(keyed)]
    return plain_table(title, ["parameter", "cut", "whole", "per rank", "why"], cells, wrap=["why"])


def stage_table(rows: Iterable[StageRow], title: str = "pipeline stages") -> Table:
    """Which modules run on which stage, and what crosses its borders."""
    cells = [
        [
            str(r.stage),
            "\n".join(name for name, _ in group_blocks((m, ()) for m in r.modules)),
            f"{r.parameters:,}",
            byte_text(r.bytes),
            _counted(r.receives),
            _counted(r.sends),
        ]
        for r in rows
    ]
    columns = ["stage", "modules", "parameters", "bytes", "receives", "sends"]
    return plain_table(title, columns, cells, right=["parameters", "bytes"])


def _counted(messages: Iterable[str]) -> str:
    """One message a line, equal ones together."""
    counts = Counter(messages)
    return "\n".join(text if n == 1 else f"{n} x ({text})" for text, n in counts.items()) or "-"


def group_blocks(rows: Iterable[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    """Merge rows that differ only in one block number: `layers.0.fc`, `layers.1.fc` -> `layers.{0-1}.fc`."""
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[str, int]]] = {}
    for name, rest in rows:
        number = re.search(r"(?<![^.])\d+(?![^.])", name)
        if number is None:
            groups[name, rest] = [(name, -1)]
        else:
            pattern = f"{name[: number.start()]}*{name[number.end() :]}"
            groups.setdefault((pattern, rest), []).append((name, int(number[0])))
    out = []
    for (pattern, rest), members in groups.items():
        numbers = [n for _, n in members]
        name = members[0][0] if len(members) == 1 else pattern.replace("*", f"{{{ranges_text(numbers)}}}", 1)
        out.append((name, rest))
    return out


def byte_text(count: float) -> str:
    """`1536` -> `1.5 KiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def ranges_text(numbers: Iterable[int]) -> str:
    """`[1, 2, 3, 7]` -> `"1-3,7"`."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _stage_name(stage: int, stages: int) -> str:
    if stages == 1:
        return "0 (whole model)"
    return f"{stage}" + {0: " (first)", stages - 1: " (last: loss)"}.get(stage, "")
