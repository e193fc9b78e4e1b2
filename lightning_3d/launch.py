"""HOW do weights and the layout come back from processes that Lightning started (`start_method="fork"` or `"spawn"`)?

Lightning sends rank zero's `state_dict` to the main process. Here rank zero holds a part of the model, so all ranks
assemble the whole first. A layout that was chosen there is kept for the next call of the same Trainer.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as _Base
else:
    _Base = object

_CHOICE = "lightning_3d"


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

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        # as bytes: Lightning looks into everything else for tensors
        return {**super().get_extra_results(trainer), _CHOICE: pickle.dumps(trainer.strategy.choice)}

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        trainer.strategy.choice = pickle.loads(extra[_CHOICE])


class WholeWeightsLauncher(WholeWeights, _MultiProcessingLauncher):
    """The launcher of `lightning.pytorch`."""
