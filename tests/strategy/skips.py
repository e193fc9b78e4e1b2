"""What the ranks of a launch run for `test_skips.py`: steps that return None."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy.cases import trainer_for
from tests.strategy.fits import replica_difference

Skipped = set[tuple[int, int]]
"""(batch, replica) that return None."""


class Skips(models.LitMLP):
    optimizer = "adamw"  # a gradient of zeros would move its parameters
    skipped: Skipped = set()
    replicas = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.replicas > 1:  # the reference: what the replicas compute together
            parts = [self.loss({k: v[r :: self.replicas] for k, v in batch.items()}) for r in range(self.replicas)]
            kept = [x for r, x in enumerate(parts) if (batch_idx, r) not in self.skipped]
            return sum(kept, parts[0] * 0) / self.replicas if kept else None
        loss = self.loss(batch)
        replica = getattr(self.trainer.strategy, "data_parallel_rank", 0)
        return None if (batch_idx, replica) in self.skipped else loss


def skipping(
    cases: list[tuple[dict[str, Any] | None, Skipped, int, int]],
) -> list[tuple[float, dict[str, Tensor]]]:
    """Per case (sizes, skipped, accumulation, replicas of the reference): how far replicas are apart, the weights."""
    out = []
    for sizes, skipped, accumulate, replicas in cases:
        parallel = sizes is not None
        strategy: Any = ThreeDStrategy(**sizes) if sizes is not None else "auto"
        trainer = trainer_for(strategy, accumulate_grad_batches=accumulate, use_distributed_sampler=False)
        module = models.build("mlp")
        module.__class__ = Skips
        module.skipped, module.replicas = skipped, 1 if parallel else replicas

        class Data(models.pl.LightningDataModule):
            def train_dataloader(self, strategy: Any = strategy, parallel: bool = parallel) -> Any:
                rank, count = (strategy.data_parallel_rank, strategy.data_parallel_size) if parallel else (0, 1)
                return models.loader("mlp", 32, 8, rank, count)

        trainer.fit(module, Data())
        if parallel:
            out.append((replica_difference(strategy), full_parameters(strategy)))
        else:
            out.append((0.0, dict(module.named_parameters())))
    return out
