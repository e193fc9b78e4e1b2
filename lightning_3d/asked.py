"""WHAT did the user say about the layout, and what is left open?

Every size that can be chosen has no default of its own: None means that nobody said anything. Without `layout="auto"`
that is the usual value (1, ZeRO-1, 1F1B); with it the planner decides, and what was said stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_3d.errors import LayoutError
from lightning_3d.layout import LONG_NAMES, Layout, read_parts

AUTO = "auto"
_TWO_PARTS = ("interleaved_1f1b", "zb_v")


@dataclass(frozen=True)
class Asked:
    """The user's wishes.

    Attributes:
        fields: Those of `Layout` that were given, by name.
        automatic: The rest is chosen in set-up.
    """

    fields: Mapping[str, Any]
    automatic: bool = False

    @classmethod
    def read(cls, layout: Any, arguments: Mapping[str, Any]) -> Asked:
        """Put a text and single sizes together.

        Args:
            layout: "auto", a text like "tp2-pp2-zero1", or None.
            arguments: Fields of `Layout`; None: not given.

        Raises:
            LayoutError: The text cannot be read, a size is impossible, or both say something different.
        """
        fields = {name: value for name, value in arguments.items() if value is not None}
        if layout is not None and not isinstance(layout, str):
            raise LayoutError(
                f"layout is {layout!r}; it must be 'auto', a text like 'tp2-pp2-dp2-zero1-1f1b', or None (then the "
                "sizes are arguments of their own)."
            )
        automatic = layout is not None and layout.strip().lower() == AUTO
        for name, value in (read_parts(layout) if layout is not None and not automatic else {}).items():
            if name in fields and fields[name] != value:
                raise LayoutError(
                    f"layout={layout!r} and {LONG_NAMES[name]}={fields[name]!r} say different things. Give one of them."
                )
            fields[name] = value
        asked = cls(fields, automatic)
        asked.least().check_supported()
        return asked

    def least(self) -> Layout:
        """The layout with what is given, and the usual values for the rest.

        Raises:
            LayoutError: A size is impossible, or two exclude each other.
        """
        fields = dict(self.fields)
        if self.automatic:  # what goes with it is still to be chosen
            if fields.get("order", "looped") != "looped":
                fields.setdefault("schedule", "interleaved_1f1b")
            if fields.get("schedule") in _TWO_PARTS:
                fields.setdefault("virtual", 2)
            elif fields.get("virtual", 1) != 1:
                fields.setdefault("schedule", "interleaved_1f1b")
        return Layout(**fields)

    @property
    def layout(self) -> Layout | None:
        """The layout as far as it is known before the number of processes is; None: it is chosen in set-up."""
        return None if self.automatic else self.least()

    def on(self, processes: int) -> Layout | None:
        """The layout on so many processes; None: it is chosen in set-up.

        Raises:
            LayoutError: What is given does not go with that number.
        """
        least = self.least()
        if not self.automatic:
            layout = least if "dp" in self.fields else least.with_world_size(processes)
            layout.check_world_size(processes)
            return layout
        sizes = {name: self.fields[name] for name in ("tp", "pp", "dp") if name in self.fields}
        if len(sizes) == 3:
            least.check_world_size(processes)
        if processes % least.world_size:
            given = " x ".join(f"{LONG_NAMES[name]}={size}" for name, size in sizes.items())
            raise LayoutError(
                f"layout='auto' with {given}: {processes} processes (devices x num_nodes) are no multiple of "
                f"{least.world_size}, so there is nothing to choose. Leave one of them out, or run on a multiple of "
                f"{least.world_size} processes."
            )
        return None
