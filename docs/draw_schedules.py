"""Draw and count the schedules of docs/schedules.md, from the lists that the runner walks.

python docs/draw_schedules.py

writes docs/pictures/schedules.png and schedule_memory.svg, and everything in the page between `<!-- name -->` and
`<!-- /name -->`. A test compares the page with what this script would write.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lightning_3d.pipeline.check import check
from lightning_3d.pipeline.schedule import placement, schedule_lists
from lightning_3d.pipeline.schedule_file import load_schedule, save_schedule
from lightning_3d.pipeline.timing import Timing, formula_bubble, parts, simulate

FOLDER = Path(__file__).parent
PAGE = FOLDER / "schedules.md"
COLOURS = {
    "F": ("#4477aa", "#88bbdd"),
    "B": ("#cc6644", "#f0aa88"),
    "I": ("#aa4488", "#dda0c8"),
    "W": ("#bb9922", "#eedd88"),
}
MEANINGS = {"F": "forward", "B": "backward", "I": "gradient of the inputs", "W": "gradient of the weights"}
SIZES = [(p, m) for p in (4, 8) for m in (8, 16, 32)]
UNEQUAL = {
    "equal": ((1.0, 1.0, 1.0), 0.0),
    "I 1.2, W 0.8": ((1.0, 1.2, 0.8), 0.0),
    "I 1.5, W 0.5": ((1.0, 1.5, 0.5), 0.0),
    "message 0.1": ((1.0, 1.0, 1.0), 0.1),
    "message 0.3": ((1.0, 1.0, 1.0), 0.3),
}


class Case(NamedTuple):
    """A schedule as the page names it."""

    name: str
    virtual: int = 1
    order: str = "looped"

    def __str__(self) -> str:
        several = f", {self.virtual} {self.order}" if self.name == "interleaved_1f1b" else ""
        return f"`{self.name}`{several}"

    def played(self, p: int, m: int, split: tuple[float, float, float] = (1.0, 1.0, 1.0), send: float = 0.0) -> Timing:
        """The step in time. A rank's whole part of the model takes `split`, each of its windows a share of it."""
        lists = schedule_lists(self.name, p, m, self.virtual, self.order)
        share = parts(*(seconds / self.virtual for seconds in split))
        return simulate(lists, placement(self.name, p, self.virtual, self.order), share, send)

    def peak(self, p: int, m: int) -> float:
        """The largest memory of any rank; 1 is a microbatch in a rank's whole part of the model."""
        lists = schedule_lists(self.name, p, m, self.virtual, self.order)
        return max(check(lists, p * self.virtual, m).peak_live) / self.virtual


GPIPE, ONE_F_ONE_B, INTERLEAVED = Case("gpipe"), Case("1f1b"), Case("interleaved_1f1b", 2)
CONTIGUOUS, ZB_H1, ZB_V = Case("interleaved_1f1b", 2, "contiguous"), Case("zb_h1"), Case("zb_v", 2)
CASES = [GPIPE, ONE_F_ONE_B, INTERLEAVED, Case("interleaved_1f1b", 4), CONTIGUOUS, ZB_H1, ZB_V]
DRAWN = [GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_V]


def characters(case: Case, p: int, m: int) -> str:
    """One line per rank, two characters per part; small letters are the second window of a rank."""
    timing = case.played(p, m, (float(case.virtual),) * 3)  # type: ignore[arg-type]
    lines = []
    for rank in range(p):
        row = ["."] * round(2 * timing.length)
        for _, action, start, end in timing.of_rank(rank):
            first = action.stage == min(t.action.stage for t in timing.of_rank(rank))
            word = f"{action.kind if first else action.kind.lower()}{action.microbatch}"
            row[round(2 * start) : round(2 * end)] = word.ljust(round(2 * (end - start)), "=")
        lines.append(f"rank {rank} |{''.join(row)}|")
    return "\n".join(["```", *lines, "```"])


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def sizes_table(value: Callable[[Case, int, int], str]) -> str:
    """One row per schedule, one column per number of stages and microbatches."""
    rows = [[str(case), *(value(case, p, m) for p, m in SIZES)] for case in CASES]
    return table(["", *(f"p={p}, m={m}" for p, m in SIZES)], rows)


def memory_table() -> str:
    """Peak of every rank, GPipe against the others."""
    p, m = 4, 16
    rows = []
    for case in DRAWN:
        lists = schedule_lists(case.name, p, m, case.virtual, case.order)
        peaks = check(lists, p * case.virtual, m).peak_live
        rows.append([str(case), *(f"{peak / case.virtual:g}" for peak in peaks)])
    return table(["", *(f"rank {rank}" for rank in range(p))], rows)


def unequal_table() -> str:
    """What is left of the promises when parts differ and messages take time."""
    rows = [
        [str(case), *(percent(case.played(8, 32, split, send).bubble) for split, send in UNEQUAL.values())]
        for case in CASES
    ]
    return table(["p=8, m=32", *UNEQUAL], rows)


def formula_text() -> str:
    """How the lists compare with the formulas where these hold."""
    for case, p, m in ((case, p, m) for case in CASES for p, m in SIZES if case is not CONTIGUOUS):
        assert abs(case.played(p, m).bubble - formula_bubble(case.name, p, m, case.virtual)) < 1e-12, (case, p, m)
    beyond = {}
    for p in range(1, 13):
        for m in range(2 * p, 49):
            beyond[p, m] = round(Case("zb_v", 2).played(p, m, (2.0, 2.0, 2.0)).length) - (6 * m + p - 1)
    exact = sum(extra == 0 for extra in beyond.values())
    pairs = f"all {len(beyond)} pairs with p up to 12 and m from 2p to 48"
    if exact == len(beyond):
        return f"For {pairs} the step is as short as it can be."
    return (
        f"Of {pairs}, {exact} are as short as a step can be;\nthe others take up to {max(beyond.values())} parts more."
    )


def file_text() -> str:
    """A schedule as a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_schedule(Path(folder) / "own.txt", schedule_lists("zb_h1", 2, 4))
        load_schedule(path)
        text = path.read_text()
    return f"```\n{text}```"


def percent(share: float) -> str:
    """A share with one decimal."""
    return f"{100 * share:.1f} %"


BLOCKS: dict[str, Callable[[], str]] = {
    **{f"drawn {case.name}": lambda case=case: characters(case, 3, 6) for case in DRAWN},  # type: ignore[misc]
    "drawn contiguous": lambda: characters(CONTIGUOUS, 3, 6),
    "bubbles": lambda: sizes_table(lambda case, p, m: percent(case.played(p, m).bubble)),
    "peaks": lambda: sizes_table(lambda case, p, m: f"{case.peak(p, m):.4g}"),
    "memory": memory_table,
    "unequal": unequal_table,
    "zb_v": formula_text,
    "file": file_text,
}


def page(text: str) -> str:
    """The page with all its blocks written anew."""
    found = set(re.findall(r"<!-- /(.+?) -->", text))
    assert found == BLOCKS.keys(), f"the page has the blocks {sorted(found)}, the script {sorted(BLOCKS)}"
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{block()}\n{end}{rest.partition(end)[2]}"
    return text


def draw_schedules(path: Path) -> None:
    """All schedules on one axis of time, four ranks and eight microbatches."""
    p, m = 4, 8
    played = [(case, case.played(p, m)) for case in DRAWN]
    figure, axes = _panels(len(played), 1.05)
    for axis, (case, timing) in zip(axes, played, strict=True):
        for rank, action, start, end in timing.actions:
            second = int(action.stage >= p)
            colour = COLOURS[action.kind][second]
            axis.barh(rank, end - start, left=start, height=0.86, color=colour, edgecolor="white", linewidth=0.5)
            middle, ink = (start + end) / 2, "black" if second else "white"
            axis.text(middle, rank, str(action.microbatch), ha="center", va="center", fontsize=6, color=ink)
        axis.set_yticks(range(p), [f"rank {rank}" for rank in range(p)], fontsize=7)
        axis.invert_yaxis()
        title = f"{str(case).replace('`', '')}: idle {timing.bubble:.1%}, at most {case.peak(p, m):g} microbatches live"
        axis.set_title(title, loc="left", fontsize=9)
    axes[-1].set_xlim(0, max(timing.length for _, timing in played))
    axes[-1].set_xlabel("time; a forward through a rank's whole part of the model takes 1", fontsize=8)
    _legend(figure)
    _save(figure, path)


def draw_memory(path: Path) -> None:
    """What the first and the last rank hold over time."""
    p, m = 4, 16
    figure, axes = _panels(2, 2.0)
    for axis, rank in zip(axes, (0, p - 1), strict=True):
        for case, style in zip(DRAWN, ("-", "-", "--", "-.", ":"), strict=True):
            size = dict.fromkeys(range(p * case.virtual), 1 / case.virtual)
            times, amounts = zip(*case.played(p, m).live(rank, size), strict=True)
            axis.step(times, amounts, style, where="post", linewidth=1.4, label=str(case).replace("`", ""))
        axis.set_title(f"rank {rank}: live microbatches", loc="left", fontsize=9)
    axes[0].legend(frameon=False, fontsize=8)
    axes[-1].set_xlabel("time; a forward through a rank's whole part of the model takes 1", fontsize=8)
    _save(figure, path)


def _panels(count: int, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height * count + 0.9))
    axes = figure.subplots(count, 1, sharex=True)
    for axis in axes:
        axis.tick_params(labelsize=7)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, axes


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLOURS[kind][0], label=MEANINGS[kind]) for kind in COLOURS]
    patches.append(Patch(color=COLOURS["F"][1], label="paler: a rank's second window"))
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False, fontsize=8)


def _save(figure: Any, path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "lightning_3d", "svg.fonttype": "none"}):
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def main() -> None:
    """Write the page's blocks and the pictures."""
    PAGE.write_text(page(PAGE.read_text()))
    draw_schedules(FOLDER / "pictures" / "schedules.png")
    draw_memory(FOLDER / "pictures" / "schedule_memory.svg")


if __name__ == "__main__":
    main()
