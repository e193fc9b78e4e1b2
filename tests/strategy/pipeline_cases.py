"""What the ranks of a launch run for `test_pipeline_cases.py`."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_3d import ThreeDStrategy
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.testing import full_gradients, full_parameters
from tests import models
from tests.strategy.cases import OnMeta, trainer_for
from tests.strategy.fits import replica_difference


def _strategy(sizes: dict[str, Any] | None) -> Any:
    return "auto" if sizes is None else ThreeDStrategy(**sizes)


def _replica(strategy: Any) -> tuple[int, int]:
    """(replica, replicas) of this process."""
    if isinstance(strategy, str):
        return 0, 1
    replicas = strategy.layout.dp
    return int(os.environ["RANK"]) // (int(os.environ["WORLD_SIZE"]) // replicas), replicas


def _full(strategy: Any, module: nn.Module) -> dict[str, Tensor]:
    found = dict(module.named_parameters()) if isinstance(strategy, str) else full_parameters(strategy)
    return {n: p.detach().clone() for n, p in found.items()}


# -- models that run through `fits.fit` by their name
class FrozenStart(models.LitMLP):
    """Everything of the first stage is frozen (with `pipeline_split=["net.9"]`)."""

    def __init__(self) -> None:
        super().__init__()
        self.net[:9].requires_grad_(False)


class TinyEnd(models.LitMLP):
    """The last stage holds one norm (with `pipeline_split=["last"]`)."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(5)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.last(self.net(batch["x"])), batch["y"])


class Passes(models.Lit):
    """Blocks hand on (hidden, bool mask, int positions, None); one ignores its hidden input on odd batches."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(8, 8)

        def forward(self, h: Tensor, mask: Tensor, positions: Tensor, nothing: None) -> tuple[Any, ...]:
            y = torch.tanh(self.f(h)).masked_fill(mask, 0.0)
            return y, h > 0.9, positions + (y > 0).long(), nothing

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(self.Block() for _ in range(6)), nn.Linear(8, 5)
        self.odd = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.odd = batch_idx % 2 == 1
        return super().training_step(batch, batch_idx)

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        state: Any = (x, x > 1e9, torch.zeros_like(x).long(), None)
        for i, block in enumerate(self.blocks):
            if i == 4 and self.odd:
                state = (x.flip(-1) + 0.0 * state[0], *state[1:])
            state = block(*state)
        return F.cross_entropy(self.head(state[0]) + state[2].double().mean(), batch["y"])


class TwoHeads(models.LitMLP):
    """The samples of replica 0 go through one head, those of replica 1 through the other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(16, 5), nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))])
        self.net = self.net[:-1]

    def loss(self, batch: Any) -> Tensor:
        head = self.heads[int(batch["which"][0])]
        return F.cross_entropy(head(self.net(batch["x"])), batch["y"])


def alternating(n: int) -> models.Samples:
    samples = models.vectors(n)
    samples.columns["which"] = torch.arange(n) % 2
    return samples


models.MODELS |= {
    "frozen_start": (FrozenStart, models.vectors),
    "tiny_end": (TinyEnd, models.vectors),
    "passes": (Passes, models.vectors),
    "two_heads": (TwoHeads, alternating),
}


# -- S1: BatchNorm sees microbatches
class Normed(models.Lit):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)]
        self.net = nn.Sequential(*layers, nn.Linear(8, 5))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


def batch_norm(sizes: dict[str, Any] | None, microbatches: int) -> tuple[dict[str, Tensor], list[str]]:
    """Statistics after two batches of 16 samples, and the warnings."""
    strategy = _strategy(sizes)
    trainer = trainer_for(strategy, max_steps=2, max_epochs=-1, use_distributed_sampler=False)
    torch.manual_seed(6)
    module = Normed().double()
    module.parts = (1, microbatches if sizes is None else 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, models.loader("mlp", 32, 16))
    state = module.state_dict() if sizes is None else strategy.lightning_module_state_dict()
    found = {k: v if sizes is None else v.full_tensor() for k, v in state.items() if "running" in k or "num_" in k}
    return {k: v.clone() for k, v in found.items()}, [str(w.message) for w in caught if "BatchNorm" in str(w.message)]


# -- S2: buffers that no checkpoint holds, after a build on the meta device
class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(16, 8), persistent=False)
        self.register_buffer("offsets", torch.zeros(3, dtype=torch.long))
        self.scale = nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            angles = torch.arange(16.0)[:, None] / torch.logspace(0, 2, 8)
            self.table.copy_(angles.sin())
            self.offsets.copy_(torch.tensor([5, 6, 7]))
            self.scale.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[self.offsets[0]].to(x.dtype) * self.scale


class MetaBuffers(models.Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                layers: list[nn.Module] = []
                for _ in range(4):
                    layers += [nn.Linear(8, 8), Rotary(), nn.Tanh()]
                self.net = nn.Sequential(*layers, nn.Linear(8, 5))

    def loss(self, batch: Any) -> Tensor:
        assert self.net is not None
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


def buffers_after_meta(layouts: list[dict[str, Any]]) -> list[tuple[float, list[str], float]]:
    """Largest difference of a buffer from what its module makes, its kinds, and the first loss's finiteness."""
    want = dict(Rotary().named_buffers())
    out = []
    for sizes in layouts:
        trainer = trainer_for(_strategy(sizes), max_steps=2, max_epochs=-1)
        module = MetaBuffers()
        trainer.fit(module, models.loader("mlp", 16, 8))
        worst, kinds = 0.0, set()
        for name, buffer in module.named_buffers():
            key = name.rpartition(".")[2]
            worst = max(worst, float((buffer.double() - want[key].double()).abs().max()))
            kinds.add(f"{key} {'integer' if not buffer.is_floating_point() else 'float'}")
        out.append((worst, sorted(kinds), float(trainer.callback_metrics["loss"])))
    return out


# -- T2, with several windows per stage
def tied_on_meta(layouts: list[dict[str, Any]]) -> list[tuple[bool, float]]:
    out = []
    for sizes in layouts:
        strategy = _strategy(sizes)
        trainer = trainer_for(strategy, max_steps=3, max_epochs=-1)
        module = OnMeta()
        torch.manual_seed(1)
        trainer.fit(module, models.loader("gpt_tied", 16, 8))
        names = dict(module.named_parameters())
        out.append(("wte.weight" in names and "head.weight" not in names, replica_difference(strategy)))
    return out


# -- H1: replicas with other numbers of validation batches
class Uneven(models.LitMLP):
    """Replica 0 has three validation batches, replica 1 one, later none."""

    def __init__(self, other: int, empty: bool = False) -> None:
        super().__init__()
        self.other = other
        self.allow_zero_length_dataloader_with_multiple_devices = empty

    def val_dataloader(self) -> Any:
        replica, _ = _replica(self.trainer.strategy)
        count = self.other if replica == 1 else 3
        data = models.vectors(64)
        begin = 0 if replica == 0 else 24
        columns = {k: v[begin : begin + 8 * count] for k, v in data.columns.items()}
        return DataLoader(models.Samples(columns), batch_size=8)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def uneven_validation(sizes: dict[str, Any], other: int, empty: bool = False) -> tuple[float, float, int]:
    """The metric, what it should be, and the number of steps."""
    strategy = _strategy(sizes)
    trainer = trainer_for(strategy, max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0)
    torch.manual_seed(3)
    module = Uneven(other, empty).double()
    replica, replicas = _replica(strategy)
    trainer.fit(module, models.loader("mlp", 32, 16, replica, replicas))
    plain = Uneven(other).double()
    plain.load_state_dict(_full(strategy, module))
    data = models.vectors(64).columns
    with torch.no_grad():
        seen = {k: v[: 24 + 8 * other] for k, v in data.items()}
        want = float(plain.loss(seen))
    return float(trainer.callback_metrics["val_loss"]), want, trainer.global_step


# -- H5: who logs
class Logs(models.LitMLP):
    """Logs the loss, and something else in some steps only."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "leader" and self.global_rank == 0:
            self.log("leader", batch["x"].mean(), sync_dist=True)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.how == "leader_loss" and self.global_rank == 0:
            self.log("leader", loss, sync_dist=True)
        if self.how == "large" and loss > 1.5 + 0.02 * batch_idx:
            self.log("large", loss, on_step=True, on_epoch=False)
            self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        if self.how == "every_second" and batch_idx % 2:
            self.log("second", loss)
        return loss


class Seen(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def logged(sizes: dict[str, Any] | None, how: str) -> list[dict[str, float]]:
    seen = Seen()
    strategy = _strategy(sizes)
    trainer = trainer_for(strategy, callbacks=[seen], use_distributed_sampler=False)
    torch.manual_seed(3)
    trainer.fit(Logs(how).double(), models.loader("mlp", 48, 8, *_replica(strategy)))
    return [*seen.seen, {k: float(v) for k, v in trainer.callback_metrics.items()}]


# -- H6: who stops
class StopsOn(pl.Callback):
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank in self.ranks:
            trainer.should_stop = True


class WorseOnSome(models.LitMLP):
    """What early stopping looks at falls on one replica and grows on the other."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        falls = self.trainer.strategy.data_parallel_rank == 0
        self.log("seen", torch.tensor(float(-self.current_epoch if falls else self.current_epoch)))


def stopped(sizes: dict[str, Any], how: tuple[int, ...] | str) -> tuple[int, int]:
    """(steps, epochs) of a fit that one rank, or early stopping, ends."""
    strategy = _strategy(sizes)
    callback: Any = StopsOn(how) if isinstance(how, tuple) else EarlyStopping("seen", patience=1)
    trainer = trainer_for(strategy, max_epochs=4, callbacks=[callback], num_sanity_val_steps=0)
    module = models.LitMLP() if isinstance(how, tuple) else WorseOnSome()
    val = None if isinstance(how, tuple) else models.loader("mlp", 16, 8)
    trainer.fit(module, models.loader("mlp", 64, 8), val)
    return trainer.global_step, trainer.current_epoch


# -- H11: the order of registration differs between the ranks
class ThreePairs(models.Lit):
    """Three embeddings tied to three heads, registered in an order that is another one on every rank."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.embeds, self.heads = nn.ModuleDict(), nn.ModuleDict()
        for i in order:
            self.embeds[f"e{i}"] = nn.Embedding(models.VOCAB, 8)
        self.blocks = nn.ModuleList(models.Block(8, 2) for _ in range(4))
        for i in reversed(order):
            self.heads[f"h{i}"] = nn.Linear(8, models.VOCAB, bias=False)
            self.heads[f"h{i}"].weight = self.embeds[f"e{i}"].weight

    def loss(self, batch: Any) -> Tensor:
        ids = batch["tokens"]
        x = self.embeds["e0"](ids) + 0.5 * self.embeds["e1"](ids) + 0.25 * self.embeds["e2"](ids)
        for block in self.blocks:
            x = block(x)
        return sum(F.cross_entropy(self.heads[f"h{i}"](x).flatten(0, 1), ids.flatten()) * (i + 1) for i in range(3))


def tied_in_any_order(sizes: dict[str, Any] | None, seed: int) -> tuple[dict[str, Tensor], float]:
    """Parameters after two steps from rank zero's weights, by name."""
    rank = int(os.environ["RANK"])
    order = [0, 1, 2]
    random.Random(seed + (0 if sizes is None else rank)).shuffle(order)
    strategy = _strategy(sizes)
    trainer = trainer_for(strategy, max_steps=2, max_epochs=-1)
    module = ThreePairs(order).double()
    for name, parameter in sorted(module.named_parameters()):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    trainer.fit(module, models.loader("gpt_tied", 16, 8))
    return _full(strategy, module), 0.0 if sizes is None else replica_difference(strategy)


# -- N20: what is scored against what
class Pairs(models.Lit):
    """The first feature of every sample is its number, and stays it through all blocks; so is its label."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 5)
        self.pairs: list[tuple[int, int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        lengths = [len(s) for s in batch["samples"]]
        x = nn.utils.rnn.pad_sequence(list(batch["samples"]), batch_first=True)  # as long as this microbatch's longest
        keep = torch.tensor([0.0, *[1.0] * 7], dtype=x.dtype)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * keep
        for row, label, length in zip(x.detach(), batch["labels"], lengths, strict=True):
            self.pairs.append((round(row[0, 0].item()), int(label), length))
        logits = self.head(torch.stack([row[:n].mean(0) for row, n in zip(x, lengths, strict=True)]))
        return F.cross_entropy(logits, batch["labels"] % 5)


class Numbered(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        sample = torch.randn(2 + i % 5, 8, generator=torch.Generator().manual_seed(i)).double()
        sample[:, 0] = i
        return sample, i


def _together(samples: list[tuple[Tensor, int]]) -> dict[str, Any]:
    return {"samples": [s for s, _ in samples], "labels": torch.tensor([i for _, i in samples])}


def pairs(sizes: dict[str, Any] | None) -> tuple[list[tuple[int, int, int]], dict[str, Tensor]]:
    strategy = _strategy(sizes)
    trainer = trainer_for(strategy, use_distributed_sampler=False)
    torch.manual_seed(3)
    module = Pairs().double()
    trainer.fit(module, DataLoader(Numbered(), batch_size=8, collate_fn=_together))
    return module.pairs, _full(strategy, module)


# -- U12: no message is waited for before the action that needs it
def waits(virtual: int, microbatches: int) -> list[tuple[str, str]]:
    """Per wait, (what is waited for, what is about to run) of one step."""
    from lightning_3d.pipeline import PipelineRunner
    from lightning_3d.pipeline.training_schedule import TrainingSchedule
    from tests.pipeline.zoo import batch_of, build

    mesh = Mesh(Layout(pp=2), torch.device("cpu"))
    schedule = TrainingSchedule("interleaved_1f1b" if virtual > 1 else "1f1b", 2, virtual)
    actions: list[Any] = []
    found: list[tuple[Any, Any]] = []
    runner = PipelineRunner(
        build("mlp"), mesh, schedule=schedule, num_microbatches=microbatches, on_action=actions.append
    )
    batch = batch_of("mlp", 16)
    runner.setup("training_step", batch)
    runner.channels.on_wait = lambda parcel: None if parcel is None else found.append((parcel.message, actions[-1]))
    runner.train_step(batch, 0)
    planned = schedule.lists(schedule.owners, microbatches)[mesh.at.pp]
    assert [a for a in actions if a is not None] == list(planned), "another order than the planned one"
    out = []
    for message, action in found:
        window = action.window if hasattr(action, "window") else action[2]
        kind = {"F": "F"}.get(action.kind, "G")
        out.append((f"{message.kind} {message.microbatch} {message.target}", f"{kind} {action.microbatch} {window}"))
    return out


# -- several loaders in training
def combined(sizes: dict[str, Any] | None, mode: str) -> tuple[dict[str, Tensor], int]:
    class Both(models.LitMLP):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            first, second = batch["a"], batch["b"]
            if first is None or second is None:  # `max_size`: one of them has ended
                return self.loss(first or second)
            n = len(first["y"])
            both = {k: torch.cat([first[k], second[k]]) for k in "xy"}
            logits = self.net(both["x"])
            loss = F.cross_entropy(logits[:n], both["y"][:n]) + 0.5 * F.cross_entropy(logits[n:], both["y"][n:])
            self.log("loss", loss)
            return loss

    strategy = _strategy(sizes)
    trainer = trainer_for(strategy, use_distributed_sampler=False, limit_val_batches=0)
    torch.manual_seed(4)
    module = Both().double()
    loaders = {"a": models.loader("mlp", 24, 8), "b": models.loader("mlp", 32, 8)}
    trainer.fit(module, CombinedLoader(loaders, mode))
    return _full(strategy, module), trainer.global_step


class Collated:
    """A batch class of the user's own, with what Lightning asks of one."""

    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self.x, self.y = (torch.stack([s[k] for s in samples]) for k in "xy")
        self.source = "disk"

    def to(self, device: Any, non_blocking: bool = False) -> Collated:
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


class FromClass(models.LitMLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch.source == "disk"
        return F.cross_entropy(self.net(batch.x), batch.y)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch.x)


def of_a_class(sizes: dict[str, Any] | None) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters after batches of 8, 8 and 5 samples, and predictions."""
    strategy = _strategy(sizes)
    trainer = trainer_for(strategy, use_distributed_sampler=False, limit_val_batches=0)
    torch.manual_seed(4)
    module = FromClass().double()
    loader: Any = DataLoader(models.vectors(21), batch_size=8, collate_fn=Collated)
    trainer.fit(module, loader)
    predictions: Any = trainer.predict(module, loader)
    return _full(strategy, module), torch.cat(predictions)


# -- evaluation in every way the Trainer offers
class Evaluated(models.LitMLP):
    def __init__(self) -> None:
        super().__init__()
        self.modes: list[tuple[str, bool, bool, bool]] = []

    def note(self, what: str) -> None:
        mode = (what, self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if mode not in self.modes:
            self.modes.append(mode)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.note("train")
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.note("validate")
        self.log("val", loss)
        self.log("val_largest", loss, reduce_fx="max")
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits = self.net(batch["x"])
        self.note("test")
        self.log_dict({"test": F.cross_entropy(logits, batch["y"]), f"only/{dataloader_idx}": logits.mean()})

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        logits = self.net(batch["x"])
        self.note("predict")
        return {"classes": logits.argmax(-1), "where": (dataloader_idx, batch_idx), "logits": logits}


def evaluated(sizes: dict[str, Any] | None) -> dict[str, Any]:
    """Sanity check, fit with validation of two loaders, validate, test and predict; odd last batches, limits."""
    out: dict[str, Any] = {}
    strategy = _strategy(sizes)
    options: dict[str, Any] = {"limit_val_batches": 0.5, "limit_test_batches": 2, "limit_predict_batches": 0.7}
    seen: list[dict[str, float]] = []

    class Validations(pl.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            seen.append({k: float(v) for k, v in trainer.callback_metrics.items() if "val" in k})

    trainer = trainer_for(
        strategy, use_distributed_sampler=False, max_epochs=2, num_sanity_val_steps=1, val_check_interval=2,
        callbacks=[Validations()], **options,
    )  # fmt: skip
    torch.manual_seed(4)
    module = Evaluated().double()

    def loaders() -> list[DataLoader]:
        return [models.loader("mlp", 23, 5), models.loader("mlp", 13, 4)]  # 5 batches, the last of 3; 4, of 1

    trainer.fit(module, models.loader("mlp", 32, 8), loaders())
    out["training"] = all(m.training for m in module.modules())
    out["validations"] = seen
    out["validate"] = trainer.validate(module, loaders(), verbose=False)
    out["test"] = trainer.test(module, loaders(), verbose=False)
    predictions: Any = trainer.predict(module, loaders())
    out["shape"] = [[p["where"] for p in one] for one in predictions]
    out["predictions"] = [torch.cat([p["logits"] for p in one]) for one in predictions]
    out["classes"] = [torch.cat([p["classes"] for p in one]) for one in predictions]
    single: Any = trainer.predict(module, models.loader("mlp", 13, 4))
    out["single"] = [tuple(p["logits"].shape) for p in single]
    out["nothing"] = trainer.predict(module, models.loader("mlp", 13, 4), return_predictions=False)
    out["modes"] = sorted(module.modes)
    out["after"] = all(p.requires_grad for p in module.parameters())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, models.loader("mlp", 32, 8), loaders())
    out["parameters"] = _full(strategy, module)
    out["steps"] = trainer.global_step
    return out


# -- gradients as the optimizer sees them
def gradient_norms(cases: list[tuple[int, int]]) -> list[float]:
    """Norm of the gradient of one optimizer step, for (microbatches, accumulation)."""
    out = []
    for microbatches, accumulate in cases:
        strategy = ThreeDStrategy(pipeline_parallel_size=2, num_microbatches=microbatches)
        norms: list[float] = []

        class Norm(pl.Callback):
            def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
                found = full_gradients(trainer.strategy).values()
                norms.append(float(torch.stack([g.square().sum() for g in found]).sum().sqrt()))  # noqa: B023

        trainer = trainer_for(strategy, max_steps=1, max_epochs=-1, callbacks=[Norm()])
        trainer.accumulate_grad_batches = accumulate
        trainer.fit(models.build("mlp"), models.loader("mlp", 24, 24 // accumulate))
        out.append(norms[0])
    return out
