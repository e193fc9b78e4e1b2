"""WHAT did it do?  Traces of the pipeline, timelines, the communication ledger, tables. How it works: README.md."""

from lightning_3d.observe.chrome import chrome_trace, save_chrome_trace
from lightning_3d.observe.drawing import check_picture, draw_losses, draw_timeline
from lightning_3d.observe.idle import Bubble, bubble, ideal
from lightning_3d.observe.imbalance import Balance, StageTime, balance
from lightning_3d.observe.ledger import LedgerRow, ledger_rows, ledger_rows_table, ledger_table
from lightning_3d.observe.pieces import windows_of
from lightning_3d.observe.tables import (
    StageRow,
    TensorRow,
    axis_table,
    mesh_table,
    plain_table,
    render,
    show,
    stage_table,
    tensor_table,
)
from lightning_3d.observe.timeline import Timeline, ascii_timeline, recorded_steps, timeline_of
from lightning_3d.observe.trace import RankTrace, Span, StepTrace, TraceRecorder, load_traces, save_trace

__all__ = [
    "Balance",
    "Bubble",
    "LedgerRow",
    "RankTrace",
    "Span",
    "StageRow",
    "StageTime",
    "StepTrace",
    "TensorRow",
    "Timeline",
    "TraceRecorder",
    "ascii_timeline",
    "axis_table",
    "balance",
    "bubble",
    "check_picture",
    "chrome_trace",
    "draw_losses",
    "draw_timeline",
    "ideal",
    "ledger_rows",
    "ledger_rows_table",
    "ledger_table",
    "load_traces",
    "mesh_table",
    "plain_table",
    "recorded_steps",
    "render",
    "save_chrome_trace",
    "save_trace",
    "show",
    "stage_table",
    "tensor_table",
    "timeline_of",
    "windows_of",
]
