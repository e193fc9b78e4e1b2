"""Random training steps: modules of many kinds, called by random glue code. Nothing in them mixes samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pipeline.zoo import Reverse

WIDTH = 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(self.norm(x))))


class One(nn.Module):
    """One linear layer, used in one of several ways; the caller only sees tensors."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.way = nn.Linear(WIDTH, WIDTH), way
        self.last: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor | None = None, found: list[Tensor] | None = None) -> Any:
        if self.way == "changes its argument":
            return x.mul_(0.5) + self.a(x)
        h = self.a(x).tanh()
        if self.way == "dict":
            return {"h": h, "y": y}
        if self.way == "returns its argument":
            return x, h, x[:, 2:6]
        if self.way == "appends" and found is not None:
            found.append(h.mean(-1, keepdim=True))
        if self.way == "keeps":
            self.last = h
        return h


def _call(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if not isinstance(module, One):
        out: Tensor = module(x, y) if isinstance(module, (Residual, nn.GRUCell)) else module(x)
        return out
    if module.way == "dict":
        found = module(x, y=y)
        return found["h"] + found["y"]
    if module.way == "returns its argument":
        same, h, part = module(x)
        return same * 0.5 + h + F.pad(part, (0, 4))
    if module.way == "appends":
        means = [y[:, :1]]
        return module(x, found=means) + sum(means)
    if module.way == "keeps":
        h = module(x)
        assert module.last is not None
        return h + module.last * y
    changes = module.way == "changes its argument"
    return module(x * 1) if changes else module(x)


WAYS = ["changes its argument", "dict", "returns its argument", "appends", "keeps", "plain"]
KINDS: list[Callable[[], nn.Module]] = [
    Residual,
    lambda: nn.GRUCell(WIDTH, WIDTH),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
]


class Step(nn.Module):
    """A step made of a seed: a list of (operation, number, first value, second value)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        made = [draw.choice([*KINDS, *([self._one] * 5)]) for _ in range(draw.randint(3, 8))]
        self.blocks = nn.ModuleList(kind(draw.choice(WAYS)) if kind == self._one else kind() for kind in made)
        self.glue = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(2))
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.data += torch.randn_like(parameter) / 4
            parameter.requires_grad_(draw.random() > 0.08)
        self.register_buffer("scale", torch.randn(WIDTH))
        calls = [("call", number) for number in range(len(self.blocks))]
        others = [(draw.choice(OPERATIONS), draw.randrange(2)) for _ in range(draw.randint(2, 12))]
        order = [*calls, *others]
        draw.shuffle(order)
        self.program = [
            (name, k, n + 1 if draw.random() < 0.6 else draw.randrange(n + 2), draw.randrange(n + 2))
            for n, (name, k) in enumerate(order)
        ]
        self.sums = draw.random() < 0.5

    @staticmethod
    def _one(way: str = "plain") -> nn.Module:
        return One(way)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        values, penalty = list(batch), torch.zeros((), dtype=batch[0].dtype)
        for name, k, first, second in self.program:
            if name == "penalty":
                penalty = penalty + 0.1 * self.glue[k].pow(2).sum()
            values.append(self.operation(name, k, values[first], values[second], batch[0]))
        out = sum(values[2:]) if self.sums else values[-1] * values[len(values) // 2]
        assert isinstance(out, Tensor)
        return out.pow(2).mean() + 0.3 * out.mean() + penalty

    def operation(self, name: str, k: int, p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        block, weight = self.blocks[k % len(self.blocks)], self.glue[k % 2]
        if name == "call":
            return _call(block, p, q)
        if name in ("checkpoint", "checkpoint of a closure"):
            if name == "checkpoint":
                return checkpoint(_call, block, p, q, use_reentrant=False)
            return checkpoint(lambda: _call(block, p, q) * q, use_reentrant=False)
        if name == "no_grad":
            with torch.no_grad():
                return p[:, :1] * _call(block, p, q)
        if name in IN_PLACE:
            t = {"plain": x * (k + 1.0), "value": p * 1.5}[IN_PLACE[name]]
            _change(name, t, p if IN_PLACE[name] == "plain" else q)
            return checkpoint(lambda t: (t @ weight).tanh() * t, t, use_reentrant=False) if k else t
        return PURE[name](p, q, weight, self.scale)


IN_PLACE = {
    "add_": "value", "set part": "value", "change part": "value", "clamp_": "value", "plain add_": "plain",
    "plain set part": "plain", "plain *= part": "plain",
}  # fmt: skip


def _change(name: str, t: Tensor, y: Tensor) -> None:
    if name.endswith("add_"):
        t.add_(y)
    elif name.endswith("set part"):
        t[:, :4] = y[:, 4:] * 2
    elif name == "change part":
        t[:, 2:6].mul_(y[:, :1])
    elif name == "plain *= part":
        t[:, 2:6] *= y[:, :1]
    else:
        t.clamp_(-1, 1)


PURE: dict[str, Callable[[Tensor, Tensor, Tensor, Any], Tensor]] = {
    "add": lambda p, q, w, s: p + q,
    "multiply": lambda p, q, w, s: p * q.tanh(),
    "linear": lambda p, q, w, s: F.linear(p, w),
    "product": lambda p, q, w, s: p @ w,
    "norm of a weight": lambda p, q, w, s: p * w.norm(),
    "detach": lambda p, q, w, s: p.detach() + q,
    "view": lambda p, q, w, s: p.view(-1, 2, 4).transpose(1, 2).reshape(-1, WIDTH),
    "cat": lambda p, q, w, s: torch.cat([p, q], -1)[..., 4:12],
    "where": lambda p, q, w, s: torch.where(p > 0, p, q),
    "outer": lambda p, q, w, s: (p[:, :, None] * q[:, None, :]).mean(-1),
    "buffer": lambda p, q, w, s: p * s,
    "custom function": lambda p, q, w, s: Reverse.apply(p),
    "penalty": lambda p, q, w, s: p,
}
OPERATIONS = ["checkpoint", "checkpoint of a closure", "no_grad", *IN_PLACE, *PURE]
