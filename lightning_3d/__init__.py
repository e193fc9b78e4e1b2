"""Tensor x pipeline x data parallelism for an unmodified LightningModule.

    trainer = Trainer(devices=8, strategy=ThreeDStrategy(tensor_parallel_size=2, pipeline_parallel_size=2))

Importing the package registers the strategy's short name, so `Trainer(strategy="3d")` works afterwards.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_3d.callbacks import GradientNorm, PipelineTimeline
from lightning_3d.layout import Layout
from lightning_3d.planner import plan
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.training_cli import ThreeDCLI
from lightning_3d.verify import explain, verify

ThreeDStrategy.register_strategies(StrategyRegistry)

__version__ = "0.1.0"
__all__ = ["GradientNorm", "Layout", "PipelineTimeline", "ThreeDCLI", "ThreeDStrategy", "explain", "plan", "verify"]
