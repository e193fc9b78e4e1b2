"""HOW are values made again that nobody kept?  By doing once more what was done to a tensor's memory, in order.

A cell is the memory of one tensor that has no values yet, and of all its views. It remembers what made it (a factory,
or an operation on others) and every write into it. What a write replaces without reading it (`normal_` after
`uniform_`) is not done again. Random operations come with the state that their generator had, so they give the same
numbers whenever and however often they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.deferred.kept import Kept, checksum_of

OVERWRITES = frozenset(
    [
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    ]
)
"""In-place operations that do not read what they write to."""
WITHOUT_VALUES = frozenset(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"))
"""Operations that give memory as it was left."""
_ALL_ELEMENTS = frozenset(("detach", "alias", "view", "t", "transpose", "permute", "unsqueeze", "squeeze"))
"""Views that show every element."""
_PATIENCE = 5_000
"""Writes into one memory that are done again, before its values stay."""


@dataclass(frozen=True)
class Call:
    """An operation, with the operands that it had.

    Args:
        func: The operation.
        args, kwargs: Its arguments; in place of tensors without values `Window`s, of other tensors `Kept`s.
        draws_on: The device whose random numbers it draws, or None.
        state: What their generator's state was before.
        part: Which of several results is meant.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    draws_on: torch.device | None = None
    state: Tensor | None = None
    part: int | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """The default type was this; it decides what `integers / 2` is."""

    def run(self, made: Callable[[Cell, int | None], Tensor], cell: Cell | None = None, memory: Any = None) -> Any:
        """Do it.

        Args:
            made: Gives the memory of other cells, as it was after a number of writes.
            cell: A cell that is being made; windows on it become views of `memory`.
            memory: What it holds so far.
        """

        def real(x: Any) -> Any:
            if isinstance(x, Kept):
                return x.value
            if not isinstance(x, Window):
                return x
            return x.of(memory) if memory is not None and x.cell is cell else x.of(made(x.cell, x.version))

        args, kwargs = tree_map(real, (self.args, dict(self.kwargs)))
        with self._as_it_was(kwargs):
            return self.func(*args, **kwargs)

    @contextmanager
    def _as_it_was(self, kwargs: dict[str, Any]) -> Iterator[None]:
        """The default type and the random state, which go back afterwards to what they are now."""
        type_now = torch.get_default_dtype()
        generator = None
        if self.draws_on is not None:
            assert self.state is not None
            if kwargs.get("generator") is not None:
                kwargs["generator"] = torch.Generator(self.draws_on).set_state(self.state)
            else:
                generator = default_generator(self.draws_on)
                state_now = generator.get_state()
                generator.set_state(self.state)
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(type_now)
            if generator is not None:
                generator.set_state(state_now)

    def operands(self) -> list[Window]:
        """The views of memory without values that it reads or writes."""
        return [x for x in tree_leaves((self.args, dict(self.kwargs))) if isinstance(x, Window)]

    def kept(self) -> list[Kept]:
        """The tensors with values that it reads."""
        return [x for x in tree_leaves((self.args, dict(self.kwargs))) if isinstance(x, Kept)]

    def name(self) -> str:
        """Of the operation, without its overload."""
        return self.func.__name__.split(".")[0]


@dataclass(frozen=True)
class Window:
    """A view of a cell.

    Args:
        cell: Whose memory it shows.
        steps: View operations that lead from all of it to the view; each takes the view before as first argument.
        version: How many writes into the cell count, or None for all.
    """

    cell: Cell
    steps: tuple[Call, ...] = ()
    version: int | None = None

    def of(self, memory: Tensor) -> Tensor:
        """The same view of the cell's real memory."""
        for step in self.steps:
            views = step.func(memory, *step.args, **step.kwargs)
            memory = views if step.part is None else views[step.part]
        return memory

    def at_present(self) -> Window:
        """What it shows at this moment, whatever is written later."""
        return Window(self.cell, self.steps, len(self.cell.writes))


@dataclass(eq=False)
class Cell:
    """The memory of a tensor without values.

    Args:
        origin: What made it.
        like: A tensor on the meta device of its form.
        device: Where it will be.

    Attributes:
        writes: What was written into it since.
        solid: Its real memory, once something needed it to stay.
    """

    origin: Call | None
    like: Tensor
    device: torch.device
    writes: list[Call] = field(default_factory=list)
    solid: Tensor | None = None
    stays: bool = False
    done_again: int = 0
    depth: int = 0
    """Cells are made of cells that are made of cells..."""

    def make(self, version: int | None = None) -> Tensor:
        """The memory with its values, new at every call (or the one that stays, if there is one and it is meant).

        Args:
            version: Count this many writes; None: all.
        """
        if self.solid is not None and version is None:
            return self.solid
        from lightning_3d.deferred.making import Making

        memory = Making(self, len(self.writes) if version is None else version).memory
        self.done_again += len(self.writes)
        if self.done_again > _PATIENCE and version is None:  # row by row, with a look at each: values must stay
            self.solid, self.stays = memory, True
        return memory

    def calls(self, version: int) -> tuple[Call | None, list[Call]]:
        """What has to be done to make it: its origin (None if that is overwritten), and the writes that count."""
        writes = self.writes[:version]
        covering = [i for i, call in enumerate(writes) if self._is_covered_by(call)]
        return (None, writes[covering[-1] :]) if covering else (self.origin, writes)

    def solidify(self) -> None:
        """From now on the values stay: for what cannot be done later."""
        if self.solid is None:
            self.solid = self.make()
        self.stays = True

    def lend(self) -> Tensor:
        """The values, for somebody who may write to them where we do not see it; `returned` must be called after it."""
        if self.solid is None:
            self.solid = self.make()
        return self.solid

    def returned(self, checksum: int) -> None:
        """What was lent is in nobody's hands any more. If it is what it was, it need not stay."""
        if not self.stays and self.solid is not None:
            if checksum_of(self.solid) == checksum:
                self.solid = None
            else:
                self.stays = True

    @property
    def is_unwritten(self) -> bool:
        """Nobody has written into it, nor into what it was converted from."""
        if self.writes or self.solid is not None or self.origin is None:
            return False
        made_of = self.origin.operands()
        if self.origin.name() == "_to_copy" and made_of:
            return all(window.cell.is_unwritten for window in made_of)
        return self.origin.name() in WITHOUT_VALUES

    def is_overwritten(self, since: int) -> bool:
        """Whether all of it was written anew after the first `since` writes."""
        return any(map(self._is_covered_by, self.writes[since:]))

    def _is_covered_by(self, call: Call) -> bool:
        """Whether a write replaces all of the memory without looking at it."""
        target = call.args[0] if call.args else None
        return (
            call.name() in OVERWRITES
            and isinstance(target, Window)
            and target.cell is self
            and all(step.name() in _ALL_ELEMENTS for step in target.steps)
            and not any(isinstance(x, Window) and x.cell is self for x in tree_leaves(call.args[1:]))
        )


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operations on a device draw from."""
    if device.type == "cpu":
        return torch.default_generator
    index = device.index if device.index is not None else torch.get_device_module(device).current_device()
    return torch.get_device_module(device).default_generators[index]
