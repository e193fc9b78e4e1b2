"""The documentation's links lead somewhere, and what the README promises is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_links", ROOT / "docs" / "check_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_relative_link_resolves(links: ModuleType) -> None:
    files = links.markdown_files()
    assert {ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "examples" / "README.md"} <= set(files)
    assert {str(f.relative_to(ROOT)): b for f in files if (b := links.broken_links(f))} == {}


def test_a_broken_link_is_found(links: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A Title: one `two`\n[good](page.md#a-title-one-two) [file](gone.md) [heading](#nowhere) [web](https://x.y)\n"
        "```\n[code](not-a-link.md)\n```\n"
    )
    assert links.broken_links(page) == ["gone.md: there is no gone.md", "#nowhere: page.md has no heading #nowhere"]


@pytest.mark.parametrize("target", ["setup", "demo", "test", "test-all", "lint", "bench", "docs"])
def test_make_has_the_targets_the_documentation_names(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    script = (ROOT / ".ci" / "run").read_text()
    assert script.startswith("#!/usr/bin/env bash\n")
    assert re.search(r"^make test\b", script, flags=re.MULTILINE)
