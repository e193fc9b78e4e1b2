from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_3d import PipelineTimeline
from lightning_3d.errors import ConfigurationError
from lightning_3d.observe import TraceRecorder, balance, bubble, load_traces, timeline_of
from lightning_3d.suitability import GRADIENT_HOOKS, ZERO_GRAD_HOOKS
from lightning_3d.testing import preload, run_distributed
from tests.observe import timelines

preload("tests.observe.timelines", "pytorch_lightning")


def launch(world: int, *args: Any) -> list[dict[str, Any]]:
    return run_distributed(timelines.fit, world, *args, init_process_group=False, timeout=120)


def test_a_run_is_recorded_drawn_and_logged(tmp_path: Path) -> None:
    sizes = {"pipeline_parallel_size": 2, "pipeline_schedule": "zb_h1", "num_microbatches": 4}
    lead, _ = launch(2, "lightning", sizes, {"every_n_steps": 2, "log": True}, str(tmp_path))
    folder = tmp_path / "log" / "version_0" / "timeline"
    found = {p.name for p in folder.iterdir()}
    assert found == {"trace_rank00000.json", "trace_rank00001.json", "pipeline.png", "pipeline.svg", "perfetto.json"}
    traces = load_traces(folder)
    assert [[s.step for s in trace.steps] for trace in traces] == [[1, 3, 5]] * 2
    for trace in traces:
        kinds = [s.kind for s in trace.steps[0].spans]
        assert {kind: kinds.count(kind) for kind in "FIW"} == {"F": 4, "I": 4, "W": 4}
    assert [w.stage for w in traces[0].windows] == [0, 1]
    names = [piece.name[:8] for window in traces[0].windows for piece in window.pieces]
    assert list(dict.fromkeys(names)) == [f"layers.{i}" for i in range(6)]
    assert bubble(timeline_of(traces)).formula is not None
    assert len(balance(traces).stages) == 2
    assert len(set(lead["logged"])) == 3  # Lightning repeats the last value in the batches between
    assert lead["logged"][-1] == pytest.approx(bubble(timeline_of(traces, 5)).mean, abs=1e-4)
    assert not lead["recording"], "off again after the fit"
    assert len(json.loads((folder / "perfetto.json").read_text())["traceEvents"]) > 3 * 2 * 12


def test_one_stage_of_the_other_package(tmp_path: Path) -> None:
    launch(
        1,
        "pytorch_lightning",
        {},
        {"steps": [2, 4], "folder": str(tmp_path / "own"), "pictures": ["svg"]},
        str(tmp_path),
    )
    (trace,) = load_traces(tmp_path / "own")
    assert [(s.step, [a.kind for a in s.spans]) for s in trace.steps] == [(2, ["F", "B"]), (4, ["F", "B"])]
    assert all(a.seconds > 0 for s in trace.steps for a in s.spans)
    assert (tmp_path / "own" / "pipeline.svg").is_file()
    assert not (tmp_path / "own" / "pipeline.png").exists()


def test_a_stage_that_runs_nothing_takes_part_in_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    callback, logged, others = PipelineTimeline(log=True), [], [torch.tensor([0.0, 4.0, 3.0], dtype=torch.float64)]
    log = lambda name, value, **_: logged.append((name, value))  # noqa: E731
    monkeypatch.setattr(callback, "log", log, raising=False)  # the Trainer gives callbacks theirs
    control = SimpleNamespace(all_gather=lambda mine: [mine, *others])
    trainer = SimpleNamespace(strategy=SimpleNamespace(mesh=SimpleNamespace(replica_control=control)))
    callback._recorder = TraceRecorder()
    callback._recorder.begin_step(0)
    callback._recorder.end_step()
    callback._log(trainer)
    assert logged == [("pipeline/bubble", 1 - (3 / 2) / 4)]
    others.clear()
    callback._log(trainer)
    assert len(logged) == 1, "nobody has run anything"


def test_another_strategy_and_wrong_numbers_are_refused() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=1)
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy"):
        PipelineTimeline().setup(trainer, None, "fit")
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        PipelineTimeline(every_n_steps=0)
    with pytest.raises(ConfigurationError, match=r"\['gif'\]"):
        PipelineTimeline(pictures=["gif"])


def test_it_has_no_hook_for_which_gradients_would_be_shown() -> None:
    for hook in (*GRADIENT_HOOKS, *ZERO_GRAD_HOOKS):
        assert getattr(PipelineTimeline, hook, None) is getattr(pl.Callback, hook, None)


@pytest.mark.parametrize(
    "arguments",
    [{"every_n_steps": "a"}, {"every_n_steps": 0}, {"steps": 5}, {"steps": []}, {"steps": [-1]}, {"keep": 2.5},
     {"steps": [1], "every_n_steps": 2}],
)  # fmt: skip
def test_values_of_the_wrong_kind(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        PipelineTimeline(**arguments)
