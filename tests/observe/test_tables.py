from __future__ import annotations

import pytest
import torch

from lightning_3d.comm import Ledger
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.observe import (
    StageRow,
    TensorRow,
    axis_table,
    ledger_rows,
    ledger_table,
    mesh_table,
    render,
    show,
    stage_table,
    tensor_table,
)


def test_the_mesh_table_has_every_rank_once_and_the_last_stage_on_rank_zero() -> None:
    text = render(mesh_table(Layout(tp=2, pp=2, dp=2)))
    lines = [line for line in text.splitlines() if "rank" in line]
    assert len(lines) == 4
    assert [text.count(f"rank {r}") for r in range(8)] == [1] * 8
    assert "1 (last: loss)" in lines[1]
    assert "rank 0" in lines[1]
    assert "rank 2" in lines[0]


def test_axes_of_size_one_are_left_out() -> None:
    text = render(axis_table(Layout(tp=2, dp=3)))
    assert "pp" not in text
    assert "0, 1" in text
    assert "0, 2, 4" in text


def test_equal_blocks_share_a_line() -> None:
    rows = [TensorRow(f"layers.{i}.fc.weight", "column", (64, 16), (32, 16), "feeds proj") for i in (0, 1, 2, 4)]
    rows.append(TensorRow("layers.3.fc.weight", "replicated", (63, 16), (63, 16), "63 is not a multiple of 2"))
    text = render(tensor_table(rows), width=140)
    assert "layers.{0-2,4}.fc.weight" in text
    assert "layers.3.fc.weight" in text
    assert "64 x 16" in text
    assert "32 x 16" in text


def test_stage_rows_show_modules_and_borders() -> None:
    rows = [
        StageRow(0, ("embed", "blocks.0", "blocks.1"), 1000, 4096, (), ("hidden",)),
        StageRow(1, ("blocks.2", "norm", "head"), 2000, 8192, ("hidden",), ()),
    ]
    text = render(stage_table(rows), width=120)
    assert [line.split()[:2] for line in text.splitlines()[4:6]] == [["0", "embed"], ["blocks.{0-1}"]]
    assert "4.0 KiB" in text
    assert "1,000" in text


def test_names_are_not_broken_and_no_message_is_lost() -> None:
    name = "model.base_model.model.model.layers.3.self_attn.q_proj.base_layer.weight"
    rows = [StageRow(0, (name, f"{name}s"), 1, 4, (f"{'x'.join(['1024'] * 5)} from 1",) * 2 + ("8 from 1",), ("a",))]
    lines = render(stage_table(rows), tensor_table([TensorRow(name, "row", (4, 4), (4, 2), "why " * 40)]), width=80)
    assert lines.count(name) == 3
    assert "2 x (1024x1024x1024x1024x1024 from 1)" in lines
    assert "8 from 1" in lines
    assert lines.count("why") == 41  # and the head of the column


def test_ledger_rows_are_per_step_and_sorted() -> None:
    ledger = Ledger()
    for _ in range(2):
        with ledger.during("backward"):
            ledger.record("tp", "all_reduce", 2, torch.zeros(8))
        with ledger.during("forward"):
            ledger.record("tp", "all_reduce", 2, torch.zeros(8))
            ledger.record("pp", "send", 2, torch.zeros(4))
    rows = ledger_rows(ledger, steps=2)
    assert [(r.phase, r.axis, r.op) for r in rows] == [
        ("forward", "tp", "all_reduce"),
        ("forward", "pp", "send"),
        ("backward", "tp", "all_reduce"),
    ]
    assert (rows[0].calls, rows[0].elements, rows[0].payload, rows[0].wire) == (1, 8, 32, 32)
    text = render(ledger_table(ledger, 2))
    assert text.splitlines()[-1].split()[:3] == ["total", "3", "20"]
    with pytest.raises(ConfigurationError, match="steps is 0"):
        ledger_rows(ledger, 0)


def test_text_has_no_colour_and_is_what_a_log_file_gets(capsys: pytest.CaptureFixture[str]) -> None:
    table = mesh_table(Layout(tp=2))
    show("[bold]not markup[/bold]", table)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out == render("[bold]not markup[/bold]", table) + "\n"
    assert out.startswith("[bold]")
