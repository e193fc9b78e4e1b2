"""The planner is arithmetic: torch only where a user's module or this machine is looked at."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_3d.planner

FOLDER = Path(lightning_3d.planner.__file__).parent
WITH_TORCH = {"module_probe.py", "user_model.py", "calibrate.py", "measured.py"}
PURE = ("lightning_3d.planner", "lightning_3d.errors", "lightning_3d.layout", "lightning_3d.pipeline.schedule",
        "lightning_3d.pipeline.timing", "lightning_3d.pipeline.check", "lightning_3d.pipeline.action")  # fmt: skip


def test_imports() -> None:
    for file in FOLDER.glob("*.py"):
        tree = ast.parse(file.read_text())
        outside = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [a.name for node in outside if isinstance(node, ast.Import) for a in node.names]
        names += [node.module or "" for node in outside if isinstance(node, ast.ImportFrom)]
        assert not any(name.startswith("torch.distributed") for name in names), file.name
        if file.name not in WITH_TORCH:
            assert not any(name.split(".")[0] == "torch" for name in names), file.name
            ours = [name for name in names if name.startswith("lightning_3d")]
            assert all(name.startswith(PURE) for name in ours), file.name


def test_no_file_is_long() -> None:
    for file in FOLDER.glob("*.py"):
        assert len(file.read_text().splitlines()) <= 400, file.name
