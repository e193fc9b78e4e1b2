"""HOW does a tape become a function?  Readable source text, compiled once for all blocks that have the same.

The text shows in tracebacks and profilers. Tensors are dropped after their last use, as they are in the user's code.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_3d.tensor.recorded.observe import rank_stream
from lightning_3d.tensor.recorded.tape import Ambient, Constant, Operation, Ref, Shards, Stream, Tape, Text, names
from lightning_3d.tensor.sharded import ShardedTensor

Function = Callable[..., Any]

_BINARY = {
    **{"__add__": "+", "__sub__": "-", "__mul__": "*", "__truediv__": "/", "__matmul__": "@", "__pow__": "**"},
    **{"__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=", "__eq__": "==", "__ne__": "!="},
    **{"__and__": "&", "__or__": "|", "__xor__": "^", "__floordiv__": "//", "__mod__": "%"},
}
_functions: weakref.WeakValueDictionary[Any, Function] = weakref.WeakValueDictionary()
_count = itertools.count()


def function_of(tape: Tape) -> Function:
    """`program(parameters, *inputs)`; equal tapes give the same function object.

    Its `.source` is the text.
    """
    writer = _Writer(tape)
    text = writer.text()
    key = (text, tuple(map(_identity, writer.constants.values())))
    function = _functions.get(key)
    if function is None:
        file = f"<recorded program {next(_count)}>"
        namespace = {"__name__": "recorded_program", **writer.constants}
        exec(compile(text, file, "exec"), namespace)
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        function = _functions[key] = namespace["program"]
        function.source = text
    return function


def _identity(value: Any) -> Any:
    """What makes two constants one: equality for values, identity for everything else."""
    return (type(value), value) if isinstance(value, (torch.dtype, torch.device, frozenset)) else _hashable(value)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


@contextlib.contextmanager
def ambient_state(device: str, grad: bool, autocast: bool, dtype: torch.dtype) -> Iterator[None]:
    """The grad and autocast state some operations of a program run in."""
    with torch.set_grad_enabled(grad), torch.autocast(device, dtype=dtype, enabled=autocast):
        yield


class _Writer:
    """Writes the text of one tape and collects the objects it names."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.constants: dict[str, Any] = {}
        self._known: dict[Any, str] = {}

    def text(self) -> str:
        tape = self.tape
        inputs = "".join(f", x{i}" for i in range(tape.inputs))
        lines = [f"def program(parameters{inputs}):"]
        if tape.slots:
            slots = ", ".join(f"p{i}" for i in range(len(tape.slots)))
            lines.append(f"    {slots}, = parameters")
        last = self._last_uses()
        returned = set(names(tape.output))
        region: tuple[Stream | None, Ambient | None] = (None, None)
        for index, operation in enumerate(tape.operations):
            indent = "    " * (1 + (operation.stream is not None) + (operation.ambient is not None))
            if (operation.stream, operation.ambient) != region:
                region = (operation.stream, operation.ambient)
                lines += self._opened(*region)
            lines.append(indent + self._statement(operation))
            used = dict.fromkeys((*operation.reads(), *operation.makes()))
            dead = [n for n in used if n[0] == "t" and last.get(n) == index and n not in returned]
            if dead:
                lines.append(f"{indent}del {', '.join(dead)}")
        lines.append(f"    return {self.expression(tape.output)}")
        return "\n".join(lines) + "\n"

    def _last_uses(self) -> dict[str, int]:
        last = {}
        for index, operation in enumerate(self.tape.operations):
            like = [] if operation.stream is None else [operation.stream.like.name]
            for name in (*operation.makes(), *operation.reads(), *like):
                last[name] = index
        return last

    def _opened(self, stream: Stream | None, ambient: Ambient | None) -> list[str]:
        lines = []
        if stream is not None:
            call = f"{self.constant(rank_stream)}({self.constant(stream.group)}, {stream.like.name})"
            lines.append(f"    with {call}:")
        if ambient is not None:
            state = f"{ambient.device!r}, {ambient.grad}, {ambient.autocast}, {self.constant(ambient.dtype)}"
            indent = "    " if stream is None else "        "
            lines.append(f"{indent}with {self.constant(ambient_state)}({state}):")
        return lines

    def _statement(self, operation: Operation) -> str:
        call = self._call(operation)
        if operation.result is None:
            return call
        if isinstance(operation.result, Ref):
            return f"{operation.result.name} = {call}"
        targets = ", ".join("_" if r is None else r.name for r in operation.result)
        return f"{targets}{',' if len(operation.result) == 1 else ''} = {call}"

    def _call(self, operation: Operation) -> str:
        function, name, args = operation.function, operation.name, operation.args
        parts = [self.expression(a) for a in args]
        named = [f"{key}={self.expression(value)}" for key, value in operation.kwargs.items()]
        on_tensor = bool(args) and isinstance(args[0], Ref)
        if name == "__get__":
            return f"{parts[0]}.{function.__self__.__name__}"
        if name in _BINARY and len(parts) == 2 and not named and on_tensor:
            return f"{parts[0]} {_BINARY[name]} {parts[1]}"
        if name == "__getitem__" and on_tensor:
            return f"{parts[0]}[{parts[1]}]"
        if name == "__setitem__" and on_tensor:
            return f"{parts[0]}[{parts[1]}] = {parts[2]}"
        if on_tensor and getattr(torch.Tensor, name, None) is function:
            return f"{parts[0]}.{name}({', '.join((*parts[1:], *named))})"
        return f"{self.constant(function)}({', '.join((*parts, *named))})"

    def constant(self, value: Any) -> str:
        """The name of an object the program keeps."""
        key = _identity(value)
        if key not in self._known:
            stem = str(getattr(value, "__name__", type(value).__name__)).strip("_").lower()
            name = f"{stem if stem.isidentifier() else 'constant'}_{len(self._known)}"
            self._known[key] = name
            self.constants[name] = value
        return self._known[key]

    def expression(self, encoded: Any) -> str:
        """The source of an encoded value."""
        if isinstance(encoded, Ref):
            return encoded.name
        if isinstance(encoded, Text):
            return encoded.source
        if isinstance(encoded, Constant):
            return self.constant(encoded.value)
        if isinstance(encoded, Shards):
            rest = ", ".join(map(self.constant, (encoded.placement, encoded.group, encoded.sources)))
            return f"{self.constant(ShardedTensor)}({encoded.local.name}, {rest})"
        if isinstance(encoded, list):
            return f"[{', '.join(map(self.expression, encoded))}]"
        if isinstance(encoded, tuple):
            return f"({''.join(self.expression(item) + ', ' for item in encoded)})"
        if isinstance(encoded, dict):
            return "{" + ", ".join(f"{key!r}: {self.expression(value)}" for key, value in encoded.items()) + "}"
        assert isinstance(encoded, slice)
        return f"slice({', '.join(map(self.expression, (encoded.start, encoded.stop, encoded.step)))})"
