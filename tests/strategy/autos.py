"""Runs with `layout="auto"`, on every rank of a launch: what was chosen, and what it computed."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import ConfigurationError
from lightning_3d.planner import calibrate
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy import fits  # noqa: F401  (quiet loggers)

BATCH, STEPS = 4, 2


class Module(models.LitGPT):
    """The GPT, which makes its loader itself; part of it may be made in `configure_model`."""

    def __init__(self, later: bool = False) -> None:
        super().__init__(tied=False, depth=2)
        self.later = later
        self.replicas: list[int] = []
        """What every loader was made for."""

    def configure_model(self) -> None:
        if self.later and not hasattr(self, "mlp"):
            # large enough to be made without values
            self.mlp = torch.nn.Sequential(torch.nn.Linear(16, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 16))

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        if self.later:
            x = x + self.mlp(x)
        return self.head(self.norm(x))

    def train_dataloader(self) -> Any:
        strategy, data = self.trainer.strategy, TensorDataset(rows())
        replicas = getattr(strategy, "data_parallel_size", 1)
        self.replicas.append(replicas)
        sampler = DistributedSampler(data, replicas, getattr(strategy, "data_parallel_rank", 0), shuffle=False)
        return DataLoader(data, sampler=sampler, batch_size=self.batch)

    def on_fit_start(self) -> None:
        self.drawn = float(torch.rand(()))

    batch = BATCH
    predict_dataloader = train_dataloader

    def loss(self, batch: Any) -> Any:
        return super().loss({"tokens": batch[0]})

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def rows() -> torch.Tensor:
    return torch.randint(models.VOCAB, (64, 9), generator=torch.Generator().manual_seed(3))


def build(later: bool) -> Module:
    torch.manual_seed(5)
    return Module(later)


def trainer_with(strategy: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_steps=STEPS,
        enable_model_summary=False, strategy=strategy, precision="64-true", use_distributed_sampler=False, **options,
    )  # fmt: skip


def alone(later: bool, samples: int, accumulate: int) -> dict[str, torch.Tensor]:
    """The parameters of one process that takes the same samples in a step."""
    module = build(later)
    module.batch = samples
    trainer_with("auto", devices=1, accumulate_grad_batches=accumulate).fit(module)
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def references(cases: list[tuple[bool, int, int]]) -> list[dict[str, torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [alone(*case) for case in cases]


def fit(arguments: dict[str, Any], later: bool, accumulate: int, file: str) -> dict[str, Any]:
    strategy, module = ThreeDStrategy(**arguments), build(later)
    trainer = trainer_with(strategy, devices=4, accumulate_grad_batches=accumulate)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
        chosen = strategy.layout
        predicted = trainer.predict(module)
    out = {
        "layout": chosen,
        "microbatches": strategy._settings.num_microbatches,
        "loaders": module.replicas,
        "drawn": module.drawn,
        "parameters": full_parameters(strategy),
        "predicted": len(predicted or []),
        "kept": strategy.layout == chosen,
        "said": said.getvalue(),
        "arguments": dict(strategy.chosen.arguments) if strategy.chosen else {},
    }
    if strategy.chosen is not None:
        strategy.freeze(file)
    return out


def runs(cases: list[tuple[dict[str, Any], bool, int]], folder: str) -> list[dict[str, Any]]:
    """One fit after the other; the last one is again the first, from its frozen file."""
    out = [fit(*case, f"{folder}/{number}.yaml") for number, case in enumerate(cases)]
    torch.distributed.barrier()
    made = yaml.safe_load(Path(f"{folder}/0.yaml").read_text())["trainer"]["strategy"]
    out.append(fit(made["init_args"], *cases[0][1:], ""))
    return out


def refusals(memory: int) -> list[str]:
    """What every rank says to runs that cannot be, and to questions that come too early."""
    said = []

    def ask(arguments: dict[str, Any], do: Any, module: Any = None) -> None:
        trainer = trainer_with(ThreeDStrategy(layout="auto", **arguments), devices=2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                do(trainer, module or build(False))
            said.append("")
        except ConfigurationError as error:
            said.append(str(error))

    class Early(Module):
        def setup(self, stage: str) -> None:
            self.trainer.distributed_sampler_kwargs  # noqa: B018

    class ByHand(Module):
        automatic_optimization = False

    train = pl.Trainer.fit
    ask({}, pl.Trainer.predict)
    ask({}, train, Early())
    ask({}, train, ByHand())
    ask({"pipeline_parallel_size": 2, "num_microbatches": 8}, train)
    capacity = calibrate._capacity
    calibrate._capacity = lambda device: memory  # type: ignore[assignment]
    try:
        ask({}, train)
        ask({"tensor_parallel_size": 2}, train)
    finally:
        calibrate._capacity = capacity
    return said


def resumed(folder: str) -> list[float]:
    """Two replicas save after a step; a chosen pipeline goes on, and the same one, given: how far are they apart?"""

    def run(later: bool, arguments: dict[str, Any], steps: int, path: str | None = None) -> tuple[Any, pl.Trainer]:
        strategy = ThreeDStrategy(verify=False, **arguments)
        trainer = trainer_with(strategy, devices=2)
        trainer.fit_loop.epoch_loop.max_steps = steps
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(build(later), ckpt_path=path)
        return full_parameters(strategy), trainer

    worst = []
    for later in (False, True):
        _, trainer = run(later, {}, 1)
        trainer.save_checkpoint(f"{folder}/{later}.ckpt")
        two = {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b", "num_microbatches": 2}
        want, _ = run(later, two, 2, f"{folder}/{later}.ckpt")
        got, trainer = run(later, {"layout": "auto", **two}, 2, f"{folder}/{later}.ckpt")
        assert trainer.global_step == 2
        assert trainer.strategy.layout.pp == 2  # type: ignore[attr-defined]
        worst.append(max(float((got[name] - want[name]).abs().max()) for name in want))
    return worst
