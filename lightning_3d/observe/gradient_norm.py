"""HOW LARGE is the gradient?  What both `GradientNorm` callbacks share."""

from __future__ import annotations

from typing import Any

from lightning_3d.errors import ConfigurationError


class GradientNormBase:
    """See `lightning_3d.GradientNorm`.

    Args:
        name: What it is logged as; with several optimizers `name/0`, `name/1`, ...
        norm_type: p of the p-norm, or `inf`.
        prog_bar: Show it in the progress bar.

    Raises:
        ConfigurationError: The norm is of no positive order, or the strategy is another.

    Collectives: one all-reduce of one number over all ranks per optimizer step.
    """

    def __init__(self, name: str = "gradient_norm", norm_type: float = 2.0, prog_bar: bool = False) -> None:
        if not float(norm_type) > 0:
            raise ConfigurationError(f"GradientNorm: norm_type is {norm_type!r}; it must be positive, or float('inf').")
        self._name, self._norm_type, self._prog_bar = name, float(norm_type), prog_bar

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not hasattr(trainer.strategy, "gradient_norm"):
            raise ConfigurationError(
                f"GradientNorm needs ThreeDStrategy, but the Trainer has {type(trainer.strategy).__name__}. Use "
                "Lightning's grad_norm in on_before_optimizer_step there."
            )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        optimizers = trainer.strategy.optimizers
        norm = trainer.strategy.gradient_norm(optimizer, self._norm_type)
        index = next((i for i, o in enumerate(optimizers) if o is optimizer), 0)
        name = self._name if len(optimizers) == 1 else f"{self._name}/{index}"
        pl_module.log(name, norm.float(), prog_bar=self._prog_bar, on_step=True, on_epoch=False)
