"""What the ranks of a launch run for `test_own_generators.py`."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import ThreeDStrategy
from tests.strategy.cases import trainer_for

GLOBAL = torch.Generator().manual_seed(5)


class Draws(nn.Module):
    """A block that draws from the same generator as the step does."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.linear.weight)
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.generator is not None:
            x = x + 0 * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return x


class Masked(pl.LightningModule):
    """Masks its input at the start and compares with the same mask at the end: the identity gives a loss of zero."""

    def __init__(self, source: str, quiet: bool) -> None:
        super().__init__()
        self.torch = GLOBAL if source == "global" else torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3) if source == "numpy" else np.random.RandomState(3)
        self.source = source
        self.turns = itertools.count()
        self.blocks = nn.Sequential(*[Draws(None if quiet else self.torch) for _ in range(4)])
        self.masks: list[Tensor] = []

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        if self.source == "numpy":
            return torch.from_numpy(self.numpy.random(shape))  # type: ignore[union-attr]
        if self.source == "RandomState":
            return torch.from_numpy(self.numpy.random_sample(shape))  # type: ignore[union-attr]
        if self.source == "reseeded":
            self.torch.manual_seed(11)
        generator = GLOBAL if self.source == "global" else self.torch
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.ones(batch[0].shape[0], 4, dtype=torch.float64)
        mask = self.draw((x.shape[0], 4))
        x = self.blocks[:2](x * mask)
        late = self.draw((x.shape[0], 4))
        out = self.blocks[2:](x * late)
        again = self.draw((x.shape[0], 4))
        next(self.turns)
        self.masks.append(torch.stack([mask, late, again]))
        return (out * again - mask * late * again).pow(2).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def masks(source: str, sizes: dict[str, Any], quiet: bool = False) -> tuple[list[Tensor], list[float], Tensor, int]:
    """Two steps, the blocks drawing too unless `quiet`.

    Returns:
        Masks of every microbatch, losses, what the generator draws next, what the iterator gives next.
    """
    module = Masked(source, quiet).double()
    trainer = trainer_for(ThreeDStrategy(**sizes))
    losses: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            losses.append(float(outputs["loss"]))

    trainer.callbacks.append(Watch())
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(16)), batch_size=8))
    return module.masks, losses, torch.rand(3, generator=module.torch), next(module.turns)
