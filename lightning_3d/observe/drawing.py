"""HOW does a run look?  Timelines and loss curves as PNG or SVG (matplotlib, without a display)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigurationError
from lightning_3d.observe.idle import bubble, ideal
from lightning_3d.observe.timeline import Timeline

_COLOUR = {"F": "#4477aa", "B": "#ee8866", "I": "#aa4488", "W": "#ccaa33", "reduce": "#44aa99", "optimizer": "#bbbbbb"}
_NAME = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of inputs",
    "W": "gradient of weights",
    "reduce": "reduce over dp",
    "optimizer": "optimizer",
}

_SMALL: dict[str, Any] = {"fontsize": 7, "color": "#555555", "ha": "right", "va": "top"}


def check_picture(path: str | Path) -> None:
    """Raise `ConfigurationError` unless the file's ending is one that is drawn."""
    if Path(path).suffix not in (".png", ".svg"):
        raise ConfigurationError(f"cannot draw to {str(path)!r}: the name must end in .png or .svg.")


def draw_timeline(timeline: Timeline, path: str | Path, *, with_ideal: bool = True, note: str = "") -> Path:
    """Draw a measured step to `path` (`.png` or `.svg`): one bar row per rank, below it what was possible.

    Args:
        timeline: The step.
        path: The file; its ending chooses the format.
        with_ideal: Also draw the same order of actions with equal windows and free messages.
        note: A line under the picture, e.g. how many ranks shared a core.
    """
    panels = [("measured", timeline), *([("ideal", ideal(timeline))] if with_ideal else [])]
    rows = len(timeline.lanes)
    height = (0.42 * rows + 0.75) * len(panels) + 1.0
    figure = _figure(12, height)
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)
    for axis, (name, panel) in zip(axes[:, 0], panels, strict=True):
        _draw_lanes(axis, panel, max(panel.seconds for _, panel in panels))
        measured = bubble(panel)
        axis.set_title(f"{name}: idle {measured.mean:.1%} of {1000 * panel.seconds:.0f} ms", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("milliseconds")
    _legend(axes[0, 0], timeline)
    found = bubble(timeline)
    title = f"batch {timeline.step}" + (f" of {timeline.layout}" if timeline.layout else "")
    figure.suptitle(f"{title}: bubble measured {found.mean:.1%}", fontsize=12, x=0.02, ha="left")
    figure.text(0.98, 0.985, found.beside, fontsize=8, color="#555555", ha="right", va="top")
    if note:
        figure.text(0.02, 0.005, note, fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.02 if note else 0, 1, 0.99))
    return _save(figure, path)


def draw_losses(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    path: str | Path,
    *,
    points: Mapping[str, Sequence[tuple[int, float]]] | None = None,
    title: str = "",
) -> Path:
    """Draw losses over steps: `curves` as lines, `points` (validation) as markers of the same colours in order."""
    figure = _figure(9, 5)
    axis = figure.subplots()
    styles: list[dict[str, Any]] = [
        {"color": "#4477aa", "linewidth": 4, "alpha": 0.45},
        {"color": "#cc3311", "linewidth": 1.2},
    ]
    marks: list[dict[str, Any]] = [
        {"color": "#4477aa", "marker": "o", "markersize": 11, "alpha": 0.45},
        {"color": "#cc3311", "marker": "x", "markersize": 7},
    ]
    for i, (name, values) in enumerate(curves.items()):
        axis.plot([s for s, _ in values], [v for _, v in values], label=name, **styles[i % 2])
    for i, (name, values) in enumerate((points or {}).items()):
        axis.plot([s for s, _ in values], [v for _, v in values], label=name, linestyle="", **marks[i % 2])
    axis.set(xlabel="optimizer step", ylabel="loss")
    axis.set_title(title, loc="left", fontsize=11)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.tight_layout()
    return _save(figure, path)


def _draw_lanes(axis: Any, timeline: Timeline, seconds: float) -> None:
    for row, lane in enumerate(timeline.lanes):
        windows = lane.windows
        for span in sorted(lane.spans, key=lambda s: s.start):
            if span.kind not in _COLOUR:
                continue
            axis.barh(
                row,
                1000 * span.seconds,
                left=1000 * span.start,
                height=0.78,
                color=_shade(_COLOUR[span.kind], windows.index(span.stage), len(windows))
                if span.stage in windows
                else _COLOUR[span.kind],
                edgecolor="white",
                linewidth=0.6,
            )
            if span.microbatch >= 0 and span.seconds > seconds / 70:
                middle = 500 * (span.start + span.end)
                axis.text(middle, row, str(span.microbatch), ha="center", va="center", fontsize=8, color="white")
    virtual = max(len(lane.windows) for lane in timeline.lanes)
    if virtual > 1:
        axis.text(1.0, -0.02, "lighter: later windows of a rank", transform=axis.transAxes, **_SMALL)
    several = len({(lane.dp, lane.tp) for lane in timeline.lanes}) > 1
    places = [f"dp {lane.dp} · tp {lane.tp} · " if several else "" for lane in timeline.lanes]
    labels = [
        f"{place}stage {lane.stage} · rank {lane.rank}" for place, lane in zip(places, timeline.lanes, strict=True)
    ]
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1000 * seconds)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _shade(colour: str, window: int, windows: int) -> tuple[float, float, float]:
    """The later a window of a rank, the lighter."""
    white = 0.5 * window / max(1, windows - 1)
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return (red + white * (1 - red), green + white * (1 - green), blue + white * (1 - blue))


def _legend(axis: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    kinds = [k for k in _COLOUR if any(s.kind == k for lane in timeline.lanes for s in lane.spans)]
    handles = [Patch(color=_COLOUR[k]) for k in kinds]
    axis.legend(
        handles,
        [_NAME[k] for k in kinds],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(kinds),
        frameon=False,
        fontsize=8,
    )


def _figure(width: float, height: float) -> Any:
    """A matplotlib figure without pyplot: no display, and the user's own backend and figures are left alone."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _save(figure: Any, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
