"""What the ranks of a launch run for `test_sequence.py`."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy.cases import trainer_for

LENGTHS = (7, 8, 5, 12)


def odd_lengths(cases: list[dict[str, Any] | None]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """One batch of every length."""
    generator = torch.Generator().manual_seed(5)
    batches = [{"tokens": torch.randint(1, models.VOCAB, (8, n + 1), generator=generator)} for n in LENGTHS]
    out = []
    for sizes in cases:
        strategy = "auto" if sizes is None else ThreeDStrategy(**sizes)
        losses: list[float] = []

        class Recorded(models.LitGPT):
            def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
                losses.append(float(outputs["loss"]))  # noqa: B023

        trainer = trainer_for(strategy, max_epochs=1, use_distributed_sampler=False)
        torch.manual_seed(3)
        module = Recorded().double()
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        full = dict(module.named_parameters()) if sizes is None else full_parameters(strategy)
        out.append((losses, {n: p.detach().clone() for n, p in full.items()}))
    return out


class Kept(pl.Callback):
    """Counts the elements of activations that autograd keeps: as wide as the residual, or of another width."""

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        self.kept = {True: 0, False: 0}
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        seen: set[int] = set()

        def note(x: Tensor) -> Tensor:
            where = x.untyped_storage().data_ptr()
            if where not in weights and where not in seen and x.ndim >= 2 and x.is_floating_point():
                seen.add(where)
                statistics = x.shape[-1] == 1 and x.ndim == 3  # of norms
                self.kept[x.shape[-1] == 16 or statistics] += x.numel()
            return x

        self.hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)
        self.hooks.__enter__()

    def on_before_backward(self, *args: Any) -> None:
        self.hooks.__exit__(None, None, None)


def saved_activations(cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(elements of activations as wide as the residual, elements of others) kept on this rank, per case."""
    out = []
    for options in cases:
        strategy = ThreeDStrategy(tensor_parallel_size=int(os.environ["WORLD_SIZE"]), **options)
        counter = Kept()
        trainer = trainer_for(strategy, max_steps=1, max_epochs=-1, callbacks=[counter])
        torch.manual_seed(3)
        module = models.LitGPT(tied=False, dim=16, dropout=0.1)
        trainer.fit(module.double(), models.loader("gpt_tied", 8, 8))
        out.append((counter.kept[True], counter.kept[False]))
    return out
