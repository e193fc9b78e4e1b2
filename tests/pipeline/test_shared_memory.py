"""Which tensors have elements in common, and buffers that a step changes through a part of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d.pipeline import simulate
from lightning_3d.pipeline.shared_memory import SharedMemory, overlap


def test_overlap() -> None:
    whole = torch.arange(24.0).view(4, 6)
    left, right, rows = whole[:, :3], whole[:, 3:], whole[1:3]
    assert overlap(whole, left)
    assert overlap(left, rows)
    assert not overlap(left, right)  # their ranges of memory do overlap
    assert not overlap(whole[:2], whole[2:])
    assert not overlap(whole, whole.clone())
    assert not overlap(whole[:0], whole)
    assert overlap(whole[0, :1].expand(5, 6), left)
    assert overlap(whole.view(torch.int32), left)
    assert not overlap(whole[::2, 0], whole[1::2, 0])


def test_names_of_parts() -> None:
    first, both = torch.zeros(4, 2), torch.zeros(10)
    shared = SharedMemory({"first": first, "a": both[:5], "b": both[5:]})
    assert shared.names(first) == shared.names(first[1]) == shared.names(first.T) == ["first"]
    assert shared.names(both[4:6]) == ["a", "b"]
    assert shared.names(first.clone()) == shared.names("first") == []


class Memory(L.LightningModule):
    """The last part of the step puts values of the model into a buffer, or a plain attribute."""

    def __init__(self, way: str, plain: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("kept", torch.zeros(3, 8, dtype=torch.float64))
        self.attribute = torch.zeros(3, 8, dtype=torch.float64)
        self.way, self.plain = way, plain

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        kept = self.attribute if self.plain else self.kept
        h = torch.tanh(self.b(torch.tanh(self.a(batch)))) + 0.2 * kept[1]
        with torch.no_grad():
            v = h.detach().mean(0)
            if self.way == "item":
                kept[1] = v
            elif self.way == "view":
                kept[1].copy_(v)
            elif self.way == "data":
                kept.data.lerp_(v.expand(3, -1), 0.3)
            elif self.way == "columns":
                kept[:, 2:5].add_(v[:3])
            else:
                kept.view(-1)[4:12].copy_(v)
        return self.c(h).pow(2).mean()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("way", ["item", "view", "data", "columns", "flat"])
def test_a_step_that_changes_a_part_says_so(way: str, plain: bool) -> None:
    """Silently wrong before: all stages but the last went on with the buffer as it was before."""
    torch.manual_seed(0)
    module: Any = Memory(way, plain).double()
    cut = simulate(module, 2, torch.randn(4, 4).double(), split=["c"])
    name = "attribute" if plain else "kept"
    assert cut.partitions[0].buffers == {name: 0}, "the first stage has the values that are put into it"
