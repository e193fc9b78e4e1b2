"""HOW does a user see the pipeline of a run?  What both `PipelineTimeline` callbacks share.

The callback turns the recording on once the strategy has built the pipeline, and off at the end; it keeps the steps it
was asked for, lets every rank write its trace, and draws on global rank 0.

It implements no hook that may look at gradients (`on_after_backward`, ...): ZeRO would have to show them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_3d.errors import ConfigurationError
from lightning_3d.observe.chrome import save_chrome_trace
from lightning_3d.observe.device import DeviceClock
from lightning_3d.observe.drawing import draw_timeline
from lightning_3d.observe.idle import bubble, covered
from lightning_3d.observe.imbalance import balance
from lightning_3d.observe.pieces import windows_of
from lightning_3d.observe.timeline import ascii_timeline, timeline_of
from lightning_3d.observe.trace import COMPUTE, TraceRecorder, load_traces, save_trace, trace_path

_ROWS = 32
"""A picture of more ranks than that shows one replica."""


class PipelineTimelineBase:
    """See `lightning_3d.PipelineTimeline`.

    Args:
        every_n_steps: Record every n-th training batch of the run; None: every 10th.
        steps: Record these batches of the run instead (numbers from 0).
        folder: Where traces and pictures go; None: `timeline` in the trainer's `log_dir`. All ranks must reach it.
        write_every: Write and draw after every so many recorded steps, too, not only at the end.
        log: Log `pipeline/bubble` of every recorded step (three numbers per rank are exchanged).
        pictures: Endings of the pictures to draw, of "png" and "svg".
        text: Print the timeline in characters.
        keep: Recorded steps to keep; older ones are forgotten.

    With `ThreeDStrategy(record_timeline=True)` that recorder is used, which keeps every batch, of them the last 64.

    Raises:
        ConfigurationError: A number below 1, an unknown picture, or another strategy than `ThreeDStrategy`.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        steps: Sequence[int] | None = None,
        folder: str | Path | None = None,
        write_every: int | None = None,
        log: bool = False,
        pictures: Sequence[str] = ("png", "svg"),
        text: bool = True,
        keep: int = 64,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("write_every", write_every), ("keep", keep)):
            if value is not None and not (_is_count(value) and value >= 1):
                raise ConfigurationError(f"PipelineTimeline({name}={value!r}): it must be an integer of at least 1.")
        if steps is not None:
            _check_steps(steps, every_n_steps)
        unknown = [ending for ending in pictures if ending not in ("png", "svg")]
        if unknown:
            raise ConfigurationError(f"PipelineTimeline(pictures={list(pictures)}): known are 'png' and 'svg'.")
        self.every_n_steps, self.steps = every_n_steps or 10, None if steps is None else frozenset(steps)
        self.folder = None if folder is None else Path(folder)
        self.write_every, self.pictures, self.text, self.keep = write_every, tuple(pictures), text, keep
        self.logs = log
        self._recorder: TraceRecorder | None = None
        self._path = Path()
        self._mine = False  # the recorder is this callback's, not of record_timeline=True
        self._direct = False
        self._recorded = self._parts = 0
        self._mark: Any = None

    def wants(self, step: int) -> bool:
        """Whether a batch of the run is recorded."""
        return step in self.steps if self.steps is not None else (step + 1) % self.every_n_steps == 0

    # -- Lightning's hooks
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not hasattr(trainer.strategy, "mesh"):
            raise ConfigurationError(
                f"PipelineTimeline draws the pipeline of a ThreeDStrategy, but the Trainer's strategy is "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=ThreeDStrategy(pipeline_parallel_size=...)), "
                "or remove the callback."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The pipeline is built, and no step has run."""
        engine, mesh = trainer.strategy.engine, trainer.strategy.mesh
        log_dir = trainer.log_dir  # a collective: on every rank
        self._path = self.folder or Path(log_dir or trainer.default_root_dir) / "timeline"
        self._direct, self._mine = engine.runner is None, engine.recorder is None
        self._recorded = 0
        if self._direct:
            rank_zero_info(
                "PipelineTimeline: pipeline_parallel_size is 1, so there is one stage, whose forwards and backwards "
                "are drawn; idle time in it is that of the host, not a pipeline's bubble."
            )
        if self._mine:
            clock = DeviceClock() if mesh.device.type == "cuda" else None
            place = {"dp": mesh.at.dp, "tp": mesh.at.tp, "layout": str(engine.layout), "capacity": self.keep}
            recorder = TraceRecorder(mesh.rank, mesh.at.pp, **place, clock=clock, wanted=self.wants)
            engine.recorder = recorder
            if engine.runner is not None:
                engine.runner.recorder = recorder
        self._recorder = engine.recorder
        if engine.partition is not None:
            engine.recorder.windows = windows_of(engine.partition)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._direct and self._recorder is not None:
            self._recorder.begin_step(trainer.fit_loop.epoch_loop.total_batch_idx)
            self._parts, self._mark = 0, self._recorder.mark()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if self._direct and self._recorder is not None and self._recorder.is_recording:
            self._add("F")
            if loss.requires_grad:
                loss.register_hook(self._on_backward)

    def _on_backward(self, gradient: torch.Tensor) -> None:
        """Backward has begun; be told when it ends (no hook of Lightning's: see above)."""
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._add("B")
        self._parts += 1

    def _add(self, kind: str) -> None:
        assert self._recorder is not None
        mark = self._recorder.mark()
        self._recorder.add(kind, self._parts, 0, self._mark, mark)
        self._mark = mark

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        if self._direct:
            recorder.end_step()
        if not self.wants(trainer.fit_loop.epoch_loop.total_batch_idx):
            return
        self._recorded += 1
        if self.logs:
            self._log(trainer)
        if self.write_every is not None and self._recorded % self.write_every == 0:
            self._write(trainer, say=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._recorder is None:
            return
        self._write(trainer, say=True)
        engine = trainer.strategy.engine
        if self._mine:
            engine.recorder = None
            if engine.runner is not None:
                engine.runner.recorder = None
        self._recorder = None

    # -- results
    def _log(self, trainer: Any) -> None:
        """The bubble of this replica in the last recorded step."""
        assert self._recorder is not None
        step = self._recorder.last()
        work = sorted((s for s in step.spans if s.kind in COMPUTE), key=lambda s: s.start) if step else []
        # a stage that owns nothing takes part, too: the exchange needs every rank
        start = work[0].start if work else float("inf")
        mine = torch.tensor([start, max((s.end for s in work), default=-start), covered(work)], dtype=torch.float64)
        ranks = torch.stack(trainer.strategy.mesh.replica_control.all_gather(mine))
        length = ranks[:, 1].max() - ranks[:, 0].min()
        if length > 0:
            idle = float(1 - ranks[:, 2].mean() / length)
            self.log("pipeline/bubble", idle, on_step=True, on_epoch=False)  # type: ignore[attr-defined]

    def _write(self, trainer: Any, say: bool) -> None:
        """Every rank its trace, rank 0 the pictures."""
        assert self._recorder is not None
        save_trace(self._recorder, self._path)
        trainer.strategy.mesh.world.barrier()
        if trainer.is_global_zero:
            try:
                self._draw(trainer.strategy.mesh.layout.world_size, say)
            except ConfigurationError as error:  # what was trained is worth more than its picture
                rank_zero_warn(f"PipelineTimeline: {error}")

    def _draw(self, world_size: int, say: bool) -> None:
        missing = [rank for rank in range(world_size) if not trace_path(self._path, rank).is_file()]
        if missing:
            raise ConfigurationError(
                f"{str(self._path)!r} holds no traces of the ranks {missing[:8]}: the folder is not shared by all "
                "machines. Copy the files together and run lightning-3d timeline."
            )
        traces = [trace for trace in load_traces(self._path) if trace.rank < world_size]  # of an older, larger run
        if not any(trace.steps for trace in traces):
            wanted, way = f"every {self.every_n_steps}th", "a smaller every_n_steps"
            if self.steps is not None:
                wanted, way = f"those of steps={sorted(self.steps)} (numbers from 0)", "smaller steps"
            raise ConfigurationError(
                f"the run ended before any batch was recorded; asked for were {wanted}. Choose {way}."
            )
        timeline = timeline_of(traces)
        shown = timeline if len(timeline.lanes) <= _ROWS else timeline.replica()
        drawn = [str(draw_timeline(shown, self._path / f"pipeline.{ending}")) for ending in self.pictures]
        drawn.append(str(save_chrome_trace(traces, self._path / "perfetto.json")))
        if say:
            lines = [f"batch {timeline.step} of {timeline.layout}, {1000 * timeline.seconds:.1f} ms, as measured:"]
            lines += [ascii_timeline(timeline.replica())] if self.text else []
            lines += [str(bubble(timeline)), str(balance(traces)), f"written: {', '.join(drawn)}"]
            rank_zero_info("\n".join(lines))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_steps(steps: Any, every_n_steps: int | None) -> None:
    """Raise `ConfigurationError` unless `steps` are numbers of batches, and the only choice of batches."""
    if not isinstance(steps, Collection) or not steps or not all(_is_count(s) and s >= 0 for s in steps):
        raise ConfigurationError(
            f"PipelineTimeline(steps={steps!r}): it must be a list of the numbers of batches of the run, from 0 on, "
            "for example steps=[3, 100]."
        )
    if every_n_steps is not None:
        raise ConfigurationError(
            f"PipelineTimeline(steps={steps!r}, every_n_steps={every_n_steps}): both choose the batches to record. "
            "Remove one of them."
        )
