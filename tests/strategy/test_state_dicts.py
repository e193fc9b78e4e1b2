"""What user code gets from `state_dict()` of a cut module works as tensors, and is never saved by mistake."""

from __future__ import annotations

from typing import Any

from lightning_3d.testing import preload
from tests.strategy import state_dicts
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.strategy.state_dicts")


def test_parts_work_as_tensors_and_are_not_written() -> None:
    for rank, got in enumerate(launch(state_dicts.parts, 2)):
        assert got["kept"] == ["StatePart"] * 4
        assert got["plain"] == ["Tensor"] * 4
        assert got["loaded"]
        assert got["copied"]
        assert got["inner"]
        for message in got["refused"]:
            for word in (got["name"], f"rank {rank} of 2", "whole_state_dict()", "checkpoint export"):
                assert word in message


def test_a_folder_that_from_pretrained_reads(tmp_path: Any) -> None:
    zero, one = launch(state_dicts.folder_for_hugging_face, 2, [sizes(2), sizes(1, 2)], str(tmp_path))
    assert zero == [True] * 4
    assert one == [0, 0]
