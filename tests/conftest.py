"""No test finds what another one left behind."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs are remembered per user; a test proves anew."""
    monkeypatch.setenv("LIGHTNING_3D_CACHE", str(tmp_path / "cache"))
