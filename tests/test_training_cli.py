"""`ThreeDCLI plan`: the configured model and data, priced; what it writes is what `fit` takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from lightning_3d import ThreeDStrategy
from lightning_3d.planner import calibrate
from lightning_3d.testing import preload, run_distributed
from tests import planned

preload("tests.planned", "lightning.pytorch.cli", "jsonargparse")

CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  precision: 64
  max_steps: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  accumulate_grad_batches: 2
  strategy:
    class_path: lightning_3d.ThreeDStrategy
    init_args: {layout: auto, pipeline_parallel_size: 2, num_microbatches: 4, verify: false}
model: {width: 16}
data: {batch_size: 8}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(calibrate, "_SECONDS", 0.01)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return str(tmp_path / "mine.yaml")


@pytest.mark.filterwarnings("ignore")
def test_what_a_plan_writes_is_what_fit_takes(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout, page = tmp_path / "layout.yaml", tmp_path / "page.html"
    planned.command(["plan", "--config", config, "--yaml", str(layout), "--html", str(page)])
    said = capsys.readouterr().out
    for words in (
        "layouts that fit, best first",
        "batches of 8 samples per replica x 2 accumulated",
        "best: tp1-pp2-dp1",
    ):
        assert words in said
    made = yaml.safe_load(layout.read_text())["trainer"]
    assert (made["devices"], made["num_nodes"]) == (2, 1)
    assert made["strategy"]["init_args"]["num_microbatches"] == 4
    assert page.is_file()
    ranks = run_distributed(
        planned.fit, 2, ["--config", config, "--config", str(layout)], init_process_group=False, timeout=60
    )
    best = said.split("best: ")[1].split("-mbs")[0]
    wanted = ThreeDStrategy(**made["strategy"]["init_args"])._asked.on(2)
    assert wanted is not None
    assert str(wanted).removesuffix("-v2") == best.removesuffix("-v2")
    assert ranks == [(str(wanted), 4, 1)] * 2


@pytest.mark.filterwarnings("ignore")
def test_other_machines_and_models_without_values(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = ["plan", "--config", config, "--gpu", "a100-80gb", "--gpus", "16", "--gpus_per_node", "8"]
    elsewhere += ["--model.width", "512", "--trainer.strategy", "3d", "--top", "3"]
    planned.command(elsewhere)
    said = capsys.readouterr().out
    assert "16 x A100-80GB-SXM (2 machines of 8" in said
    assert "1.057 million parameters" in said
    assert planned.Net.deferred
    planned.command([*elsewhere, "--explain", "tp2-pp2"])
    assert "8 microbatches of 1 x 1 tokens" in capsys.readouterr().out
    for arguments, words in (
        (["--trainer.num_nodes", "2"], "configured for 2 machines (trainer.num_nodes)"),
        (["--gpu", "a10", "--gpus", "2"], "is not in the table"),
        (["--yaml", "nowhere/at/all.yaml"], "in a folder that exists"),
    ):
        with pytest.raises(SystemExit) as caught:
            planned.command(["plan", "--config", config, *arguments])
        assert caught.value.code == 2
        assert words in capsys.readouterr().err
