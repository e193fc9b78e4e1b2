"""What is remembered of a machine's speed: the fastest of a few runs, with its age."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lightning_3d.planner.calibrate import Rates
from lightning_3d.planner.measured import Known, _faster, _recall, _remember

BUSY, QUIET = Rates(1e9, 5e9, 4e9), Rates(3e9, 6e9, 2e9, 1e9)


def test_the_fastest_of_several_runs_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "machines" / "here.json"
    assert _remember(file, _faster(None, Known(BUSY, 1, 100.0)))
    known = _faster(_recall(file), Known(QUIET, 1, 200.0))
    assert known == Known(Rates(3e9, 6e9, 4e9, 1e9), 2, 200.0)
    assert _remember(file, known)
    assert _recall(file) == known


@pytest.mark.parametrize(("hours", "said"), [(0.5, "less than an hour ago"), (1.5, "1 hour ago"), (50, "2 days ago")])
def test_age(hours: float, said: str) -> None:
    assert Known(BUSY, 1, time.time() - 3600 * hours).age == said


def test_a_file_that_cannot_be_used_is_measured_anew(tmp_path: Path) -> None:
    file, good = tmp_path / "here.json", {"rates": BUSY._asdict(), "count": 1, "when": 100.0}
    file.write_text(json.dumps(good))
    assert _recall(file) == Known(BUSY, 1, 100.0)
    bad = ({"rates": BUSY._replace(memory=0.0)._asdict()}, {"rates": BUSY._replace(link=float("nan"))._asdict()})
    for changes in (*bad, {"rates": {}}, {"count": "x"}, {"when": None}):
        file.write_text(json.dumps({**good, **changes}))
        assert _recall(file) is None
    file.write_text(json.dumps(BUSY._asdict()))  # of an earlier version
    assert _recall(file) is None
