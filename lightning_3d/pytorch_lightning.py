"""The strategy and the callbacks for modules of the `pytorch_lightning` package.

`pytorch_lightning` and `lightning.pytorch` are two copies of the same code with unrelated classes; a Trainer of one
refuses a module or strategy of the other.
"""

from __future__ import annotations

from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher

from lightning_3d.launch import WholeWeights
from lightning_3d.observe.callback import PipelineTimelineBase
from lightning_3d.observe.gradient_norm import GradientNormBase
from lightning_3d.strategy import ThreeDStrategyBase
from lightning_3d.training_cli import ThreeDCLIBase


class WholeWeightsLauncher(WholeWeights, _MultiProcessingLauncher):  # type: ignore[misc]
    """The launcher of `pytorch_lightning`."""


class ThreeDStrategy(ThreeDStrategyBase, DDPStrategy):  # type: ignore[misc]
    """Tensor x pipeline x data parallelism for an unmodified LightningModule of `pytorch_lightning`.

    The same as `lightning_3d.ThreeDStrategy`, which serves `lightning.pytorch`.
    """

    package = "pytorch_lightning"
    launcher_class = WholeWeightsLauncher


class PipelineTimeline(PipelineTimelineBase, Callback):
    """The same as `lightning_3d.PipelineTimeline`, for a Trainer of `pytorch_lightning`."""


class GradientNorm(GradientNormBase, Callback):
    """The same as `lightning_3d.GradientNorm`, for a Trainer of `pytorch_lightning`."""


class ThreeDCLI(ThreeDCLIBase, LightningCLI):  # type: ignore[misc]
    """The same as `lightning_3d.ThreeDCLI`, for modules of `pytorch_lightning`."""

    module_class = LightningModule
    strategy_path = "lightning_3d.pytorch_lightning.ThreeDStrategy"


ThreeDStrategy.register_strategies(StrategyRegistry)
