"""The worked examples of docs/planner.md are what the planner computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_3d.pipeline.schedule import placement, schedule_lists
from lightning_3d.pipeline.timing import parts, simulate
from lightning_3d.planner import Cluster, Plan, plan
from lightning_3d.planner.playing import in_flight
from lightning_3d.planner.presets import preset
from lightning_3d.planner.work import Setting, layer_work

TEXT = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
GIB = 2**30


@pytest.fixture(scope="module")
def seventy() -> Plan:
    return plan("llama3-70b", Cluster.of("a100-80gb", 64, 8, "hdr200x8"), global_batch=1024, seq=4096)


@pytest.mark.parametrize("line", [line for line in TEXT.splitlines() if line.startswith("| `tp")])
def test_prices(line: str, seventy: Plan) -> None:
    name, memory, seconds, tensor, mfu = (cell.strip(" `%") for cell in line.strip("|").split("|"))
    priced = seventy.explain(name)
    assert f"{priced.memory.peak.total / GIB:.1f}" == memory
    assert f"{priced.seconds:.1f}" == seconds
    assert f"{priced.time.tensor:.1f}" == tensor
    assert f"{100 * priced.mfu():.1f}" == mfu


def test_best_of_seventy(seventy: Plan) -> None:
    assert str(seventy.best).startswith("tp2-pp1-dp32-zero3")
    assert "TP=16 leaves the machine: 320 all-reduces" in str(seventy)


ROWS = [line for line in TEXT.splitlines() if line.startswith(("| 1F1B |", "| interleaved |", "| ZB-"))]


@pytest.mark.parametrize("line", ROWS)
def test_bubbles(line: str) -> None:
    kind, virtual, count, idle, held, messages = (cell.strip(" *%") for cell in line.strip("|").split("|"))
    name = {"1F1B": "1f1b", "interleaved": "interleaved_1f1b", "ZB-H1": "zb_h1", "ZB-V": "zb_v"}[kind]
    v, m = int(virtual), int(count)
    played = simulate(schedule_lists(name, 8, m, v), placement(name, 8, v), parts(1 / v, 1 / v, 1 / v))
    assert f"{100 * played.bubble:.1f}" == idle
    assert f"{max(map(sum, in_flight(name, 8, m, v))) / v:.4g}" == held
    assert 2 * m * v == int(messages)


def test_long_sequences() -> None:
    model = preset("llama3-70b")
    for seq, flash, tp, sp, cp, said in (
        (4096, False, 1, False, 1, "3.05"),
        (131072, False, 1, False, 1, "2,081"),
        (4096, True, 1, False, 1, "1.05"),
        (131072, True, 1, False, 1, "33.5"),
        (131072, True, 8, False, 1, "11.2"),
        (131072, True, 8, True, 1, "4.2"),
        (131072, True, 8, True, 8, "0.52"),
    ):
        kept = layer_work(model, 0, Setting(seq // cp, seq, 1, tp=tp, sp=sp, cp=cp, flash=flash)).kept / GIB
        assert float(said.replace(",", "")) == pytest.approx(kept, rel=0.01)
        assert said in TEXT


def test_one_hundred_seventy_five() -> None:
    answer = plan("gpt3-175b", Cluster.of("a100-80gb", 1024, 8, "hdr200x8"), global_batch=1536, seq=2048)
    usual = answer.explain("tp8-pp16-zero1-interleaved_1f1b-v6-mbs1-sp")
    assert f"{usual.seconds:.1f} s and {100 * usual.mfu():.1f} % MFU" in TEXT
    assert f"against {answer.best.seconds:.1f} s and {100 * answer.best.mfu():.1f} %" in TEXT
