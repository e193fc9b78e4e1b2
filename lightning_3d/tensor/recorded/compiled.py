"""WHAT becomes of `torch.compile`?  The program of a block the user compiled, in operations a compiler can trace."""

from __future__ import annotations

import warnings
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from lightning_3d.tensor import collectives
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.recorded import traceable
from lightning_3d.tensor.recorded.source import Function, function_of
from lightning_3d.tensor.recorded.tape import Constant, Operation, Ref, Refused, Shards, Tape, Text, renamed, with_names

_copy_in: Any = collectives.copy_in.__wrapped__  # type: ignore[attr-defined]
_column_linear: Any = collectives.column_linear.__wrapped__  # type: ignore[attr-defined]
_lend: Any = collectives.lend.__wrapped__  # type: ignore[attr-defined]
_reduce_out: Any = collectives.reduce_out.__wrapped__  # type: ignore[attr-defined]


class Fallback:
    """A compiled program; once it is in use, what the compiler fails at is done by the program as it is.

    Attributes:
        in_use: False while it is proved: then the compiler's error counts.
    """

    def __init__(self, compiled: Function, plain: Function, name: str) -> None:
        self._compiled, self._plain, self._name = compiled, plain, name
        self.in_use = False

    def __call__(self, *args: Any) -> Any:
        if self._compiled is self._plain:
            return self._plain(*args)
        try:
            return self._compiled(*args)
        except TorchDynamoException as error:  # while compiling: nothing has been computed yet
            if not self.in_use:
                raise Refused(_sentence(error)) from error
            warn_uncompiled(self._name, _sentence(error))
            self._compiled = self._plain
        return self._plain(*args)


def warn_uncompiled(name: str, why: str) -> None:
    """One clear sentence instead of a compiler's report."""
    warnings.warn(
        f"{name} was compiled with torch.compile, but runs uncompiled here, with the same result: {why}", stacklevel=2
    )


def _sentence(error: Exception) -> str:
    """The beginning of a compiler's report."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def translated(tape: Tape) -> tuple[Tape, Any]:
    """The tape in operations a compiler can trace, giving a flat tuple; and the output those tensors belong into.

    Raises:
        Refused: It has operations that are not known to be traceable.
    """
    operations: list[Operation] = []
    aliases: dict[str, Ref] = {}
    inside: dict[str, Ref] = {}  # a whole tensor -> the same inside of the sharded region
    for operation in tape.operations:
        operation = renamed(operation, aliases)
        if operation.ambient is not None:
            raise Refused("it switches autocast or gradients inside")
        if operation.stream is not None:
            operations.append(_dropout(operation))
        elif operation.function in (_copy_in, _column_linear):
            x = operation.args[0]
            if x.name in tape.tracked and x.name not in inside:
                inside[x.name] = Ref(f"{x.name}_inside")
                group = _number(operation.args[-1])
                operations.append(Operation(traceable.enter, (x, group), {}, inside[x.name]))
            x = inside.get(x.name, x)
            if operation.function is _copy_in:
                if isinstance(operation.result, Ref):
                    aliases[operation.result.name] = x
            else:
                operations.append(operation.replaced(F.linear, x, *operation.args[1:3]))
        else:
            operations.append(_traceable(operation, tape))
    output = with_names(tape.output, aliases)
    locals_: list[Ref] = []
    _collect(output, locals_)
    return tape.with_operations(operations, tuple(locals_)), output


def _traceable(operation: Operation, tape: Tape) -> Operation:
    function = operation.function
    if function is _reduce_out:
        if operation.result is None:
            raise Refused("it reduces in place")
        return operation.replaced(traceable.reduce_out, operation.args[0], _number(operation.args[1]))
    if function in traceable.PAIRS:
        group = operation.args[2].value
        rest = (Text(str(group.rank)),) if isinstance(operation.args[1], Constant) else ()
        args = (*operation.args[:2], _number(operation.args[2]), *rest, Text(str(group.size)))
        return operation.replaced(traceable.PAIRS[function], *args)
    if function is _lend:  # nobody writes in a program
        return operation.replaced(Tensor.view_as, operation.args[0], operation.args[0])
    owner = getattr(function, "args", None)
    if isinstance(owner, tuple) and owner and isinstance(owner[0], type):  # an autograd Function of the user
        return Operation(owner[0].apply, operation.args, operation.kwargs, operation.result)  # type: ignore[attr-defined]
    if any(isinstance(a, Constant) and isinstance(a.value, TensorGroup) for a in operation.args):
        raise Refused(f"it communicates in a way that cannot be traced ({operation.name})")
    return operation


def _dropout(operation: Operation) -> Operation:
    """A region of a random stream holds one dropout, or is not compiled."""
    stream, args = operation.stream, operation.args
    assert stream is not None
    if operation.name != "dropout" or len(args) < 2 or not isinstance(operation.result, Ref):
        raise Refused(f"it draws random numbers inside a cut region ({operation.name})")
    return Operation(traceable.dropout, (args[0], args[1], _number(Constant(stream.group))), {}, operation.result)


def _number(group: Constant) -> Text:
    return Text(str(traceable.number_of(group.value)))


def _collect(output: Any, found: list[Ref]) -> None:
    """The tensors of an encoded output, in order."""
    if isinstance(output, Ref):
        found.append(output)
    elif isinstance(output, Shards):
        found.append(output.local)
    elif isinstance(output, (list, tuple)):
        for item in output:
            _collect(item, found)
    elif isinstance(output, dict):
        for item in output.values():
            _collect(item, found)


def assembled(inner: Function, flat: Tape, output: Any) -> Function:
    """A program that calls `inner` and puts its tensors where the caller expects them."""
    inputs = tuple(Ref(f"x{i}") for i in range(flat.inputs))
    results = tuple(dict.fromkeys(flat.output))
    names = {ref: Ref(f"t{i}") for i, ref in enumerate(results)}
    call = Operation(_Unpacked(inner, [flat.output.index(r) for r in results]), (Ref("parameters"), *inputs), {}, None)
    call.result = tuple(names.values())
    renames = {ref.name: new for ref, new in names.items()}
    outer = Tape([call], [], flat.inputs, set(), set(), with_names(output, renames))
    return function_of(outer)


class _Unpacked:
    """The distinct tensors `inner` returns."""

    def __init__(self, inner: Function, positions: list[int]) -> None:
        self._inner, self._positions = inner, positions

    def __call__(self, *args: Any) -> Any:
        found = self._inner(*args)
        return [found[i] for i in self._positions]
