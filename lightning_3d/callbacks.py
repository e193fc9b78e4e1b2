"""WHICH callbacks does the package bring?  Those for `lightning.pytorch` (`pytorch_lightning` has its own module)."""

from __future__ import annotations

from lightning.pytorch import Callback

from lightning_3d.observe.callback import PipelineTimelineBase
from lightning_3d.observe.gradient_norm import GradientNormBase


class PipelineTimeline(PipelineTimelineBase, Callback):
    """Records the pipeline of a run, and draws it: PNG, SVG, text, and a trace for Perfetto.

    Example::

        Trainer(callbacks=[PipelineTimeline(every_n_steps=50)], strategy=ThreeDStrategy(pipeline_parallel_size=4))

    It needs no `record_timeline=True`. Its arguments are those of `PipelineTimelineBase`.
    """


class GradientNorm(GradientNormBase, Callback):
    """Logs the norm of the whole gradient, before it is clipped, at every optimizer step.

    Example::

        Trainer(callbacks=[GradientNorm()], gradient_clip_val=1.0, strategy=ThreeDStrategy(tensor_parallel_size=2))

    Its arguments are those of `GradientNormBase`.
    """
