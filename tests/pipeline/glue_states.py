"""Modules whose steps remember something, and what the ranks of a launch run for `test_glue_state.py`."""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy.cases import trainer_for

CALLS: list[int] = []


class Block(nn.Module):
    """Remembers something: `counter`, `state` (a stateful RNN), `cached` (a buffer and its last output), `global`."""

    def __init__(self, remembers: str = "") -> None:
        super().__init__()
        self.linear, self.remembers = nn.Linear(6, 6), remembers
        self.count, self.state = 0, None
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.remembers == "counter":
            self.count += 1
            x = x * (1 + 0.1 * self.count)
        elif self.remembers == "state":
            if self.state is not None:
                x = x + 0.5 * self.state
            self.state = x.detach().mean(0)
        elif self.remembers == "left":
            self.last = x.detach()
        elif self.remembers == "global":
            CALLS.append(len(CALLS))
        elif self.remembers == "cached":
            self.mean = 0.5 * self.mean + x.detach().mean(0)
            self.last = x
            x = x + self.mean
        return x


class Remembers(pl.LightningModule):
    """A step with something before the blocks, behind the first one, and after them."""

    def __init__(self, before: Any = None, after: Any = None, blocks: str = "", behind: Any = None) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 6)
        self.blocks = nn.ModuleList([Block(blocks) for _ in range(6)])
        self.head = nn.Linear(6, 5)
        self.before, self.after = before or (lambda module, x: x), after or (lambda module, x, loss: None)
        self.behind = behind
        self.count, self.queue, self.array = 0, deque([1.0], maxlen=3), np.zeros(3)
        self.helper, self.previous, self.held = Helper(), 0.0, None
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("bank", F.normalize(torch.arange(40.0).view(5, 8).sin(), dim=0))
        self.register_buffer("middle", torch.zeros(6))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.average = [torch.zeros(6, dtype=torch.float64)]
        self.seen: list[Tensor] = []
        self.past: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.before(self, batch["x"])
        h = self.inp(x)
        for number, block in enumerate(self.blocks):
            h = block(h)
            if number == 0 and self.behind is not None:
                h = self.behind(self, h)
        loss = F.cross_entropy(self.head(h), batch["y"])
        extra = self.after(self, batch["x"], loss)
        self.log("loss", loss)
        return loss if extra is None else loss + extra

    def on_validation_epoch_start(self) -> None:
        self.seen = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        h = self.inp(batch["x"])
        for block in self.blocks:
            h = block(h)
        self.seen.append(F.cross_entropy(self.head(h), batch["y"]))

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.seen).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Helper:
    """A plain object of the user's."""

    def __init__(self) -> None:
        self.value = 0

    def tick(self) -> float:
        self.value += 1
        return 1 + 0.1 * self.value


# -- before the blocks
def counts(module: Any, x: Tensor) -> Tensor:
    module.count += 1
    return x * (1 + 0.1 * module.count)


def queues(module: Any, x: Tensor) -> Tensor:
    module.queue.append(module.queue[-1] + 0.1)
    return x * sum(module.queue)


def ticks(module: Any, x: Tensor) -> Tensor:
    return x * module.helper.tick()


def fills(module: Any, x: Tensor) -> Tensor:
    module.array += 0.1
    return x * float(module.array.sum())


def normalises(module: Any, x: Tensor) -> Tensor:
    module.steps += 1
    module.mean += (x.mean(0) - module.mean) / module.steps
    return x - module.mean


def assigns(module: Any, x: Tensor) -> Tensor:
    module.mean = 0.9 * module.mean + 0.1 * x.mean(0)
    return x - module.mean


def uses_end(module: Any, x: Tensor) -> Tensor:
    return x * (1 + 0.1 * module.count + 0.1 * module.steps) + module.previous


def branches(module: Any, x: Tensor) -> Tensor:
    return x * 2 if module.count >= 1 else x


def goes_on(module: Any, x: Tensor) -> Tensor:
    return x if module.held is None else x + module.held


# -- behind the first block: the last stage runs the first half of the change only
def decays(module: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        module.middle.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - module.middle


def goes_on_in_the_middle(module: Any, h: Tensor) -> Tensor:
    h = h if module.held is None else h + 0.3 * module.held
    module.held = h.detach()
    return h


def averages(module: Any, h: Tensor) -> Tensor:
    """A plain attribute: None, then a new tensor in every step."""
    mean = h.detach().mean(0)
    module.held = mean if module.held is None else 0.9 * module.held + 0.1 * mean
    return h - module.held


def averages_in_place(module: Any, h: Tensor) -> Tensor:
    """Not registered as a buffer."""
    module.average[0].mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h - module.average[0]


def changes_parts(module: Any, h: Tensor) -> Tensor:
    """Through a view and through `.data`."""
    out = h + 0.3 * module.bank[1, :6] - module.middle
    with torch.no_grad():
        module.bank[1, :6].copy_(h.mean(0))
        module.middle.data.lerp_(h.mean(0), 0.3)
    return out


def lists(module: Any, h: Tensor) -> Tensor:
    for before in module.past[-2:]:
        h = h + 0.1 * before["h"]
    module.past.append({"h": h.detach(), "count": len(module.past)})
    return h


def keeps_hidden(module: Any, h: Tensor) -> Tensor:
    module.held = h.detach().mean(0)
    return h


def uses_hidden(module: Any, x: Tensor) -> Tensor:
    return x if module.held is None else x + module.held.sum()


def uses_what_a_block_left(module: Any, x: Tensor) -> Tensor:
    last = getattr(module.blocks[1], "last", None)
    return x if last is None else x + last.mean(-1, keepdim=True)


# -- after the loss
def counts_at_end(module: Any, x: Tensor, loss: Tensor) -> None:
    module.count += 1
    module.steps += 1


def keeps_loss(module: Any, x: Tensor, loss: Tensor) -> None:
    module.previous = loss.detach()
    module.held = x.mean(0)


def contrasts(module: Any, x: Tensor, loss: Tensor) -> Tensor:
    """MoCo: a bank of keys, and where the next one goes."""
    place = int(module.place)
    key = F.normalize(x.mean(0)[:5].detach(), dim=0)
    extra = (module.head.weight @ module.head.weight.T).diagonal().mul(module.bank.mean(1)).sum()
    module.bank[:, place] = key
    module.place[0] = (place + 1) % module.bank.shape[1]
    return extra


KINDS: dict[str, Callable[[], Remembers]] = {
    "attribute": lambda: Remembers(counts),
    "deque": lambda: Remembers(queues),
    "object": lambda: Remembers(ticks),
    "array": lambda: Remembers(fills),
    "buffers in place": lambda: Remembers(normalises),
    "buffer assigned": lambda: Remembers(assigns),
    "counted at the end": lambda: Remembers(uses_end, counts_at_end),
    "branch on what was counted": lambda: Remembers(branches, counts_at_end),
    "the loss before": lambda: Remembers(uses_end, keeps_loss),
    "stateful": lambda: Remembers(goes_on, keeps_loss),
    "memory bank": lambda: Remembers(None, contrasts),
    "mean in the middle": lambda: Remembers(behind=decays),
    "hidden of the batch before": lambda: Remembers(behind=goes_on_in_the_middle),
    "mean assigned in the middle": lambda: Remembers(behind=averages),
    "parts of buffers": lambda: Remembers(behind=changes_parts),
    "mean in an attribute": lambda: Remembers(behind=averages_in_place),
    "list of hidden": lambda: Remembers(behind=lists),
    "from the middle to the start": lambda: Remembers(uses_hidden, behind=keeps_hidden),
    "what a block left": lambda: Remembers(uses_what_a_block_left, blocks="left"),
    "block counts": lambda: Remembers(blocks="counter"),
    "block has state": lambda: Remembers(blocks="state"),
    "block notes calls": lambda: Remembers(blocks="global"),
    "block caches": lambda: Remembers(blocks="cached"),
}


def train(sizes: dict[str, Any] | None, without: tuple[str, ...] = ()) -> dict[str, dict[str, Tensor]]:
    """Per kind, parameters and buffers after six steps, and what was logged."""
    out = {}
    for kind, build in KINDS.items():
        if kind in without:
            continue
        torch.manual_seed(3)
        module = build().double()
        strategy: Any = "auto" if sizes is None else ThreeDStrategy(**sizes)
        trainer = trainer_for(strategy, max_epochs=2)
        data = models.vectors(24)
        trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
        found = dict(module.named_parameters()) if sizes is None else full_parameters(strategy)
        values = {n: p.detach().clone() for n, p in found.items()}
        values |= {n: b for n, b in module.named_buffers() if "." not in n}
        values |= {n: torch.as_tensor(v) for n, v in trainer.callback_metrics.items()}
        values["count"] = torch.tensor(float(module.count))
        if kind == "block notes calls":
            out["calls"] = {"": torch.tensor(len(CALLS))}
            CALLS.clear()
        out[kind] = values
    return out


def changes_twice(sizes: dict[str, Any]) -> None:
    """The same counter at the start and at the end."""
    torch.manual_seed(3)
    module = Remembers(counts, counts_at_end).double()
    trainer = trainer_for(ThreeDStrategy(**sizes), max_epochs=1)
    trainer.fit(module, DataLoader(models.vectors(24), batch_size=8))


def warned_of(sizes: dict[str, Any], kinds: list[str]) -> dict[str, list[str]]:
    """Per kind, what the warning names."""
    found: dict[str, list[str]] = {}
    for kind in kinds:
        with warnings.catch_warnings(record=True) as caught:
            trainer = trainer_for(ThreeDStrategy(**sizes), max_steps=1)
            warnings.simplefilter("always")
            trainer.fit(KINDS[kind]().double(), DataLoader(models.vectors(8), batch_size=8))
        texts = [str(w.message) for w in caught if "changes and reads" in str(w.message)]
        found[kind] = re.findall(r"'(\w+)'", texts[0].partition("(a counter")[0]) if texts else []
    return found
