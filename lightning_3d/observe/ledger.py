"""HOW MUCH was sent?  The communication ledger as rows and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from lightning_3d.comm import Ledger
from lightning_3d.errors import ConfigurationError
from lightning_3d.observe.tables import byte_text, plain_table

AXIS_ORDER = ("tp", "cp", "pp", "dp", "replica", "world", "control")
PHASE_ORDER = ("forward", "backward", "reduce", "clip", "optimizer", "other")


@dataclass(frozen=True)
class LedgerRow:
    """Communication of one kind, per step and rank.

    Attributes:
        phase: Part of the step: forward, backward, ...
        axis: Mesh axis over which it went.
        op: The collective, or send and recv.
        calls: Calls per step.
        elements: Elements of all operands (the full-size one of a gather or scatter).
        payload: Their bytes.
        wire: Bytes this rank sent if a ring carries the collective: 2(n-1)/n of the payload for an all-reduce.
    """

    phase: str
    axis: str
    op: str
    calls: float
    elements: float
    payload: float
    wire: float


def ledger_rows(ledger: Ledger, steps: int = 1) -> list[LedgerRow]:
    """What the ledger counted since its last reset, divided by the number of steps.

    Raises:
        ConfigurationError: `steps` is not positive.
    """
    if steps < 1:
        raise ConfigurationError(f"steps is {steps}; the ledger can be divided by at least 1 step.")
    rows = [
        LedgerRow(phase, axis, op, t.calls / steps, t.elements / steps, t.payload / steps, t.wire / steps)
        for (phase, axis, op), t in ledger.traffic.items()
    ]
    return sorted(rows, key=lambda r: (_place(r.phase, PHASE_ORDER), _place(r.axis, AXIS_ORDER), r.op))


def ledger_table(ledger: Ledger, steps: int = 1, title: str = "communication per step and rank") -> Table:
    """What `ledger_rows` gives, as a table with a line of totals."""
    return ledger_rows_table(ledger_rows(ledger, steps), title)


def ledger_rows_table(rows: list[LedgerRow], title: str = "communication per step and rank") -> Table:
    """Rows (of this rank, or read from a file) as a table with a line of totals."""
    total = LedgerRow("total", "", "", *(sum(getattr(r, f) for r in rows) for f in _NUMBERS))
    columns = ["phase", "axis", "op", "calls", "elements", "payload", "on the wire"]
    cells = [_cells(r) for r in [*rows, total]]
    return plain_table(title, columns, cells, right=columns[3:], total=True)


_NUMBERS = ("calls", "elements", "payload", "wire")


def _cells(row: LedgerRow) -> list[str]:
    numbers = [f"{row.calls:,.6g}", f"{row.elements:,.0f}", byte_text(row.payload), byte_text(row.wire)]
    return [row.phase, row.axis, row.op, *numbers]


def _place(name: str, order: tuple[str, ...]) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name)
