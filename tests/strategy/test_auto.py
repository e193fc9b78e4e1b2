"""`layout="auto"`: the same choice on all ranks, numbers of one process, what was given stays, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.errors import ConfigurationError, LayoutError
from lightning_3d.testing import preload, relative_error, run_distributed
from tests.strategy import autos

preload("tests.models", "tests.strategy.autos")

PP2_TP2 = {"layout": "auto", "pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 0, "verify": False}
CASES: list[tuple[dict[str, Any], bool, int]] = [
    ({"layout": "auto", "data_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}, False, 2),
    ({"layout": "auto"}, True, 1),
    ({**PP2_TP2, "pipeline_schedule": "gpipe", "sequence_parallel": False}, False, 1),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("auto")
    env = {"LIGHTNING_3D_CACHE": str(folder / "cache")}
    return run_distributed(autos.runs, 4, CASES, str(folder), init_process_group=False, timeout=200, env=env)


def test_every_rank_has_the_same_choice(ranks: list[list[dict[str, Any]]]) -> None:
    for runs in zip(*ranks, strict=True):
        assert len({(str(run["layout"]), run["microbatches"], str(run["arguments"])) for run in runs}) == 1
        dp = runs[0]["layout"].dp
        # looked at once for the choice and the cut, as for one replica; then made for training and for predict
        first = 1 if runs[0]["arguments"] else dp
        assert all(run["loaders"] == [first, dp, dp] for run in runs)
        assert [bool(run["said"].count("to keep this choice: ThreeDStrategy(")) for run in runs[1:]] == [False] * 3
        assert all(run["kept"] and run["predicted"] for run in runs)
    assert all("samples/s" in run["said"] and "trains most samples" in run["said"] for run in ranks[0][:3])
    assert "auto" not in ranks[0][3]["said"]


def test_what_is_given_stays(ranks: list[list[dict[str, Any]]]) -> None:
    first, free, third, frozen = ranks[0]
    assert (first["layout"].pp, first["layout"].dp, first["microbatches"]) == (2, 2, 2)
    assert free["layout"].world_size == 4
    assert third["layout"] == Layout(tp=2, pp=2, dp=1, zero=0, schedule="gpipe")
    assert third["arguments"]["sequence_parallel"] is False
    assert frozen["layout"] == first["layout"]
    assert frozen["microbatches"] == first["microbatches"]
    assert frozen["drawn"] == first["drawn"], "a choice draws no random numbers"


def test_numbers_of_one_process(ranks: list[list[dict[str, Any]]]) -> None:
    cases = [*CASES, CASES[0]]
    samples = [autos.BATCH * run["layout"].dp for run in ranks[0]]
    wanted = [(later, size, accumulate) for (_, later, accumulate), size in zip(cases, samples, strict=True)]
    found = run_distributed(autos.references, 1, wanted, init_process_group=False, timeout=60)[0]
    for want, runs in zip(found, zip(*ranks, strict=True), strict=True):
        for run in (runs[0], runs[-1]):
            assert want.keys() == run["parameters"].keys()
            assert max(relative_error(run["parameters"][n], p) for n, p in want.items()) < 1e-9


def test_refusals(tmp_path: Path) -> None:
    env = {"LIGHTNING_3D_CACHE": str(tmp_path / "cache")}
    said = run_distributed(autos.refusals, 2, 1 << 20, init_process_group=False, timeout=100, env=env)
    assert said[0] == said[1]
    evaluation, early, by_hand, microbatches, memory, given = said[0]
    assert "trainer.predict is the first that this Trainer runs. Give the sizes" in evaluation
    assert "chosen in set-up" in early
    assert "configure_optimizers" in early
    assert "manual optimization" in by_hand
    assert "no layout with pp 2, microbatches 8 can train Module" in microbatches
    assert "PP=2: a batch of 4 samples has no 8 microbatches" in microbatches
    assert "does not fit on 2 x" in memory
    assert "with tp 2 can train Module with batches of 4 samples per replica" in given
    assert "every GPU would need" in given


def test_a_checkpoint_of_another_layout(tmp_path: Path) -> None:
    env = {"LIGHTNING_3D_CACHE": str(tmp_path / "cache")}
    found = run_distributed(autos.resumed, 2, str(tmp_path), init_process_group=False, timeout=100, env=env)
    assert found == [[0.0, 0.0]] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layout": "tp2-pp2", "tensor_parallel_size": 4}, "layout='tp2-pp2' and tensor_parallel_size=4 say different"),
        ({"layout": "tp2-qq2"}, "cannot read 'qq2'"),
        ({"layout": 3}, "layout is 3; it must be 'auto'"),
        ({"layout": "cp2"}, "context_parallel_size=2"),
        ({"layout": "auto", "tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"layout": "auto", "pipeline_schedule": "1fb1"}, "Did you mean '1f1b'"),
        ({"layout": "auto", "activation_checkpointing": "fulll"}, "mode 'fulll'"),
        ({"layout": "auto", "num_microbatches": 0}, "num_microbatches is 0"),
        ({"layout": "tp2", "sequence_parallel": True, "num_microbatches": 2}, "num_microbatches=2 has no effect"),
    ],
)
def test_constructor(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ThreeDStrategy(**arguments)


def test_sizes_as_a_text() -> None:
    strategy = ThreeDStrategy(layout="tp2-pp2-zero2-zb_h1", tensor_parallel_size=2)
    pl.Trainer(accelerator="cpu", devices=8, strategy=strategy, logger=False)
    assert strategy.layout == Layout(tp=2, pp=2, dp=2, zero=2, schedule="zb_h1")
    with pytest.raises(LayoutError, match="needs 4 processes"):
        pl.Trainer(accelerator="cpu", devices=8, strategy=ThreeDStrategy(layout="tp2-dp2"), logger=False)


def test_by_name_and_what_is_not_known_yet() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=4, strategy="3d_auto", logger=False)
    strategy = trainer.strategy
    assert "layout=auto" in repr(strategy)
    for ask in (lambda: strategy.layout, lambda: strategy.mesh, lambda: strategy.data_parallel_size):  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match="chosen in set-up"):
            ask()
    with pytest.raises(ConfigurationError, match="no choice to freeze"):
        strategy.freeze("x.yaml")  # type: ignore[attr-defined]
    three = ThreeDStrategy(layout="auto", tensor_parallel_size=3)
    with pytest.raises(LayoutError, match="no multiple of 3"):
        pl.Trainer(accelerator="cpu", devices=4, strategy=three, logger=False)
