"""HOW is one block called?  By its program where one is proved for this kind of call, otherwise by its own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.tensor.entries import SharedEntries
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.recorded.attempt import Attempt, Compiler, Program
from lightning_3d.tensor.recorded.compiled import warn_uncompiled
from lightning_3d.tensor.recorded.guards import device_of
from lightning_3d.tensor.recorded.recorder import current
from lightning_3d.tensor.recorded.replay import hidden_from_checkpoints
from lightning_3d.tensor.recorded.signature import Key, digest, rewrapped, signature, without_default_dtype
from lightning_3d.tensor.recorded.tape import Refused

MAX_PROGRAMS = 8
"""Kinds of calls a block gets programs for."""
MAX_KINDS = 32
"""Kinds of calls it remembers."""
MAX_REFUSALS = 3
"""Attempts to record one kind of call."""


class RecordedBlock:
    """Stands in for `block.forward` while a step runs.

    Args:
        name: Path of the block.
        block: The block.
        group: Its tensor-parallel ranks.
        compiler: Compiles the programs, if the user asked for it.

    Attributes:
        forward: The forward it stands in for.
        chosen: The kinds of calls all ranks record in this step.
        replays: How many calls have run a program.
        refusals: Kind of call -> why it was not recorded the last time, and how often.
    """

    def __init__(self, name: str, block: nn.Module, group: TensorGroup, compiler: Compiler | None = None) -> None:
        self.name, self.block, self.group, self.compiler = name, block, group, compiler
        self.forward: Callable[..., Any] = block.forward
        self.chosen: set[str] = set()
        self.replays = 0
        self.refusals: dict[str, tuple[str, int]] = {}
        self._device: torch.device | None = None
        self._programs: dict[Key, list[Program]] = {}
        self._waiting: list[tuple[Key, Program]] = []
        self._met: dict[Key, str] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.forward, memo)  # a copy of the model, made inside a step, is the user's module

    # -- calls
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.group.dry or torch._C._len_torch_function_stack() or current() is not None:
            return self.forward(*args, **kwargs)
        device = self._device = self._device or device_of(self.block)
        tensors: list[Tensor] = []
        try:
            key = signature(args, kwargs, tensors, self.group, device.type)
        except Refused as reason:
            self._refuse("", str(reason))
            return self.forward(*args, **kwargs)
        for program in self._programs_for(key):
            if program.guards.hold():
                self.replays += 1
                return program.function([where[name] for where, name in program.slots], *tensors)
        return self._by_rules(key, args, kwargs)

    def _programs_for(self, key: Key) -> Sequence[Program]:
        """The programs of a kind of call.

        A checkpoint computes again in the backward, where Lightning's default dtype (`64-true`) is not set any more; it
        has to do what the forward did.
        """
        found = self._programs.get(key, ())
        if not found and torch._C._current_graph_task_id() != -1:
            alike = without_default_dtype(key)
            return next((p for other, p in self._programs.items() if without_default_dtype(other) == alike), ())
        return found

    def _by_rules(self, key: Key, args: Any, kwargs: Any) -> Any:
        kind = self._met.get(key)
        if kind is None and len(self._met) < MAX_KINDS:
            kind = self._met[key] = digest(key)
        if kind not in self.chosen or torch._C._current_graph_task_id() != -1:  # -1: no backward is running
            return self.forward(*args, **kwargs)
        self.chosen.discard(kind)
        return self._record(key, kind, args, kwargs)

    # -- between steps
    def follow(self, forward: Callable[..., Any]) -> None:
        """Stand in for this forward; programs of another one are forgotten."""
        if forward != self.forward:
            self.forward = forward
            for found in (self._programs, self._waiting, self._met, self.refusals):
                found.clear()

    def begin(self) -> None:
        """Between two steps: use what was recorded. Never between a forward and its recomputation by a checkpoint."""
        for key, program in self._waiting:
            self._programs.setdefault(key, []).insert(0, program)
        self._waiting.clear()
        self.chosen.clear()

    def candidates(self) -> list[tuple[str, str]]:
        """Kinds of calls that were met and could be recorded: (name of the block, kind)."""
        if len(self.programs) >= MAX_PROGRAMS:
            return []
        return [
            (self.name, kind)
            for key, kind in self._met.items()
            if self.refusals.get(kind, ("", 0))[1] < MAX_REFUSALS
            and not any(p.guards.hold() for p in self._programs.get(key, ()))
        ]

    @property
    def programs(self) -> list[Program]:
        """All programs in use."""
        return [program for found in self._programs.values() for program in found]

    def _refuse(self, kind: str, why: str) -> None:
        count = self.refusals.get(kind, ("", 0))[1] + 1
        self.refusals[kind] = (why, count)
        if self.compiler is not None and count == MAX_REFUSALS and self.group.rank == 0:
            warn_uncompiled(self.name, why)

    # -- recording
    def _record(self, key: Key, kind: str, args: Any, kwargs: Any) -> Any:
        """Run the call under the rules, watched. Every rank comes here together, and passes all votes together.

        Collectives: those of the call, a few votes of 8 bytes, and those of two replays, forward and backward.
        """
        attempt = Attempt(self.name, self.block, self.group, self.compiler)
        # the graph of the call must end at its own parameters: they enter alone, in the call and in the replays
        together, self.group.shared_entries = self.group.shared_entries, SharedEntries()
        try:
            output = attempt.call(self.forward, rewrapped(args), rewrapped(kwargs))
            with self.group.comm.ledger.during("recording"), hidden_from_checkpoints():
                program = attempt.proved(output)
        finally:
            self.group.shared_entries = together
        if program is None:
            self._refuse(kind, attempt.why or "another rank could not record it")
        else:
            self._waiting.append((key, program))
        return output
