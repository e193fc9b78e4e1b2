"""What the ranks of a launch run for `test_surroundings.py`: what Lightning and users do around a run."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests import models
from tests.strategy.cases import trainer_for


class Example(models.LitMLP):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def summarised(cases: list[dict[str, Any]]) -> list[bool]:
    """The default table of the model, for a module with an example of its input; the example is there afterwards."""
    out = []
    for sizes in cases:
        trainer = trainer_for(ThreeDStrategy(**sizes), max_steps=1, enable_model_summary=True)
        module = Example().double()
        trainer.fit(module, models.loader("mlp", 8, 8))
        out.append(module.example_input_array is not None)
    return out


def called_afterwards() -> tuple[list[str], list[str]]:
    """What is said when all ranks call the cut module after the run, and in a second run."""
    trainer = trainer_for(ThreeDStrategy(tensor_parallel_size=2), max_steps=1)
    module = Example().double()
    trainer.fit(module, models.loader("mlp", 8, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(torch.zeros(2, 8).double())
    trainer.fit_loop.epoch_loop.max_steps = 2
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        trainer.fit(module, models.loader("mlp", 8, 8))
    said = [[str(w.message) for w in found if "still cut" in str(w.message)] for found in (caught, again)]
    return said[0], said[1]


class Lazy(models.LitMLP):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, nn.LazyLinear(8))


class ReadsLoader(models.LitMLP):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return self.loss(next(dataloader_iter)[0])


def refused(kind: type[Any]) -> None:
    trainer_for(ThreeDStrategy(pipeline_parallel_size=2)).fit(kind().double(), models.loader("mlp", 8, 8))
