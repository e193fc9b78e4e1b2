"""What the ranks of a launch run for `test_precision.py`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters, relative_error
from tests import models
from tests.strategy.cases import trainer_for
from tests.strategy.fits import replica_difference

STEPS, SAMPLES = 4, 8
RATE = 2.0**-8
"""A power of two: multiplying with it does not round, so every way to compute a step gives the same bits."""


class Module(models.LitMLP):
    """Steps so small that bfloat16 alone would lose them."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def build(kind: type[Module] = Module) -> Module:
    torch.manual_seed(3)
    return kind()


def batches(replica: int, replicas: int, count: int) -> list[dict[str, Tensor]]:
    """Parts of the same global batches on every layout."""
    out = []
    for step in range(count):
        columns = models.vectors(SAMPLES * count).columns
        part = SAMPLES // replicas
        begin = step * SAMPLES + replica * part
        mine = {k: v[begin : begin + part] for k, v in columns.items()}
        out.append({**mine, "x": mine["x"].float()})
    return out


def by_hand(replicas: int = 1, accumulate: int = 1, *, float32: bool = False, each: bool = False) -> dict[str, Tensor]:
    """Float32 masters in a loop of a few lines: what every layout must give.

    Args:
        replicas: How many; their gradients are averaged.
        accumulate: Batches per step.
        float32: Gradients are summed in float32.
        each: They are averaged after every batch, and then summed (ZeRO-2 and 3).
    """
    module = build().bfloat16()
    named = dict(module.named_parameters())
    masters = {n: torch.nn.Parameter(p.detach().float()) for n, p in named.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=RATE)
    data = [batches(r, replicas, STEPS * accumulate) for r in range(replicas)]

    def gradients(replica: int, index: int) -> dict[str, Tensor]:
        module.zero_grad()
        batch = data[replica][index]
        (module.loss({**batch, "x": batch["x"].bfloat16()}) / accumulate).backward()
        return {n: p.grad.float() if float32 else p.grad for n, p in named.items()}

    def added(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {n: functools.reduce(torch.add, (part[n] for part in parts)) for n in parts[0]}

    def mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return added([{n: g / replicas for n, g in part.items()} for part in parts])

    for step in range(STEPS):
        indices = range(step * accumulate, (step + 1) * accumulate)
        if each:
            got = added([mean([gradients(r, i) for r in range(replicas)]) for i in indices])
        else:
            got = mean([added([gradients(r, i) for i in indices]) for r in range(replicas)])
        for n in masters:
            masters[n].grad = got[n].float()
        optimizer.step()
        with torch.no_grad():
            for n, p in named.items():
                p.copy_(masters[n])
    return {n: m.detach() for n, m in masters.items()}


class Batches(torch.utils.data.Dataset):
    def __init__(self, items: list[dict[str, Tensor]]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._items[index]


def fit(
    strategy: ThreeDStrategy,
    *,
    accumulate: int = 1,
    steps: int = STEPS,
    resume: Any = None,
    kind: type[Module] = Module,
    **more: Any,
) -> Any:
    """The Trainer, after a fit on this layout's part of the batches."""
    module = build(kind)

    def train_dataloader() -> Any:
        own = batches(strategy.data_parallel_rank, strategy.data_parallel_size, STEPS * accumulate)
        return DataLoader(Batches(own), batch_size=None)

    module.train_dataloader = train_dataloader  # type: ignore[method-assign]
    options: dict[str, Any] = {"precision": "bf16-true", "max_steps": steps, "accumulate_grad_batches": accumulate}
    trainer = trainer_for(strategy, use_distributed_sampler=False, **{**options, **more})
    trainer.fit(module, ckpt_path=resume)
    return trainer


def masters_of(cases: list[tuple[dict[str, Any], int]]) -> list[tuple[float, float]]:
    """(error of the masters, on rank zero; difference between replicas) of each case: arguments, accumulation."""
    out = []
    for sizes, accumulate in cases:
        strategy = ThreeDStrategy(**{"bucket_size_mb": 0.002, **sizes})
        fit(strategy, accumulate=accumulate)
        with strategy.whole_parameters():
            assert {p.dtype for p in strategy.engine.held.values()} == {torch.bfloat16}
        masters = strategy.whole_state_dict()
        assert {v.dtype for v in masters.values()} <= {torch.float32}
        # in this process: kernels round otherwise with another number of threads
        want = by_hand(
            strategy.layout.dp, accumulate, float32=sizes.get("float32_gradients", False), each=strategy.layout.zero > 1
        )
        error = max((relative_error(masters[n], want[n]) for n in masters), default=0.0)
        out.append((error, replica_difference(strategy)))
    return out


class Edits(Module):
    """Writes into weights in the step: in place before the forward, a new tensor after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net[0].weight.fill_(0.25)
        loss: Tensor = super().training_step(batch, batch_idx)
        self.net[0].bias.data = torch.full_like(self.net[0].bias, 0.5)
        return loss


def edited(stages: list[int], offload: bool = False) -> list[tuple[float, float]]:
    """How far (weight, bias) are from what the step wrote, less one optimizer step."""
    out = []
    for stage in stages:
        strategy = ThreeDStrategy(zero_stage=stage, bucket_size_mb=0.002, offload_optimizer=offload)
        fit(strategy, kind=Edits)
        with strategy.whole_parameters():
            first = strategy.engine.module.net[0]
            out.append((float((first.weight - 0.25).abs().max()), float((first.bias - 0.5).abs().max())))
    return out


def resumed(folder: Path, before: dict[str, Any], after: dict[str, Any], distributed: bool) -> tuple[int, list[str]]:
    """Parameters on rank zero, and those whose masters differ from an uninterrupted run's after another layout's."""
    epochs: dict[str, Any] = {"limit_train_batches": 1, "max_epochs": -1}  # one batch: where it goes on does not matter
    path = folder / "half.ckpt"
    whole, second = ThreeDStrategy(**before), ThreeDStrategy(**after)
    fit(whole, **epochs)
    want = whole.whole_state_dict()
    first = ThreeDStrategy(save_distributed_checkpoint=distributed, **before)
    fit(first, steps=STEPS // 2, **epochs).save_checkpoint(path)
    assert fit(second, resume=path, **epochs).global_step == STEPS
    got = second.whole_state_dict()
    return len(want), [n for n in want if not torch.equal(got[n], want[n])]


def overflow(sizes: list[dict[str, Any]]) -> list[tuple[list[float], float, float, float]]:
    """(scale after every step, first loss, difference between replicas, difference to the start after the overflow).

    In the second batch one element of one gradient of the last replica is too large for float16.
    """
    return [_overflow(ThreeDStrategy(**size)) for size in sizes]


def _overflow(strategy: ThreeDStrategy) -> tuple[list[float], float, float, float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    module = build()
    scales: list[float] = []
    states: list[Any] = []
    losses: list[float] = []

    overflows = False

    def begin(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        nonlocal overflows
        overflows = batch_idx == 1 and strategy.data_parallel_rank == strategy.data_parallel_size - 1

    def spoil(gradient: Tensor) -> Tensor:
        """One element, which one rank alone will unscale."""
        out = gradient.clone()
        out[0, 0] += float("inf") if overflows else 0.0
        return out

    module.net[0].weight.register_hook(spoil)

    def note(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        scales.append(scaler.get_scale())
        losses.append(float(outputs["loss"]))
        states.append(trainer.strategy.whole_state_dict())

    def train_dataloader() -> Any:
        own = batches(strategy.data_parallel_rank, strategy.data_parallel_size, STEPS)
        return DataLoader(Batches(own), batch_size=None)

    module.train_dataloader = train_dataloader  # type: ignore[method-assign]
    trainer = trainer_for(
        strategy, max_epochs=1, use_distributed_sampler=False, precision=None,
        callbacks=[LambdaCallback(on_train_batch_start=begin, on_train_batch_end=note)],
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
    )  # fmt: skip
    trainer.fit(module)
    moved = max((float((states[1][n] - states[0][n]).abs().max()) for n in states[0]), default=0.0)
    return scales, losses[0], replica_difference(strategy), moved


class ClipsInAHook(Module):
    """By torch's function, and looks at the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        own = grad_norm(self, 2)
        self.norms += [float(own["grad_2.0_norm_total"]), float(clip_grad_norm_(self.parameters(), 0.05))]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def clipped_in_a_hook(layouts: list[dict[str, Any] | None]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """(norms a hook saw, parameters) after fits whose loss is scaled."""
    out = []
    for size in layouts:
        strategy: Any = "auto" if size is None else ThreeDStrategy(bucket_size_mb=0.002, **size)

        def train_dataloader(strategy: Any = strategy, alone: bool = size is None) -> Any:
            where = (0, 1) if alone else (strategy.data_parallel_rank, strategy.data_parallel_size)
            return DataLoader(Batches(batches(*where, STEPS)), batch_size=None)

        module = build(ClipsInAHook)
        module.train_dataloader = train_dataloader  # type: ignore[method-assign]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        trainer = trainer_for(
            strategy, use_distributed_sampler=False, precision=None, plugins=[MixedPrecision("16-mixed", "cpu", scaler)]
        )
        trainer.fit(module)
        whole = dict(module.named_parameters()) if size is None else full_parameters(strategy)
        out.append((module.norms, {n: p.detach().clone() for n, p in whole.items()}))
    return out
