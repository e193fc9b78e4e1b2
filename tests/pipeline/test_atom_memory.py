"""What equal blocks did is remembered: the trace is the same as without memory, and other blocks are not confused."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.pipeline import Trace, find_atoms, trace
from lightning_3d.pipeline.atom_memory import AtomMemory
from lightning_3d.pipeline.probe_atom import AtomExecution
from lightning_3d.probe import call_step
from tests.pipeline.zoo import GPT, VOCAB, Lift, batch_of, build, llama


class Window(nn.Module):
    """A block whose attribute, or whose place, decides what it does."""

    def __init__(self, place: int, wide: bool) -> None:
        super().__init__()
        self.place, self.wide = place, wide
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.wide:
            y = torch.cat([y, y], 1)[:, : x.shape[1]].contiguous()
        return F.dropout(y, 0.5) if self.place % 3 == 2 else y + x


class Windows(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, 16), nn.ModuleList(Window(i, i % 2 == 0) for i in range(9))
        self.head = nn.Linear(16, VOCAB)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch["tokens"])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["tokens"].flatten())


def _same(one: Trace, other: Trace) -> None:
    assert one.plain() == other.plain()
    for a, b in zip(one.events, other.events, strict=True):
        assert (a.flops, a.moved, a.random, a.single, a.holders) == (b.flops, b.moved, b.random, b.single, b.holders)
        assert [m for m, *_ in a.hooked] == [m for m, *_ in b.hooked]


def _other_length(batch: Any, by: int) -> Any:
    return {k: torch.cat([x, x[:, :by]], 1) for k, x in batch.items()}


@pytest.mark.parametrize(("make", "name", "probed"), [(GPT, "gpt", 5), (llama, "llama", 4), (Windows, "gpt", 6)])
def test_another_length_probes_one_block_of_a_kind(
    make: Any, name: str, probed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build(make)
    atoms = find_atoms(module, 4)
    calls: list[str] = []
    execute = AtomExecution.execute
    monkeypatch.setattr(AtomExecution, "execute", lambda self, n: (calls.append(n), execute(self, n))[1])
    memory, batch = AtomMemory(), batch_of(name, 4)

    def record(batch: Any, memory: AtomMemory | None) -> Trace:
        step = lambda: call_step(module, "training_step", batch, 0)  # noqa: E731
        return trace(module, atoms, step, forward_context=Lift, memory=memory)

    record(batch, memory)
    assert len(calls) >= len(atoms)
    memory.learn(atoms)
    for by in (1, 3):
        longer = _other_length(batch, by)
        calls.clear()
        remembered = record(longer, memory)
        assert len(calls) <= probed, calls
        _same(remembered, record(longer, None))
        calls.clear()
        _same(record(longer, memory), remembered)
        assert not calls
