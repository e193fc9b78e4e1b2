"""HOW do the weights come back from processes Lightning started itself (`start_method="fork"` or `"spawn"`)?

Lightning sends rank zero's `state_dict` to the main process. Here rank zero holds a part of the model, so all ranks
assemble the whole first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as _Base
else:
    _Base = object


class WholeWeights(_Base):
    """Mixin for Lightning's multiprocessing launcher."""

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        module = trainer.lightning_module
        state = trainer.strategy.whole_state_dict()
        object.__setattr__(module, "state_dict", lambda *_, **__: state)
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            module.__dict__.pop("state_dict", None)


class WholeWeightsLauncher(WholeWeights, _MultiProcessingLauncher):
    """The launcher of `lightning.pytorch`."""
