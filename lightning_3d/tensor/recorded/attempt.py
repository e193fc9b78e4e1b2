"""HOW is one call recorded and proved?  Part by part; after each the ranks vote, and all go on, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.recorded.agreement import all_agree
from lightning_3d.tensor.recorded.compiled import Fallback, assembled, translated, warn_uncompiled
from lightning_3d.tensor.recorded.guards import Guards, device_of, slots_of
from lightning_3d.tensor.recorded.observe import observed
from lightning_3d.tensor.recorded.peephole import simplified
from lightning_3d.tensor.recorded.recorder import Recorder
from lightning_3d.tensor.recorded.replay import (
    Moment,
    Replay,
    close,
    compare,
    compare_gradients,
    compare_values,
    graph,
    has_room,
    random_state,
    tensors_of,
)
from lightning_3d.tensor.recorded.signature import signature
from lightning_3d.tensor.recorded.source import Function, function_of
from lightning_3d.tensor.recorded.tape import Refused, Tape
from lightning_3d.tensor.recorded.watch import PythonCode

Compiler = Callable[[Function], Function]
"""`torch.compile` as the user called it."""


@dataclass
class Program:
    """A proved program of one kind of call."""

    function: Function
    slots: list[tuple[dict[str, Any], str]]
    guards: Guards
    tape: Tape


class Attempt:
    """One recorded call and its proof."""

    def __init__(self, name: str, block: nn.Module, group: TensorGroup, compiler: Compiler | None) -> None:
        self.name, self.block, self.group, self.compiler = name, block, group, compiler
        self.device = device_of(block)
        self.why: str | None = None
        self._guards: Guards | None = None
        self._recorder: Recorder | None = None

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call itself; whatever else goes wrong is only noted."""
        guards = self._guards = self._try(lambda: Guards(self.block, forward))
        if guards is not None and guards.hooked:
            self.why = "its submodules have hooks"
        elif not PythonCode.available():
            self.why = "a Python profiler is running"
        if self.why is not None:
            return forward(*args, **kwargs)
        recorder = self._try(lambda: self._prepared(args, kwargs))
        if recorder is None:
            return forward(*args, **kwargs)
        self._recorder = recorder
        assert guards is not None
        self._python = PythonCode(guards.enter)
        with self._python, observed(recorder, self.group):
            return forward(*args, **kwargs)

    def _prepared(self, args: Any, kwargs: Any) -> Recorder:
        tensors: list[Tensor] = []
        signature(args, kwargs, tensors, self.group, self.device.type)
        slots = slots_of(self.block)
        recorder = Recorder(self.device.type, slots)
        for tensor in tensors:
            recorder.input(tensor)
        self._moment = Moment(tensors, slots, self.device)
        return recorder

    def proved(self, output: Any) -> Program | None:
        """The program, if it is the call; the same answer on all ranks.

        Collectives: see `RecordedBlock._record`.
        """
        tape = self._try(lambda: self._tape(output))
        if not self._vote("recorded", tape.digest() if tape is not None else ""):
            return None
        assert tape is not None
        assert self._recorder is not None
        recorded = self._recorded(tape, output)
        exact = self._try(lambda: self._moment.again(function_of(tape), tape.slots))
        if not self._vote("replayed", "") or exact is None:
            return None
        self._try(lambda: compare(recorded, exact))
        gradients = self._try(exact.gradients)
        if not self._vote("equal", ""):
            return None
        function = self._compiled(tape, exact, gradients) if self.compiler is not None else None
        function = function or self._checked(lambda: function_of(simplified(tape)), tape, exact, gradients)
        if function is None:
            return None
        assert self._guards is not None
        return Program(function, [(s.where, s.key) for s in tape.slots], self._guards, tape)

    def _compiled(self, tape: Tape, exact: Replay, gradients: Any) -> Function | None:
        """The compiled program, or None: with a warning, and as if nobody had asked for it."""
        found = self._try(lambda: translated(tape))
        plain = None
        if self._vote("translated", "") and found is not None:
            flat, output = found
            inner = function_of(flat)
            plain = self._checked(lambda: assembled(inner, flat, output), tape, exact, gradients)
        function = None
        if plain is not None:
            assert self.compiler is not None
            compiled = Fallback(self._try(lambda: self.compiler(inner)), inner, self.name)  # type: ignore[misc]
            function = self._checked(lambda: assembled(compiled, flat, output), tape, exact, gradients, close)
            compiled.in_use = True
        if function is None:
            if self.group.rank == 0:
                warn_uncompiled(self.name, self.why or "another rank could not compile it")
            self.why = None
        return function

    def _checked(
        self,
        make: Callable[[], Function],
        tape: Tape,
        exact: Replay,
        gradients: Any,
        compare: Callable[[Replay, Replay], None] = compare_values,
    ) -> Function | None:
        """A function that is proved to give what the tape gives; the same answer on all ranks."""
        function = self._try(make)
        if not self._vote("made", "") or function is None:
            return None
        replay = self._try(lambda: self._moment.again(function, tape.slots, watched=compare is compare_values))
        if not self._vote("replayed", "") or replay is None:
            return None
        self._try(lambda: compare(exact, replay))
        found = self._try(replay.gradients)
        self._try(lambda: compare_gradients(gradients or [], found or [], compare is compare_values))
        return function if self._vote("proved", "") else None

    def _tape(self, output: Any) -> Tape:
        recorder = self._recorder
        if recorder is None or recorder.why is not None:
            raise Refused(self.why or (recorder.why if recorder is not None else None) or "it was not recorded")
        assert self._guards is not None
        self._python.check()
        self._guards.check()
        if not has_room(self.device, 3 * recorder.bytes):
            raise Refused("there is not enough free memory to prove it")
        tape = recorder.tape
        tape.output = recorder.output(output)
        return tape

    def _recorded(self, tape: Tape, output: Any) -> Replay:
        """What the recorded call did, to compare with."""
        assert self._recorder is not None
        ends = self._moment.ends() | {id(s.where[s.key]): f"p{i}" for i, s in enumerate(tape.slots)}
        return Replay(
            tensors_of(output),
            self._recorder.kernels.log,
            graph(output, ends),
            random_state(self.device),
            self._moment.buffers(tape.slots),
            [],
            [],
        )

    def _try(self, action: Callable[[], Any]) -> Any:
        if self.why is not None:
            return None
        try:
            return action()
        except Refused as reason:
            self.why = str(reason)
        except Exception as error:
            self.why = f"{type(error).__name__}: {error}"
        return None

    def _vote(self, what: str, detail: str) -> bool:
        return all_agree(self.why is None, f"{what} {detail}", self.group.comm, self.device)
