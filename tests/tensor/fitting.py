"""Train a LightningModule on one process and with tensor parallelism over real processes, in float64, and compare."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters, relative_error, run_distributed


class Losses(pl.Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]) if outputs else 0.0)


def fit(
    build: Callable[[], pl.LightningModule], batches: Callable[[], list[Any]], options: dict[str, Any] | None, size: int
) -> dict[str, Any]:
    """Losses, final parameters, what was recorded and warned; or the error.

    Args:
        build: Makes the module.
        batches: Makes the batches.
        options: Of the strategy; None for one process without it.
        size: Processes.
    """
    torch.manual_seed(0)
    module = build()
    torch.manual_seed(1)
    data = batches()
    losses = Losses()
    strategy = ThreeDStrategy(tensor_parallel_size=size, **options) if options is not None else "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=size,
            precision="64-true",
            strategy=strategy,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            callbacks=[losses, *getattr(module, "callbacks", [])],
        )
        try:
            trainer.fit(module, DataLoader(data, batch_size=None))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {"losses": losses.found, "warnings": [str(w.message) for w in caught]}
    if isinstance(strategy, ThreeDStrategy):
        engine: Any = strategy.engine
        found["weights"] = {n: p.detach().clone() for n, p in full_parameters(strategy).items()}
        found["cut"] = sorted(n for n in engine.held if engine.placement(n) is not None)
        found["recorded"] = engine.recording.explain() if engine.recording is not None else ""
    else:
        found["weights"] = {n: p.detach().clone() for n, p in module.named_parameters()}
    return found


def _fit_all(cases: dict[str, tuple[Any, Any]], options: dict[str, Any], size: int) -> dict[str, Any]:
    return {name: fit(build, batches, options, size) for name, (build, batches) in cases.items()}


def compare(cases: dict[str, tuple[Any, Any]], size: int = 2, **options: Any) -> dict[str, dict[str, Any]]:
    """Every case trained on one process and over `size`; what rank zero found, with "error" relative to one process.

    Args:
        cases: Name -> (builds the module, makes the batches); both are functions of a module.
        size: Tensor-parallel ranks.
        **options: Of the strategy.
    """
    one = {name: fit(build, batches, None, 1) for name, (build, batches) in cases.items()}
    results = run_distributed(_fit_all, size, cases, options, size, init_process_group=False, timeout=240)
    found = {}
    for name, want in one.items():
        assert "error" not in want, (name, want)
        ranks = [result[name] for result in results]
        first: dict[str, Any] = next((r for r in ranks if "error" in r), ranks[0])
        if "error" not in first:
            first["worst"] = max(_difference(rank, want) for rank in ranks)
        found[name] = first
    return found


def _difference(got: dict[str, Any], want: dict[str, Any]) -> float:
    assert len(got["losses"]) == len(want["losses"])
    worst = relative_error(torch.tensor(got["losses"]).double(), torch.tensor(want["losses"]).double())
    weights: dict[str, Tensor] = want["weights"]
    return max(worst, *(relative_error(got["weights"][name], weight) for name, weight in weights.items()))
