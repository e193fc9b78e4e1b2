"""Draw docs/pictures/column_then_row.svg: what two ranks compute for a column layer and a row layer."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

HATCHES = ("", "////")  # rank 0 plain, rank 1 hatched: readable without colour
SHADES = ("#dce9f5", "#f6e3cf")


def box(ax: Axes, x: float, y: float, width: float, height: float, text: str, rank: int | None = None) -> None:
    """A matrix, or one rank's part of it."""
    face, hatch = ("white", "") if rank is None else (SHADES[rank], HATCHES[rank])
    ax.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor="black", hatch=hatch, linewidth=0.8))
    ax.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9,
        bbox={"facecolor": face, "edgecolor": "none", "pad": 0.8},
    )  # fmt: skip


def draw(path: Path) -> None:
    """The picture, for `Y = f(X W) V` over two ranks."""
    figure, ax = plt.subplots(figsize=(9.2, 3.3))
    box(ax, 0.0, 1.0, 0.8, 1.4, "X\n(whole)")
    ax.text(1.0, 1.7, "x", fontsize=12, va="center")
    box(ax, 1.3, 1.3, 0.9, 0.8, "W1", 0)
    box(ax, 2.2, 1.3, 0.9, 0.8, "W2", 1)
    ax.text(1.3, 2.25, "W, cut by columns", fontsize=9)
    ax.text(3.25, 1.7, "=", fontsize=12, va="center")
    box(ax, 3.6, 1.0, 0.9, 1.4, "h1 =\nf(X W1)", 0)
    box(ax, 4.5, 1.0, 0.9, 1.4, "h2 =\nf(X W2)", 1)
    ax.text(3.6, 2.55, "no communication", fontsize=9)
    ax.text(5.6, 1.7, "x", fontsize=12, va="center")
    box(ax, 5.9, 1.7, 0.9, 0.7, "V1", 0)
    box(ax, 5.9, 1.0, 0.9, 0.7, "V2", 1)
    ax.text(5.75, 2.55, "V, cut by rows", fontsize=9)
    ax.text(6.95, 1.7, "=", fontsize=12, va="center")
    box(ax, 7.3, 1.0, 0.8, 1.4, "h1 V1", 0)
    ax.text(8.2, 1.7, "+", fontsize=12, va="center")
    box(ax, 8.45, 1.0, 0.8, 1.4, "h2 V2", 1)
    ax.text(9.4, 1.7, "=", fontsize=12, va="center")
    box(ax, 9.7, 1.0, 0.8, 1.4, "Y\n(whole)")
    ax.text(7.3, 2.55, "all-reduce: the sum of the ranks' parts", fontsize=9)
    ax.annotate("", (0.4, 0.45), (9.9, 0.45), arrowprops={"arrowstyle": "->"})
    ax.text(
        5.2, 0.1, "backward: V needs nothing, the gradient of X is a sum over the ranks (one all-reduce)",
        fontsize=9, ha="center",
    )  # fmt: skip
    box(ax, 0.0, 3.0, 0.35, 0.25, "", 0)
    ax.text(0.45, 3.12, "on rank 0", fontsize=9, va="center")
    box(ax, 1.7, 3.0, 0.35, 0.25, "", 1)
    ax.text(2.15, 3.12, "on rank 1", fontsize=9, va="center")
    ax.set_xlim(-0.1, 10.7)
    ax.set_ylim(0, 3.4)
    ax.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "lightning_3d"
    folder = Path(__file__).parent / "pictures"
    folder.mkdir(exist_ok=True)
    draw(folder / "column_then_row.svg")
