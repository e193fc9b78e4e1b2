"""What the ranks of a launch run for `test_initial_weights.py`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests import models
from tests.strategy.cases import trainer_for
from tests.strategy.zero_cases import strategy_of

Sizes = dict[str, Any] | None


class Built(models.LitGPT):
    """In `__init__`, with a buffer that is drawn, too."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.register_buffer("noise", torch.randn(3))


class Configured(models.LitGPT):
    """In `configure_model`."""

    on = "cpu"

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.wte = None

    def configure_model(self) -> None:
        if self.wte is None:
            with torch.device(self.on):
                whole = models.LitGPT(depth=4)
            for name, child in whole.named_children():
                setattr(self, name, child)


class OnMeta(Configured):
    """In `configure_model`, on the meta device."""

    on = "meta"


def start(kind: str, sizes: Sizes) -> dict[str, Tensor]:
    """The whole state when training begins, of a run with the same seed everywhere."""
    strategy = strategy_of(sizes)
    found: dict[str, Tensor] = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            state = trainer.strategy.lightning_module_state_dict()
            found.update({k: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for k, v in state.items()})

    pl.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, max_steps=1, precision="32-true", callbacks=[Look()])
    trainer.fit(KINDS[kind](), models.loader("gpt_tied", 16, 8))
    return {k: v.clone() for k, v in found.items()}


KINDS: dict[str, type[nn.Module]] = {"init": Built, "configure_model": Configured, "meta": OnMeta}


def starts(cases: list[tuple[str, Sizes]]) -> list[dict[str, Tensor]]:
    return [start(kind, sizes) for kind, sizes in cases]


def differ(cases: list[tuple[str, Sizes]], want: dict[str, dict[str, Tensor]]) -> list[list[str]]:
    """What is not bit-equal to one process's."""
    out = []
    for kind, sizes in cases:
        got = start(kind, sizes)
        assert got.keys() == want[kind].keys(), got.keys() ^ want[kind].keys()
        out.append([name for name, value in want[kind].items() if not torch.equal(got[name], value)])
    return out
