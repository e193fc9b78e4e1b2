"""What the ranks of a launch run for `test_optimizers.py`: optimizers as users make them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint import export_checkpoint
from tests import models
from tests.strategy.cases import trainer_for
from tests.strategy.zero_cases import Sizes, place, strategy_of, whole

OPTIONS = ("lr", "initial_lr", "weight_decay", "momentum", "param_names", "tag")


def named(self: Any) -> Any:
    return torch.optim.Adam(self.named_parameters(), lr=0.01)


def named_groups(self: Any) -> Any:
    """With names, an option of the user's own, and a scheduler that knows the groups apart."""
    ends = [(n, p) for n, p in self.named_parameters() if not n.startswith("blocks")]
    vectors = [(n, p) for n, p in self.blocks.named_parameters() if p.ndim < 2]
    matrices = [(n, p) for n, p in self.blocks.named_parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": vectors, "weight_decay": 0.0, "tag": "vectors"},
            {"params": matrices, "lr": 0.02},
            {"params": ends, "lr": 0.005},
        ],
        lr=0.01,
        weight_decay=0.1,
    )
    rates = [lambda step: 1.0, lambda step: 0.9**step, lambda step: 1 / (1 + step)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def empty_groups(self: Any) -> Any:
    nothing: list[Any] = []
    groups = [{"params": nothing}, {"params": self.blocks.parameters(), "lr": 0.02}, {"params": nothing, "tag": "none"}]
    rest = [p for n, p in self.named_parameters() if not n.startswith("blocks")]
    return torch.optim.RAdam([*groups, {"params": rest}], lr=0.01)


def built_before(self: Any) -> Any:
    """Made in `__init__`."""
    return [self.made]


def one_per_block(self: Any) -> Any:
    """Many groups of few parameters, interleaved with what others hold."""
    groups = [{"params": block.parameters(), "lr": 0.01 * (i + 1)} for i, block in enumerate(self.blocks)]
    rest = [p for n, p in self.named_parameters() if not n.startswith("blocks")]
    return torch.optim.SGD([*groups, {"params": rest}], lr=0.05, momentum=0.9, nesterov=True)


def part_only(self: Any) -> Any:
    """Parameters that no optimizer has."""
    return torch.optim.NAdam(self.blocks[1:3].parameters(), lr=0.01)


def maximizes(self: Any) -> Any:
    return torch.optim.Adam(self.parameters(), lr=torch.tensor(0.01), amsgrad=True, maximize=True)


KINDS: dict[str, Callable[[Any], Any]] = {
    f.__name__: f for f in (named, named_groups, empty_groups, built_before, one_per_block, part_only, maximizes)
}


# -- such as look at whole matrices
def adafactor(self: Any) -> Any:
    """Factored moments of matrices; an empty group, and one with a rate of its own.

    Without the bias of attention, whose gradient is zero for the keys: rounding errors would be scaled to whole steps.
    """
    blocks = [p for n, p in self.blocks.named_parameters() if "qkv.bias" not in n]
    rest = [p for n, p in self.named_parameters() if not n.startswith("blocks")]
    return torch.optim.Adafactor([{"params": blocks, "lr": 0.02}, {"params": []}, {"params": rest}], lr=0.05)


def muon(self: Any) -> Any:
    return torch.optim.Muon([(n, p) for n, p in self.named_parameters() if p.ndim == 2], lr=0.02)


class Anchored(torch.optim.Optimizer):
    """Normalized steps that are drawn to where they began: state made with the optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"anchor": p.detach().clone(), "moment": torch.zeros_like(p), "steps": 0}

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch.no_grad():
            for group in self.param_groups:
                for p in [p for p in group["params"] if p.grad is not None]:
                    state = self.state[p]
                    state["steps"] += 1
                    state["moment"].mul_(0.9).add_(p.grad / (p.grad.norm() + 1e-3))
                    p.lerp_(state["anchor"], 0.01).sub_(state["moment"], alpha=group["lr"])
        return loss


def anchored(self: Any) -> Any:
    return Anchored(self.parameters(), 0.02)


class Insistent(torch.optim.Optimizer):
    """Orthogonalized steps for matrices, others for the rest, and a gradient for whatever has none: a known Muon."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                    moment = self.state[p].setdefault("moment", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    assert not group["matrices"] or p.ndim == 2
                    step = moment / (moment.norm() + 1e-6) if group["matrices"] else moment
                    p.mul_(1 - 0.1 * group["lr"]).add_(step.view(p.shape), alpha=-group["lr"])
        return loss


def insistent(self: Any) -> Any:
    matrices = [p for p in self.parameters() if p.ndim == 2]
    vectors = [p for p in self.parameters() if p.ndim != 2]
    return Insistent([{"params": matrices, "matrices": True}, {"params": vectors, "matrices": False}], {"lr": 0.02})


WHOLE: dict[str, Callable[[Any], Any]] = {f.__name__: f for f in (adafactor, muon, anchored, insistent)}


class Adds(pl.Callback):
    """Groups that come later: after the first epoch the first block thaws, after the second the embedding."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.blocks[0].requires_grad_(False)
        pl_module.wpe.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        parts = {1: pl_module.blocks[0], 2: pl_module.wpe}
        part = parts.get(trainer.current_epoch)
        if part is not None:
            part.requires_grad_(True)
            named_ones = [(f"late.{n}", p) for n, p in part.named_parameters() if "qkv.bias" not in n]
            trainer.optimizers[0].add_param_group({"params": named_ones, "lr": 0.03, "weight_decay": 0.2})


def late(self: Any) -> Any:
    return torch.optim.AdamW([(n, p) for n, p in self.named_parameters() if p.requires_grad], lr=0.01)


def late_adafactor(self: Any) -> Any:
    kept = [(n, p) for n, p in self.named_parameters() if p.requires_grad and "qkv.bias" not in n]
    return torch.optim.Adafactor(kept, lr=0.05)


KINDS["late"] = late
WHOLE["late_adafactor"] = late_adafactor


def run(kind: str, sizes: Sizes, folder: str | None = None) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Parameters after three epochs, and what the groups say; in the folder a plain file of the run."""
    strategy = strategy_of(sizes)
    module = models.build("gpt_tied")
    module.__class__ = type(f"With{kind}", (type(module),), {"configure_optimizers": {**KINDS, **WHOLE}[kind]})
    if kind == "built_before":
        module.made = torch.optim.RMSprop(module.parameters(), lr=0.01, momentum=0.5, centered=True)
    callbacks = [Adds()] if kind.startswith("late") else []
    trainer = trainer_for(strategy, max_epochs=3, use_distributed_sampler=False, callbacks=callbacks)
    trainer.fit(module, models.loader("gpt_tied", 16, 8, *place(strategy)))
    groups = [
        {key: _plain(value) for key, value in group.items() if key in OPTIONS}
        for group in trainer.optimizers[0].param_groups
    ]
    if folder is not None:
        Path(folder).mkdir(exist_ok=True)
        path = Path(folder) / f"{kind}.ckpt"
        trainer.save_checkpoint(path)
        if sizes is not None and trainer.is_global_zero:
            export_checkpoint(path, Path(folder) / f"{kind}.plain.ckpt")
        if sizes is not None:
            strategy.barrier()
    return whole(strategy, module), groups


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def runs(cases: list[tuple[str, Sizes]], folders: list[str | None] | None = None) -> list[Any]:
    where = folders or [None] * len(cases)
    return [run(kind, sizes, folder) for (kind, sizes), folder in zip(cases, where, strict=True)]


# -- LightningCLI makes the optimizer and the scheduler, before `fit`
class ByCLI(models.LitMLP):
    def __init__(self, width: int = 16) -> None:
        torch.manual_seed(3)
        super().__init__(width)

    configure_optimizers = pl.LightningModule.configure_optimizers


class DataByCLI(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        strategy: Any = self.trainer.strategy
        return models.loader("mlp", 40, 8, *place(strategy if isinstance(strategy, ThreeDStrategy) else "auto"))


def by_cli(strategies: list[list[str]]) -> list[tuple[dict[str, Tensor], float]]:
    """Parameters and learning rate of runs from a command line."""
    warnings.simplefilter("ignore")
    run = {
        "accelerator": "cpu", "devices": os.environ["WORLD_SIZE"], "precision": "64-true", "max_epochs": 2,
        "logger": "false", "enable_checkpointing": "false", "enable_progress_bar": "false",
        "enable_model_summary": "false", "use_distributed_sampler": "false", "gradient_clip_val": 0.2,
    }  # fmt: skip
    made = {
        "optimizer": "AdamW", "optimizer.lr": 0.01, "optimizer.weight_decay": 0.1,
        "lr_scheduler": "StepLR", "lr_scheduler.step_size": 1, "lr_scheduler.gamma": 0.5,
    }  # fmt: skip
    common = [*(f"--trainer.{k}={v}" for k, v in run.items()), *(f"--{k}={v}" for k, v in made.items())]
    out = []
    for arguments in strategies:
        cli = LightningCLI(
            ByCLI,
            DataByCLI,
            args=["fit", *common, *arguments],
            save_config_callback=None,
            seed_everything_default=False,
        )
        strategy = cli.trainer.strategy
        parameters = whole(strategy if isinstance(strategy, ThreeDStrategy) else "auto", cli.model)
        out.append((parameters, cli.trainer.optimizers[0].param_groups[0]["lr"]))
    return out
