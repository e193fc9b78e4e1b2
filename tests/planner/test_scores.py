"""Published rows: a sample of what `benchmarks/planner_scores.py` scores, so that a change that spoils it shows."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from benchmarks import planner_scores as scores
from benchmarks.planner_rows import Row, asked, read_rows

ROWS = read_rows(Path(__file__).parent / "published_sample.csv")
SPEED = {
    "sc21": 0.06, "korthikanti22": 0.06, "mcore_readme": 0.08, "megatron_bridge": 0.08, "nemo_cp": 0.05,
    "torchtitan_docs": 0.08, "torchtitan_a100": 0.10, "kempnerforge": 0.14, "bigscience": 0.08, "mosaicml": 0.08,
    "zero_bubble": 0.14,
}  # fmt: skip


def test_throughput() -> None:
    """The mean error of each table stays below a bound, and (but one narrow table) below half of knowing nothing."""
    found = scores.speeds(ROWS)
    assert found.keys() == SPEED.keys()
    for table, score in found.items():
        assert mean(score.errors) <= SPEED[table], table
        if table not in ("mcore_readme", "zero_bubble"):
            assert mean(score.errors) <= mean(score.null) / 2, table


def test_closed_memory_is_exact() -> None:
    for table, score in scores.closed_memory(ROWS).items():
        assert max(score.errors) <= (0.02 if table == "korthikanti22" else 0.01), table  # a digitised chart


def test_measured_memory() -> None:
    for table, score in scores.measured_memory(ROWS).items():
        assert mean(score.errors) <= 0.10, table
        assert max(score.errors) <= 0.20, table


def test_collectives() -> None:
    for table, score in scores.collectives(ROWS, 64 * 2**20, None).items():
        assert max(score.errors) <= 0.15, table


def test_what_does_not_fit_is_refused() -> None:
    text = scores.fits(ROWS)
    assert text.startswith("5 rows that do not fit")
    assert "false fit" not in text
    assert "refused" not in text


@pytest.mark.parametrize("row", [r for r in ROWS if r["source"] == "zero_bubble"], ids=lambda r: r["id"])
def test_bubble(row: Row) -> None:
    """1F1B, ZB-H1: to the last printed digit, by playing our own lists with the paper's times."""
    played = scores._bubble(row)
    assert played is not None
    exact = row["schedule"] != "1F1B-I"
    assert played == pytest.approx(float(row["bubble_rate"]), abs=1e-3 if exact else 5e-3)


def test_ranking() -> None:
    lines = [line.split("|") for line in scores.ranking(ROWS).splitlines()[2:]]
    assert len(lines) >= 4
    for _, name, _, correlation, regret, _ in lines:
        assert float(correlation) >= 0.8, name
        assert float(regret) <= 1.05, name


def test_row_without_sizes_is_left_out() -> None:
    assert asked({**ROWS[0], "layers": ""}) is None


def test_heads_that_are_not_printed_are_those_of_the_nearest_row(tmp_path: Path) -> None:
    """A width of 14400 with 96 heads is 150 a head, which is slow; 128 would be fast."""
    file = tmp_path / "rows.csv"
    lines = ["t,8,512,32", "t,80,512,96", "t,77,512,", "other,77,512,", "t,77,640,"]
    file.write_text("\n".join(["source,layers,hidden,heads", *lines]))
    assert [row["heads"] for row in read_rows(file)] == ["32", "96", "96", "", ""]


def test_spearman() -> None:
    assert scores.spearman([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert scores.spearman([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert abs(scores.spearman([(1, 1), (2, 1), (3, 1)])) < 1e-9
