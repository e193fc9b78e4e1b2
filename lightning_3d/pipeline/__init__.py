"""HOW is the model cut into stages, and driven?  Pipeline parallelism of an unmodified step, by its event trace."""

from lightning_3d.pipeline.absent import AbsentParameter, drop, is_absent
from lightning_3d.pipeline.atoms import find_atoms
from lightning_3d.pipeline.channels import Channels
from lightning_3d.pipeline.check import Report, check
from lightning_3d.pipeline.events import Event, TensorMeta, Trace, Vid
from lightning_3d.pipeline.merge import merge
from lightning_3d.pipeline.microbatch import split
from lightning_3d.pipeline.partition import Partition, Window
from lightning_3d.pipeline.phantom import Phantom
from lightning_3d.pipeline.rehearsal import check_cut
from lightning_3d.pipeline.results import LogEntry, StepResult
from lightning_3d.pipeline.runner import PipelineRunner
from lightning_3d.pipeline.samples import batch_size
from lightning_3d.pipeline.schedule import SCHEDULES, Action, forward_only, gpipe, one_forward_one_backward
from lightning_3d.pipeline.simulate import Simulation, simulate
from lightning_3d.pipeline.stage import StageRun
from lightning_3d.pipeline.trace import trace

__all__ = [
    "SCHEDULES",
    "AbsentParameter",
    "Action",
    "Channels",
    "Event",
    "LogEntry",
    "Partition",
    "Phantom",
    "PipelineRunner",
    "Report",
    "Simulation",
    "StageRun",
    "StepResult",
    "TensorMeta",
    "Trace",
    "Vid",
    "Window",
    "batch_size",
    "check",
    "check_cut",
    "drop",
    "find_atoms",
    "forward_only",
    "gpipe",
    "is_absent",
    "merge",
    "one_forward_one_backward",
    "simulate",
    "split",
    "trace",
]
