"""Optimizers as users make them: names, groups, options and state are those of one process, in every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_3d.testing import preload, relative_error
from tests.strategy import optimizers
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.strategy.optimizers")

SMALL = {"bucket_size_mb": 0.002}
LAYOUTS: list[dict[str, Any]] = [
    sizes(zero_stage=3, **SMALL), sizes(1, 2, num_microbatches=4), sizes(zero_stage=2, **SMALL), sizes(2),
    sizes(zero_stage=1, **SMALL), sizes(zero_stage=1, offload_optimizer=True, **SMALL), sizes(zero_stage=0),
]  # fmt: skip
FOUR = [sizes(2, 2, num_microbatches=2), sizes(2, zero_stage=3, **SMALL), sizes(1, 2, zero_stage=3, **SMALL)]
KINDS = list(optimizers.KINDS)


WHOLE = list(optimizers.WHOLE)


@cache
def alone(kinds: tuple[str, ...]) -> dict[str, Any]:
    return dict(zip(kinds, launch(optimizers.runs, 1, [(kind, None) for kind in kinds])[0], strict=True))


def check(world: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    every = alone(tuple(dict.fromkeys(kind for kind, _ in cases)))
    for rank in launch(optimizers.runs, world, cases):
        for (kind, layout), (parameters, groups) in zip(cases, rank, strict=True):
            want, want_groups = every[kind]
            assert max(relative_error(parameters[n], p) for n, p in want.items()) <= 1e-9, (kind, layout)
            assert groups == want_groups, (kind, layout)


def test_groups_names_and_options() -> None:
    """Every kind in three layouts, every layout with several kinds."""
    turns = [(kind, LAYOUTS[(3 * i + j) % len(LAYOUTS)]) for i, kind in enumerate(KINDS) for j in range(3)]
    check(2, turns)


@pytest.mark.slow
def test_groups_names_and_options_everywhere() -> None:
    check(2, [(kind, layout) for kind in KINDS for layout in LAYOUTS])
    check(4, [(kind, layout) for kind in KINDS for layout in FOUR])


def test_whole_matrices_that_are_divided() -> None:
    """Optimizers that look at whole matrices, on such that tensor parallelism divides."""
    layouts = [
        sizes(2, 2, num_microbatches=2),
        sizes(2, zero_stage=3, **SMALL),
        sizes(4),
        sizes(2, zero_stage=1, **SMALL),
    ]
    turns = [(kind, layouts[i % 4]) for i, kind in enumerate(WHOLE)]
    more = [
        ("muon", layouts[0]),
        ("adafactor", sizes(2, zero_stage=0)),
        ("late_adafactor", sizes(2, zero_stage=2, **SMALL)),
    ]
    check(4, [*turns, *more])


@pytest.mark.slow
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_matrices_that_are_divided_everywhere(kind: str) -> None:
    layouts = [*FOUR, sizes(4), *(sizes(2, zero_stage=stage, **SMALL) for stage in range(3))]
    check(4, [(kind, layout) for layout in layouts])


def test_checkpoints_number_and_name_parameters_as_one_process(tmp_path: Path) -> None:
    """Exported to one file, the optimizer's state is that of one process, so plain Lightning resumes from it."""
    kinds, folder = ["named_groups", "late"], str(tmp_path)
    launch(optimizers.runs, 1, [(kind, None) for kind in kinds], [folder] * 2)
    for layout in (sizes(1, 2, num_microbatches=4), sizes(zero_stage=3, **SMALL)):
        launch(optimizers.runs, 2, [(kind, layout) for kind in kinds], [f"{folder}/parallel"] * 2)
        for kind in kinds:
            (want,) = torch.load(tmp_path / f"{kind}.ckpt", weights_only=True)["optimizer_states"]
            (got,) = torch.load(tmp_path / "parallel" / f"{kind}.plain.ckpt", weights_only=True)["optimizer_states"]
            assert got["param_groups"] == want["param_groups"]
            assert got["state"].keys() == want["state"].keys()
            for number, values in want["state"].items():
                for key, value in values.items():
                    assert relative_error(got["state"][number][key], value) <= 1e-9, (kind, number, key)


def test_an_optimizer_from_a_command_line() -> None:
    """LightningCLI, by class path with arguments and by the short name."""
    named, given = "--trainer.strategy=lightning_3d.ThreeDStrategy", "--trainer.strategy.init_args."
    ways = [
        [named, f"{given}zero_stage=3"],
        [named, f"{given}pipeline_parallel_size=2", f"{given}offload_optimizer=true"],
        ["--trainer.strategy=3d"],
    ]
    ((want, rate),) = launch(optimizers.by_cli, 1, [[]])[0]
    for rank in launch(optimizers.by_cli, 2, ways):
        for way, (parameters, got) in zip(ways, rank, strict=True):
            assert max(relative_error(parameters[n], p) for n, p in want.items()) <= 1e-9, way
            assert got == rate
