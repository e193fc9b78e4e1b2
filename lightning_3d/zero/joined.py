"""WHO steps a matrix that tensor parallelism divides, if its optimizer looks at whole ones?  One of its ranks.

Muon, Adafactor and their like compute something else from every part of a matrix. So before such an optimizer steps,
the parts of a divided parameter and of its gradient travel to one of the ranks that hold them (dealt by size), which
steps on the whole; then every rank gets its new part. For the time of the step what the optimizer holds has the data of
the whole, and what other ranks step is not in its groups (some optimizers insist on a gradient of everything in there).
So an optimizer's state for such a parameter is whole, too, and on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.comm import Communicator
from lightning_3d.tensor.placement import Placement
from lightning_3d.zero.arranged import Arranged
from lightning_3d.zero.piece import Piece


@dataclass
class _Part:
    """What one rank holds of a parameter: its values and gradient between steps."""

    held: nn.Parameter
    placement: Placement
    owner: int
    values: Tensor
    gradient: Tensor | None


class Joined(Arranged):
    """The parameters of one optimizer, as they are for its steps: whole, or not there.

    Args:
        optimizer: It looks at whole matrices.
        name_of: What stands in its groups -> the parameter's name.
        placements: Name -> how it is cut over tp.
        axis: The tensor-parallel axis.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name_of: Callable[[nn.Parameter], str],
        placements: Mapping[str, Placement],
        axis: Communicator,
    ) -> None:
        self._optimizer, self._name_of, self._placements, self._axis = optimizer, name_of, placements, axis
        self._owners: dict[str, int] = {}
        self._load = [0] * axis.size
        self._parts: list[_Part] = []
        self._groups: list[list[nn.Parameter]] = []  # what is in them between steps

    def steps(self, name: str) -> bool | None:
        """Whether this rank steps a parameter (of which it has a part); None: it is not divided."""
        return None if name not in self._placements else self._owners.get(name) == self._axis.rank

    # -- who
    def deal(self) -> None:
        """Give divided parameters that are new in the groups to ranks, and state made before to who needs it.

        Collectives: one all-gather over tp of what such state says of each element, if there is any.
        """
        new = [(held, name) for held, name in self._divided() if name not in self._owners]
        for held, name in sorted(new, key=lambda each: (-each[0].numel(), each[1])):
            # of ranks that hold copies the first, which also writes it into checkpoints
            able = range(0, self._axis.size, self._placements[name].copies)
            owner = min(able, key=lambda rank: self._load[rank])
            self._owners[name] = owner
            self._load[owner] += held.numel()
            self._join_state(held, name)

    def _divided(self) -> Iterator[tuple[nn.Parameter, str]]:
        """What the groups hold of divided parameters that this replica steps; the same on all ranks of the axis."""
        for group in self._optimizer.param_groups:
            for held in group["params"]:
                name = self._name_of(held)
                if name in self._placements and held.numel():
                    yield held, name

    def _join_state(self, held: nn.Parameter, name: str) -> None:
        state = self._optimizer.state.pop(held, None)
        if state is None:
            return
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == held.shape:
                state[key] = self._placements[name].to_global(self._axis.all_gather(value), self._axis.size)
        if self._owners[name] == self._axis.rank:
            self._optimizer.state[held] = state

    # -- when
    def join(self) -> None:
        """What the groups hold becomes whole, with its gradient, or leaves them.

        Collectives: per type of the values one all-to-all over tp: the rank's part of all values and gradients.
        """
        self.restore()
        self.deal()  # groups that were added since the last step
        parts = [
            _Part(held, self._placements[name], self._owners[name], held.data, held.grad)
            for held, name in self._divided()
            if held.requires_grad
        ]
        for alike in _alike(parts):
            of_rank = [[t for p in alike if p.owner == rank for t in _values_and_gradient(p)] for rank in self._ranks]
            sent = [_flat(tensors, alike) for tensors in of_rank]
            mine = [p for p in alike if p.owner == self._axis.rank]
            received = self._axis.all_to_all(sent, [sent[self._axis.rank].numel()] * self._axis.size)
            offset = 0
            for part in mine:
                values, offset = self._whole(part, received, offset)
                gradient, offset = self._whole(part, received, offset)
                part.held.grad = None
                part.held.data = values
                part.held.grad = gradient if part.gradient is not None else None
        self._parts = parts
        elsewhere = {id(part.held) for part in parts if part.owner != self._axis.rank}
        for group in self._optimizer.param_groups:
            self._groups.append(list(group["params"]))
            group["params"][:] = [p for p in group["params"] if id(p) not in elsewhere and not _is_dealt(p)]

    def part(self) -> None:
        """The groups hold parts again, with the values after the step.

        Collectives: per type of the values one all-to-all over tp: the rank's part of all values.
        """
        parts = self._parts
        for alike in _alike(parts):
            mine = [p for p in alike if p.owner == self._axis.rank]
            cut = [[p.placement.to_local(p.held.data, r, self._axis.size) for p in mine] for r in self._ranks]
            sent = [_flat(tensors, alike) for tensors in cut]
            sizes = [sum(p.values.numel() for p in alike if p.owner == r) for r in self._ranks]
            received = self._axis.all_to_all(sent, sizes)
            for rank, flat in enumerate(received):
                theirs = [p for p in alike if p.owner == rank]
                for part, new in zip(theirs, flat.split([p.values.numel() for p in theirs]), strict=True):
                    part.values.copy_(new.view(part.values.shape))
        self.restore()

    def restore(self) -> None:
        """The groups hold parts again, with the values before the step (it failed, or they were written)."""
        for part in self._parts:
            part.held.grad = None
            part.held.data = part.values
            part.held.grad = part.gradient
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=False):
            group["params"][:] = before
        self._parts, self._groups = [], []

    @property
    def _ranks(self) -> range:
        return range(self._axis.size)

    def _whole(self, part: _Part, received: Sequence[Tensor], offset: int) -> tuple[Tensor, int]:
        """A tensor of the parameter's whole shape from everybody's parts, and where the next one begins."""
        end = offset + part.values.numel()
        parts = [flat[offset:end].view(part.values.shape) for flat in received]
        return part.placement.to_global(parts, self._axis.size).contiguous(), end


def _is_dealt(held: nn.Parameter) -> bool:
    """Another replica steps it."""
    return isinstance(held, Piece) and not held.slot.owned and held.slot.numel > 0


def _values_and_gradient(part: _Part) -> tuple[Tensor, Tensor]:
    """Of a parameter without gradient zeros travel, so that sizes do not depend on the batch."""
    return part.values, torch.zeros_like(part.values) if part.gradient is None else part.gradient


def _alike(parts: Iterable[_Part]) -> list[list[_Part]]:
    """By what can be sent together."""
    kinds: dict[Any, list[_Part]] = {}
    for part in parts:
        kinds.setdefault((part.values.dtype, part.values.device), []).append(part)
    return list(kinds.values())


def _flat(tensors: Iterable[Tensor], alike: Sequence[_Part]) -> Tensor:
    flat = [t.reshape(-1) for t in tensors]
    return torch.cat(flat) if flat else alike[0].values.new_empty(0)
