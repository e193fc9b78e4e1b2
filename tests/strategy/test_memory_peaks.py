"""How much more memory a save and a resume take than the run itself: peaks of resident memory, ZeRO-3, four ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_3d.testing import preload
from tests.strategy import memory_peaks
from tests.strategy.test_cases import launch

preload("tests.strategy.memory_peaks")
RANKS = 4
STATE = 3 * memory_peaks.PARAMETERS
"""Bytes of all parameters and the two moments."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_saving_and_resuming_take_about_one_shard_more(tmp_path: Path) -> None:
    """K10: a directory costs a rank its shard at most, a file one rank the whole. M4: a resume as much as a start."""
    shard = STATE / RANKS
    fresh = launch(memory_peaks.started_and_saved, RANKS, str(tmp_path))
    for rank, (_, directory, file) in enumerate(fresh):
        assert directory <= 1.2 * shard
        # Lightning writes a file from memory, so that rank holds it twice
        assert file <= (2 * STATE if rank == 0 else shard)
    for resumed, (started, _, _) in zip(launch(memory_peaks.resumed, RANKS, str(tmp_path)), fresh, strict=True):
        assert resumed <= started + 1.2 * shard
