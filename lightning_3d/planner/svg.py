"""HOW is a chart drawn without anything from outside?  A few shapes as SVG text (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = {
    "weights": "#4269d0", "gradients": "#97bbf5", "optimizer": "#6cc5b0", "buffers": "#9498a0",
    "activations": "#efb118", "passing": "#ff725c", "reserve": "#d4d4d8", "context": "#a1a1aa",
    "compute": "#4269d0", "recompute": "#97bbf5", "tensor": "#ff725c", "expert": "#9c6b4e", "pipeline": "#a463f2",
    "bubble": "#d4d4d8", "data": "#3ca951", "F": "#4269d0", "B": "#3ca951", "I": "#6cc5b0", "W": "#efb118",
}  # fmt: skip
COLOURS_OF_TIME = {**COLOURS, "context": "#9c6b4e", "optimizer": "#efb118"}
GREY = "#71717a"


@dataclass
class Drawing:
    """Shapes on a canvas of `width` x `height`."""

    width: float
    height: float
    shapes: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, colour: str, tip: str = "") -> None:
        """A filled box; `tip` appears when the pointer rests on it."""
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self.shapes.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height:.2f}" fill="{colour}">'
            f"{inner}</rect>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = GREY, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.shapes.append(
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{colour}" stroke-width="1"{dash}/>'
        )

    def dot(self, x: float, y: float, radius: float, colour: str, tip: str) -> None:
        self.shapes.append(
            f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius}" fill="{colour}" fill-opacity="0.8">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", size: float = 11, colour: str = "#27272a"
    ) -> None:
        self.shapes.append(
            f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
            f"{escape(words)}</text>"
        )

    def __str__(self) -> str:
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" width="100%" '
            f'style="max-width:{self.width:g}px" font-family="system-ui, sans-serif">{"".join(self.shapes)}</svg>'
        )


def legend(names: Sequence[str], colours: dict[str, str], width: float = 900) -> str:
    """What the colours mean."""
    drawing = Drawing(width, 20)
    x = 4.0
    for name in names:
        drawing.rect(x, 5, 10, 10, colours[name])
        drawing.text(x + 14, 14, name)
        x += 24 + 6.2 * len(name)
    return str(drawing)


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    colours: dict[str, str],
    unit: str,
    limit: float | None = None,
) -> str:
    """Horizontal bars, each of named parts.

    Args:
        rows: A label and the parts of its bar.
        colours: Of the parts.
        unit: Behind the numbers.
        limit: Where to draw a dashed line.
    """
    left, right, thick = 14 + 6.2 * max(len(label) for label, _ in rows), 90.0, 16.0
    most = max([sum(value for _, value in parts) for _, parts in rows] + ([limit] if limit else []))
    scale = (900 - left - right) / most if most else 0.0
    drawing = Drawing(900, (thick + 6) * len(rows) + 24)
    for number, (label, parts) in enumerate(rows):
        y, x = 4 + number * (thick + 6), left
        drawing.text(left - 6, y + 12, label, "end")
        for name, value in parts:
            drawing.rect(x, y, value * scale, thick, colours[name], f"{label}: {name} {value:.4g} {unit}")
            x += value * scale
        drawing.text(x + 4, y + 12, f"{sum(value for _, value in parts):.4g} {unit}")
    if limit:
        bottom = drawing.height - 18
        drawing.line(left + limit * scale, 0, left + limit * scale, bottom, "#dc2626", True)
        drawing.text(left + limit * scale, bottom + 14, f"{limit:.4g} {unit}", "middle", colour="#dc2626")
    return str(drawing)


def lanes(
    rows: Sequence[Sequence[tuple[str, float, float, str]]], labels: Sequence[str], length: float, unit: str
) -> str:
    """Boxes over time: per lane `(kind, start, end, what it is)`."""
    left, thick = 70.0, 18.0
    scale = (900 - left - 10) / length
    drawing = Drawing(900, (thick + 3) * len(rows) + 26)
    for number, boxes in enumerate(rows):
        y = 2 + number * (thick + 3)
        drawing.rect(left, y, length * scale, thick, "#f4f4f5")
        drawing.text(left - 6, y + 13, labels[number], "end")
        for kind, start, end, tip in boxes:
            drawing.rect(left + start * scale, y, (end - start) * scale - 0.4, thick, COLOURS[kind], tip)
    bottom = drawing.height - 8
    for tick in range(6):
        x = left + tick / 5 * length * scale
        drawing.text(x, bottom, f"{tick / 5 * length:.3g} {unit}", "middle", 10, GREY)
    return str(drawing)


def scatter(points: Sequence[tuple[float, float, bool, str]], x_says: str, y_says: str, limit: float) -> str:
    """Points `(x, y, chosen, what it is)` with a dashed line at `limit` on the x axis."""
    left, top, width, height = 60.0, 10.0, 820.0, 300.0
    most_x = max([x for x, *_ in points] + [limit]) * 1.05
    low, high = min(y for _, y, *_ in points), max(y for _, y, *_ in points)
    low, high = low - 0.05 * (high - low) - 1e-9, high + 0.05 * (high - low) + 1e-9
    drawing = Drawing(900, height + 50)
    drawing.line(left, top, left, top + height)
    drawing.line(left, top + height, left + width, top + height)
    for tick in range(6):
        x, y = left + tick / 5 * width, top + height - tick / 5 * height
        drawing.text(x, top + height + 14, f"{tick / 5 * most_x:.3g}", "middle", 10, GREY)
        drawing.text(left - 6, y + 4, f"{low + tick / 5 * (high - low):.3g}", "end", 10, GREY)
    drawing.text(left + width / 2, top + height + 32, x_says, "middle")
    drawing.text(left + 4, top + 8, y_says)
    drawing.line(left + limit / most_x * width, top, left + limit / most_x * width, top + height, "#dc2626", True)
    for x, y, chosen, tip in points:
        colour = "#dc2626" if chosen else "#4269d0"
        at = (left + x / most_x * width, top + height - (y - low) / (high - low) * height)
        drawing.dot(*at, 6 if chosen else 4, colour, tip)
    return str(drawing)
