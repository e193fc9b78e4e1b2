"""WHAT lies in each window of the pipeline?  Names and costs of its pieces, as a trace keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lightning_3d.pipeline import Partition


class Piece(NamedTuple):
    """One call of a closed piece of the model, and the code up to the next call.

    Attributes:
        name: Of the module.
        cost: Counted work, in any unit.
        may_begin: A window may begin here.
    """

    name: str
    cost: float
    may_begin: bool


class WindowPieces(NamedTuple):
    """One window of the chain: the stage that runs it, and its pieces in order."""

    stage: int
    pieces: tuple[Piece, ...]

    def to_data(self) -> list[Any]:
        """Plain data for JSON."""
        return [self.stage, [list(piece) for piece in self.pieces]]

    @classmethod
    def from_data(cls, data: list[Any]) -> WindowPieces:
        """The inverse of `to_data`."""
        return cls(data[0], tuple(Piece(*piece) for piece in data[1]))


def windows_of(partition: Partition) -> tuple[WindowPieces, ...]:
    """What a cut step has in its windows."""
    trace = partition.trace
    calls = trace.calls()
    first = {name: n for n, name in reversed([(n, event.atom) for n, event in calls])}
    out = []
    for window in partition.windows:
        inside = [(n, event) for n, event in calls if window.start <= n < window.stop]
        pieces = []
        for k, (n, event) in enumerate(inside):
            begin = window.start if k == 0 else n
            stop = inside[k + 1][0] if k + 1 < len(inside) else window.stop
            cost = sum(trace.cost(e) for e in trace.events[begin:stop])
            may_begin = n != calls[0][0] and first[event.atom] == n and trace.forbidden(n) is None
            pieces.append(Piece(event.atom, cost, may_begin))
        out.append(WindowPieces(window.stage, tuple(pieces)))
    return tuple(out)
