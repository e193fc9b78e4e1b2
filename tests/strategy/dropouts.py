"""What the ranks of a launch run for `test_dropout.py`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d import ThreeDStrategy
from lightning_3d.tensor import local
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy.cases import trainer_for


class Reseeded(pl.Callback):
    """Every batch begins with a known random state, whatever the set-up drew."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(100 + batch_idx)


class TwoDropouts(models.Lit):
    """One inside the pair of layers, one behind it."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 5)
        self.inside, self.outside = nn.Dropout(p), nn.Dropout(p)

    def loss(self, batch: Any) -> Tensor:
        x = self.outside(self.down(self.inside(self.up(batch["x"]).sigmoid())).sigmoid())
        return F.cross_entropy(self.out(x), batch["y"])


def with_dropout(cases: list[dict[str, Any] | None]) -> list[dict[str, Tensor]]:
    """Parameters after three steps with p = 0.3."""
    out = []
    for sizes in cases:
        strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
        trainer = trainer_for(strategy, max_steps=3, max_epochs=-1, callbacks=[Reseeded()])
        torch.manual_seed(3)
        module = TwoDropouts(0.3).double()
        trainer.fit(module, models.loader("mlp", 16, 8))
        full = dict(module.named_parameters()) if sizes is None else full_parameters(strategy)
        out.append({n: p.detach().clone() for n, p in full.items()})
    return out


def masks(sizes: dict[str, Any]) -> dict[str, Tensor]:
    """What the two dropouts of the last step kept, on this rank."""
    kept: dict[str, Tensor] = {}
    module = TwoDropouts().double()
    for name in ("inside", "outside"):
        getattr(module, name).register_forward_hook(
            lambda m, args, y, name=name: kept.update({name: local(y.detach()) != 0})
        )
    strategy = ThreeDStrategy(**sizes, tensor_parallel_plan={"out": "replicate"})
    trainer_for(strategy, max_steps=2, max_epochs=-1).fit(module, models.loader("mlp", 128, 64))
    assert kept["inside"].shape[-1] == 32, "the first pair is divided"
    return {name: mask.clone() for name, mask in kept.items()}


class Recomputed(models.LitGPT):
    """Blocks are recomputed in the backward, or not."""

    def __init__(self, kind: str) -> None:
        super().__init__(dropout=0.5)
        self.kind = kind

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x) if self.kind == "none" else checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return self.head(self.norm(x))


def recomputed(cases: list[tuple[dict[str, Any], str]]) -> list[dict[str, Tensor]]:
    """Parameters after two steps."""
    out = []
    for sizes, kind in cases:
        strategy = ThreeDStrategy(**sizes)
        trainer = trainer_for(strategy, max_steps=2, max_epochs=-1, callbacks=[Reseeded()])
        torch.manual_seed(3)
        trainer.fit(Recomputed(kind).double(), models.loader("gpt_tied", 16, 8))
        out.append({n: p.detach().clone() for n, p in full_parameters(strategy).items()})
    return out
