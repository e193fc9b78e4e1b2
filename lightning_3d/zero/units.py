"""WHEN has a part of the model its values (stage 3)?  Units are gathered for their use, and released after it.

A unit is a block of the model, or a large layer outside of blocks; what is left is the root. In a forward a unit is
gathered when it is entered, while the one before it runs (prefetch), and released when it is left; in the backward it
is gathered when autograd needs a weight of it, and released when another one is needed and its gradients are on their
way.

Gathers are collective, so all replicas must begin the same ones in the same order, also where a replica's batch takes
another path. Hence a *sequence* is agreed on: in a forward all units, in the order of the forward before; in a backward
those that any replica needs, backwards. A rank that needs a unit gathers all before it in the sequence; at the end of a
pass the rest follows. What is needed out of turn (a block that runs twice) is agreed on at that moment.

A rank that waits for a gather must not hold up a reduction another one waits for, so before it waits it reduces the
gradients of all units that the backward has passed, zeros where its batch gave none. (Autograd runs what was computed
later first: when it needs a unit, all that ran after that unit is done.)

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.comm import Communicator
from lightning_3d.errors import ConfigurationError
from lightning_3d.wrapping import wrapped_forwards
from lightning_3d.zero.kept import Kept
from lightning_3d.zero.released import refused
from lightning_3d.zero.storage import Storage
from lightning_3d.zero.unit import Unit, merged

_BACKWARD, _COLLECTIVE, _UNIT = range(3)
"""Why replicas meet; `_UNIT` and more: this unit is needed out of turn."""


class Units:
    """The units of a model, and which of them have their values.

    Args:
        modules: Name -> module of every unit but the root; empty: the whole model is gathered for every step.
        names: Names of the parameters of each, in the same order.
        data: The data-parallel axis, as a group of its own: reductions are under way at the same time.
        control: The same axis on the CPU.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        names: Iterable[Iterable[str]],
        data: Communicator,
        control: Communicator,
    ) -> None:
        self.data, self._control = data, control
        self.root = Unit("", 0)
        self.units = [self.root, *(Unit(name, i) for i, name in enumerate(modules, 1))]
        self._modules = list(zip(modules.values(), self.units[1:], strict=True))
        self._of_name = {n: unit for unit, own in zip(self.units[1:], names, strict=True) for n in own}
        self._forward = list(self.units)  # the sequence of forwards
        self._sequence: list[Unit] = []
        self._several: Set[Unit] = frozenset()  # what of it is used in several places of a step
        self._here: Set[Unit] = frozenset()  # what of it is whole on all replicas, so that nobody gathers it
        self._next = 0
        self._met: list[Unit] = []  # in the order they were needed in this forward
        self.is_open = self._backward = self._training = self._shown = False
        self._used: list[Unit] = []  # in the backward under way, and not released yet
        self._last: Unit | None = None  # what it needed last
        self._passed: Callable[[int], None] = lambda _: None

    def unit_of(self, parameter: str) -> Unit:
        """The unit a parameter belongs to."""
        return self._of_name.get(parameter, self.root)

    def add(self, unit: Unit, storage: Storage) -> None:
        """Divide a storage: from now on it has its values only while its unit is in use."""
        unit.storages.append(storage)
        storage.release(partial(self._read, unit))

    def remove(self, storage: Storage) -> None:
        """It is no part of a unit any more."""
        for unit in self.units:
            if storage in unit.storages:
                unit.storages.remove(storage)

    @contextmanager
    def all_whole(self) -> Iterator[None]:
        """All parameters have their values while this is open. Collective; changes must be the same on all ranks."""
        inside = self.is_open or self._shown
        self.before_collective()
        for unit in self.units:
            unit.stays = self.is_open
            self._gather(unit)
            unit.wait()
        shown, self._shown = self._shown, True
        try:
            yield
        finally:
            self._shown = shown
            for unit in self.units if not inside else ():
                self._release(unit)

    # -- passes
    def begin(self, training: bool) -> None:
        """Before a step."""
        self.end(close=True)
        self.is_open, self._training = True, training
        self._pass(self._forward)
        self.root.stays = True
        self.need(self.root)

    def begin_backward(self, passed: Callable[[int], None]) -> list[list[Storage]]:
        """Before autograd runs. Collective: the rest of the forward's gathers, and one exchange of flags.

        Args:
            passed: Told how many units of the sequence the backward has passed.

        Returns:
            The storages of the sequence's units, whose gradients come in this order. (Not those of units that are used
            in several places.)
        """
        self._finish_sequence()
        order = [u for u in self._met if u is not self.root]
        moved = [u for u in self._forward if u in self._met and u is not self.root] != order
        flags = [flag for u in self.units for flag in (u.saved, u.calls > 1, u.stays, not u.is_whole)]
        *values, order_differs = self._meet(_BACKWARD, [*flags, moved])
        several: set[Unit] = set()
        here: set[Unit] = set()
        for unit, *flags in zip(self.units, values[::4], values[1::4], values[2::4], values[3::4], strict=True):
            unit.saved, unit.again, unit.stays = flags[:3]
            unit.waiting = {s for s in unit.storages if any(slot.parameter.requires_grad for slot in s.slots)}
            if unit.again or unit.stays:
                several.add(unit)
            if not flags[3]:
                here.add(unit)
        if order_differs:
            orders = self._control.all_gather_object([u.index for u in order])
            indices, contradicted = merged([u.index for u in self._forward], orders)
            self._forward = [self.units[i] for i in indices]
            several |= {self.units[i] for i in contradicted}
        self._backward, self._passed = True, passed
        self._pass([u for u in reversed(self._forward) if u.saved and u is not self.root], here)
        self._several = several
        return [[] if u in several else list(u.storages) for u in self._sequence]

    def end(self, close: bool = False) -> None:
        """After a pass: units are released. Collective: the rest of the pass's gathers.

        Args:
            close: The step is over. Otherwise autograd may still keep views of what was read outside of units.
        """
        if self.is_open:
            self._finish_sequence()
            for unit in self.units:
                unit.waiting.clear()
                unit.depth = unit.calls = 0
                if close:
                    unit.saved = unit.stays = False
                if not unit.stays:
                    self._release(unit)
            self._met.clear()
            self._used.clear()
            self._backward, self._passed = False, lambda _: None
            self._pass(self._forward)
        self.is_open = self.is_open and not close

    def refresh(self) -> None:
        """After an optimizer's step in the middle of a training step: new values where there are values. Collective."""
        with self.data.ledger.during("gather"):
            for unit in self.units if self.is_open else ():
                if unit.stays:
                    unit.start()
                    unit.wait()

    def _pass(self, sequence: list[Unit], here: Set[Unit] = frozenset()) -> None:
        self._sequence, self._here, self._next, self._last = sequence, here, 0, None

    def _finish_sequence(self) -> None:
        if not (self._backward or self._met):
            return  # nothing was needed since the last pass
        for index, unit in enumerate(self._sequence[self._next :], self._next):
            self._start(unit)
            self._passed(index)
            self._release_coming()
        self._next = len(self._sequence)
        self._passed(self._next)
        self._release_coming()

    def _release_coming(self) -> None:
        """Give back what has been gathered for others: this rank's batch took another path."""
        for unit in [u for u in self.units if u.coming]:
            if unit.stays:
                unit.wait()
            else:
                self._release(unit)

    def before_collective(self) -> None:
        """Before a collective of user code in a step: nobody waits in it for a replica that waits for this one.

        All gathers that are left of the pass are begun, and the replicas meet. Collective, as what follows.
        """
        if self.is_open:
            self._start_rest()
            self._meet(_COLLECTIVE)

    def _start_rest(self) -> None:
        rest, self._next = self._sequence[self._next :], len(self._sequence)
        for unit in rest:
            self._start(unit)

    # -- needs
    def need(self, unit: Unit, passes: bool = True) -> None:
        """Gather a unit, and begin with the next of the sequence.

        Args:
            unit: The unit.
            passes: In a backward: autograd has come to it. Otherwise a forward runs again, in another order.
        """
        if not self._backward and unit not in self._met:
            self._met.append(unit)
        if unit is self._last and unit.is_whole:
            return
        self._last = unit if passes else None
        if unit in self._sequence[self._next :]:
            until = self._sequence.index(unit, self._next) + 1
            for other in self._sequence[self._next : until]:
                self._start(other)
            self._next = until
        if not unit.is_whole and not unit.coming:
            self._start_rest()
            self._meet(_UNIT + unit.index)
            unit.stays = True
            self._gather(unit)
        if self._backward and passes:
            self._move_on(unit)
        for other in self._sequence[self._next : self._next + 1]:  # while this one is used
            self._start(other)
        unit.wait()

    def _start(self, unit: Unit) -> None:
        if unit not in self._here:
            self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        for storage in unit.storages:
            if storage.is_whole and not unit.coming:  # but not on every replica
                storage.reclaim()
        with self.data.ledger.during("gather"):
            unit.start()

    def _move_on(self, unit: Unit) -> None:
        """The backward has come to a unit, so it is done with those that ran after it."""
        if unit in self._sequence and unit not in self._several:
            self._passed(self._sequence.index(unit))
        for other in [u for u in self._used if u is not unit and u.is_done]:
            self._used.remove(other)
            self._release(other)
        if unit not in self._used:
            self._used.append(unit)

    def _meet(self, reason: int, flags: Sequence[bool] = ()) -> list[bool]:
        """What any replica says. All of them meet for one reason: a backward, a collective, a unit out of turn.

        Collectives: one all-reduce of a few bytes per unit over `control`.

        Raises:
            ConfigurationError: They do not; raised on all.
        """
        head = [index == reason for index in range(_UNIT + len(self.units))]
        said = torch.zeros(len(head) + 4 * len(self.units) + 1, dtype=torch.uint8)
        said[: len(head) + len(flags)] = torch.tensor([*head, *flags], dtype=torch.uint8)
        if self.data.size > 1:
            self._control.all_reduce(said, "max")
        heard = [bool(flag) for flag in said.tolist()]
        if sum(heard[: len(head)]) > 1:
            wanted = ", ".join(u.name or "the rest" for u in self.units if heard[_UNIT + u.index])
            raise ConfigurationError(
                f"with zero_stage=3 the replicas gather parameters together, but {wanted} is needed once more in one "
                "step by some of them only. A block that runs more than once in a step must do so on all replicas "
                "alike. Use zero_stage=2."
            )
        return heard[len(head) :]

    def _read(self, unit: Unit, name: str, what: str) -> None:
        """Somebody reads a parameter that has no values now, outside of its unit's forward."""
        if not self.is_open:
            raise refused(name, what)
        if not self._backward:
            unit.stays = unit.saved = True  # autograd may keep views of it that we do not see
        self.need(unit)

    # -- releases
    def launched(self, storage: Storage) -> None:
        """The gradients of a storage are on their way.

        The unit is released when the backward comes to another one: until then it may read what it computed again.
        """
        for unit in self.units:
            unit.waiting.discard(storage)

    def _release(self, unit: Unit) -> None:
        unit.wait()
        for storage in unit.storages:
            if storage.is_whole:
                storage.release(partial(self._read, unit))

    # -- forwards
    @contextmanager
    def active(self) -> Iterator[None]:
        """Units are gathered when their forwards begin, and released when they end, while this is open."""
        if not self.is_open:
            yield
            return
        with wrapped_forwards((module, partial(self._gathered, module, unit)) for module, unit in self._modules):
            yield

    def _gathered(self, module: nn.Module, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.need(unit, passes=False)
            unit.depth += 1
            unit.calls += not self._backward
            kept = Kept(unit, module, self.need)
            try:
                if torch._C._functorch.peek_interpreter_stack() is not None:  # it knows no hooks on what is saved
                    unit.stays = unit.saved = True
                    return forward(*args, **kwargs)
                if not torch.is_grad_enabled():
                    return forward(*args, **kwargs)
                with saved_tensors_hooks(kept.pack, kept.unpack):
                    out = forward(*args, **kwargs)
                unit.saved = unit.saved or kept.may_be_elsewhere(out)
                return out
            finally:
                unit.depth -= 1
                self._leave(unit)

        # a compiler that follows the whole step goes on inside
        disabled: Callable[..., Any] = torch.compiler.disable(call, recursive=False)
        return disabled

    def _leave(self, unit: Unit) -> None:
        if self._backward or unit.depth or unit.stays or unit.again:
            return
        if self._training and torch.is_grad_enabled() and unit is self._forward[-1]:
            return  # the first that the backward needs
        self._release(unit)
