"""The figures and drawings of docs/schedules.md are those of today's lists."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_its_script_writes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("draw_schedules", ROOT / "docs" / "draw_schedules.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run python docs/draw_schedules.py"
    for name in ("schedules.png", "schedule_memory.svg"):
        assert name in text
        assert (ROOT / "docs" / "pictures" / name).exists()
    script.draw_memory(tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").stat().st_size > 1000
