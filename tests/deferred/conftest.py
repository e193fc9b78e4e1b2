from __future__ import annotations

import pytest

from lightning_3d.deferred import tensor as room


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SMALLEST", 16)
