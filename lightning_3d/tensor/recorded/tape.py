"""WHAT is a recorded program made of?  Operations on named tensors, before they become source text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any


class Refused(Exception):
    """This call cannot be recorded; it stays under the rules. The message says why, in the user's terms."""


@dataclass(frozen=True)
class Ref:
    """A tensor, by its name in the program: `p0` (parameter, buffer, attribute), `x0` (input), `t0` (result)."""

    name: str


@dataclass(frozen=True)
class Text:
    """A value that is written into the source."""

    source: str


@dataclass(frozen=True, eq=False)
class Constant:
    """An object the program keeps: a dtype, a placement, a group, a function."""

    value: Any


@dataclass(frozen=True, eq=False)
class Shards:
    """A result that is shown with its global shape."""

    local: Ref
    placement: Any
    group: Any
    sources: frozenset[str]


@dataclass(frozen=True)
class Ambient:
    """The grad and autocast state an operation runs in, where it is not that of the call."""

    grad: bool
    autocast: bool
    dtype: Any
    device: str


@dataclass(frozen=True)
class Stream:
    """A region that draws from this rank's own random stream (`rules_random.rank_stream`)."""

    group: Any
    like: Ref
    number: int  # two regions that follow each other are two


@dataclass
class Operation:
    """One call.

    Args:
        function: What is called.
        args: Encoded arguments: references, texts, constants, and lists, tuples, dicts, slices of them.
        kwargs: Encoded keyword arguments.
        result: A `Ref`, a tuple of `Ref` and None, or None if nothing new comes out.
        stream: The random stream it draws from, if not the common one.
        ambient: The state it needs, if not that of the call.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    stream: Stream | None = None
    ambient: Ambient | None = None

    @property
    def name(self) -> str:
        return name_of(self.function)

    def reads(self) -> list[str]:
        """Names of all tensors it takes, with repetitions."""
        return list(names((self.args, self.kwargs)))

    def makes(self) -> list[str]:
        return list(names(self.result))

    def replaced(self, function: Any, *args: Any) -> Operation:
        """The same operation in the same place, by another function of other arguments."""
        return replace(self, function=function, args=args, kwargs={})


@dataclass
class Slot:
    """Where a parameter, buffer or tensor attribute is looked up at every call."""

    where: dict[str, Any]
    key: str


@dataclass
class Tape:
    """A recorded call.

    Attributes:
        operations: In order.
        slots: Slot number i is the tensor `p{i}`.
        inputs: How many tensors the call gets, `x0`, `x1`, ...
        tracked: Tensors that require a gradient.
        large: Tensors on an accelerator that are worth overlapping their communication.
        output: The encoded return value.
    """

    operations: list[Operation] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    inputs: int = 0
    tracked: set[str] = field(default_factory=set)
    large: set[str] = field(default_factory=set)
    output: Any = None

    def with_operations(self, operations: list[Operation], output: Any = None) -> Tape:
        return replace(self, operations=operations, output=self.output if output is None else output)

    def digest(self) -> str:
        """What must be alike on all ranks: the order of the operations (their arguments may depend on the rank)."""
        return " ".join(operation.name for operation in self.operations)


def name_of(function: Any) -> str:
    """The name of a function; of a bound autograd Function its class."""
    return str(getattr(function, "__name__", type(function).__name__))


def names(encoded: Any) -> Iterator[str]:
    """Names of the tensors in an encoded value."""
    if isinstance(encoded, Ref):
        yield encoded.name
    elif isinstance(encoded, Shards):
        yield encoded.local.name
    elif isinstance(encoded, (list, tuple)):
        for item in encoded:
            yield from names(item)
    elif isinstance(encoded, dict):
        for item in encoded.values():
            yield from names(item)
    elif isinstance(encoded, slice):
        yield from names((encoded.start, encoded.stop, encoded.step))


def with_names(encoded: Any, aliases: dict[str, Ref]) -> Any:
    """The encoded value with other names for some tensors."""
    if isinstance(encoded, Ref):
        return aliases.get(encoded.name, encoded)
    if isinstance(encoded, Shards):
        return replace(encoded, local=with_names(encoded.local, aliases))
    if isinstance(encoded, (list, tuple)):
        return type(encoded)(with_names(item, aliases) for item in encoded)
    if isinstance(encoded, dict):
        return {key: with_names(item, aliases) for key, item in encoded.items()}
    if isinstance(encoded, slice):
        return slice(*(with_names(part, aliases) for part in (encoded.start, encoded.stop, encoded.step)))
    return encoded


def renamed(operation: Operation, aliases: dict[str, Ref]) -> Operation:
    """The operation on tensors by other names."""
    if not aliases.keys() & set(operation.reads()):
        return operation
    return replace(operation, args=with_names(operation.args, aliases), kwargs=with_names(operation.kwargs, aliases))
