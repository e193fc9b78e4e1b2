"""WHAT did one step do?  The trace: numbered events, the values they read and make, and what they look like.

An event is the n-th torch-function call, custom autograd Function or atom call made by *glue* code (all code outside
atoms). Every rank runs the same Python, so the number means the same event on all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_3d.pipeline import sharding
from lightning_3d.probe.saved import Held, Saved

if TYPE_CHECKING:
    from lightning_3d.pipeline.partition import Partition, Window

Vid = tuple[int, int]
"""Name of a tracked value: (event, output leaf). In-place changes make the leaf `MUTATED + argument leaf`."""

MUTATED = 10_000
_GRADIENT_BYTES = 4

EventKind = Literal["local", "op", "read", "atom"]


class TensorMeta(NamedTuple):
    """What a tracked value looks like.

    Attributes:
        size, stride: As user code sees it (global for a tensor-parallel value).
        dtype, device, requires_grad: Of the tensor.
        placement, sources: How a tensor-parallel value is cut, None for a whole one.
        wire: Shape of the piece one rank holds and sends.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    placement: Any = None
    sources: Any = None
    wire: tuple[int, ...] = ()

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        local, placement = sharding.local(tensor), sharding.placement(tensor)
        size, wire = tuple(tensor.shape), tuple(local.shape)
        if placement is not None:
            stride = _contiguous(size)
        else:
            stride = tuple(local.stride()) if local.layout == torch.strided else ()
        sources = sharding.sources(tensor)
        return TensorMeta(size, stride, local.dtype, local.device, local.requires_grad, placement, sources, wire)

    @property
    def nbytes(self) -> int:
        """Bytes one rank sends."""
        count = self.dtype.itemsize
        for size in self.wire:
            count *= size
        return count

    def plain(self) -> tuple[object, ...]:
        """What must be equal on all ranks of a replica (device indices differ)."""
        return (self.size, str(self.dtype), self.device.type, self.requires_grad, repr(self.placement), self.wire)


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for length in reversed(size):
        stride.append(step)
        step *= length
    return tuple(reversed(stride))


class Leaf(NamedTuple):
    """One leaf of an event's result.

    `value`: a tracked value (payload its vid). `input`: the argument leaf with that index, handed through. `holder`:
    the mutable argument (list, dict, object) with that number. `constant`: the payload itself.
    """

    kind: Literal["value", "input", "holder", "constant"]
    payload: Any


@dataclass
class Event:
    """One event of glue code.

    Attributes:
        name: Function name, or `atom:<module name>`.
        kind: `local` (depends on no parameter, runs on every rank), `op`, `read` (a Python value of a tracked tensor),
            or `atom`.
        reads: Tracked values it uses.
        params: Parameters it uses directly.
        spec, leaves: The result as a pytree; for an atom the tree (result, results of hooked submodules, attributes,
            changed holders).
        mutations: Argument leaf -> the new vid of that argument.
        holders: Mutable arguments an atom changes: (number of the holder, its keys afterwards).
        hooked: Submodules of an atom with forward hooks: (module, argument metas and constants, their spec).
        attributes: Tensors an atom leaves in attributes: (module, name).
        kept: Those among `attributes` whose list or dict was changed in place.
        flops: Of the forward.
        moved: Bytes its operations write in the forward.
        seconds: Forward and backward, where they were measured.
        arguments: (leaves without data, their spec) of an atom call, while a split is planned.
        random: Draws from a generator of torch.
        dynamic: Makes a shape that depends on values: nothing after it may be cut off.
        single: The only value of a result that is one tensor and has no side effects.
        looks: Turns a tensor into a Python value, on which the path may depend.
        answer: What it returned in the trace; invented if `kind` is `read`.
    """

    name: str
    kind: EventKind
    reads: set[Vid] = field(default_factory=set)
    params: set[str] = field(default_factory=set)
    spec: Any = None
    leaves: list[Leaf] = field(default_factory=list)
    mutations: dict[int, Vid] = field(default_factory=dict)
    holders: list[tuple[int, list[Any]]] = field(default_factory=list)
    hooked: list[tuple[nn.Module, list[Any], Any]] = field(default_factory=list)
    attributes: list[tuple[nn.Module, str]] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    flops: int = 0
    moved: int = 0
    seconds: float | None = None
    arguments: tuple[list[Any], Any] | None = None
    random: bool = False
    dynamic: bool = False
    single: Vid | None = None
    looks: bool = False
    answer: Any = None

    @property
    def atom(self) -> str:
        """Name of the module an atom call runs."""
        assert self.kind == "atom"
        return self.name[len("atom:") :]

    def plain(self) -> tuple[object, ...]:
        """What must be equal on all ranks of a replica."""
        leaves = [(leaf.kind, None if leaf.kind == "constant" else leaf.payload) for leaf in self.leaves]
        return (self.name, self.kind, sorted(self.reads), sorted(self.params), leaves, sorted(self.mutations.items()))


class NoCut(NamedTuple):
    """No stage may begin at an event in `first < n <= last`."""

    first: int
    last: int
    why: str


@dataclass
class Trace:
    """One step, recorded.

    Attributes:
        step: Name of the step method.
        operations_per_byte: What the device computes while it moves a byte.
        events: In the order of the run.
        meta: What every tracked value looks like.
        final_reads: Values the result of the step and `self.log` need.
        sizes: Elements of every parameter as this rank would hold it.
        no_cut: Intervals no stage boundary may lie in.
        buffer_writes, buffer_reads: Registered buffers, and tensors in attributes of modules, that glue code writes
            tracked values into, or reads: event numbers.
        overwritten: Values changed in place after they were made (a copy must be kept of what is sent).
        step_metrics: torchmetrics metrics that `self.log` got with `on_step`.
        pieces: The Python state that glue code changed: attributes, containers, objects, tensors in place.
        carried: Pieces whose values the next step reads, and which values those are.
        changed_buffers: Names of registered buffers whose values the step changed, in glue code or in atoms.
        python_random: Glue code drew from `random` or numpy.
        looks_at_python: Glue code computed with the batch's index, or looked at the epoch, the step or the Trainer.
        python_state: Plain attributes of the open modules when the step took this path.
        warnings: What the user may want to know.
        warm: Glue code cached something on its first call; that state was kept.
    """

    step: str
    operations_per_byte: float = 0.0
    events: list[Event] = field(default_factory=list)
    meta: dict[Vid, TensorMeta] = field(default_factory=dict)
    final_reads: set[Vid] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    no_cut: list[NoCut] = field(default_factory=list)
    buffer_writes: dict[str, int] = field(default_factory=dict)
    buffer_reads: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    overwritten: set[Vid] = field(default_factory=set)
    step_metrics: list[Any] = field(default_factory=list)
    pieces: list[Saved] = field(default_factory=list)
    carried: list[tuple[Saved, frozenset[Vid]]] = field(default_factory=list)
    changed_buffers: list[str] = field(default_factory=list)
    python_random: bool = False
    looks_at_python: bool = False
    python_state: object = None
    warnings: list[str] = field(default_factory=list)
    warm: bool = False

    def calls(self) -> list[tuple[int, Event]]:
        """The atom calls with their event numbers, in order."""
        return [(n, event) for n, event in enumerate(self.events) if event.kind == "atom"]

    def call_names(self) -> list[str]:
        """Names of the called atoms, in order."""
        return [event.atom for _, event in self.calls()]

    @cached_property
    def random(self) -> bool:
        """Whether the step draws random numbers; asked once the trace is complete."""
        return self.python_random or any(event.random for event in self.events)

    @cached_property
    def last_reads(self) -> set[Vid]:
        """What the last stage needs at the end; asked once the trace is complete."""
        return self.final_reads.union(*(vids for _, vids in self.carried))

    @cached_property
    def remembered(self) -> list[Saved]:
        """`pieces`, and the attributes in which atoms leave tensors."""
        left = {(id(m), name): m for event in self.events for m, name in event.attributes}
        return [*self.pieces, *(Held(m.__dict__, name) for (_, name), m in left.items())]

    @cached_property
    def branch_point(self) -> int:
        """The path may depend on values all ranks know (padding masks, random numbers) before this event; 0: never.

        Asked once the trace is complete.
        """
        if self.python_random:
            return len(self.events)
        return 1 + max((n for n, e in enumerate(self.events) if e.looks and e.kind == "local"), default=-1)

    def params_used(self) -> set[str]:
        """Names of all parameters the step uses."""
        return {name for event in self.events for name in event.params}

    def cost(self, event: Event) -> float:
        """Forward and backward of one event, in floating-point operations.

        Measured times count as the operations that estimates give for them, so that both can be compared.
        """
        return self._estimate(event) if event.seconds is None else event.seconds * self._operations_per_second

    def _estimate(self, event: Event) -> float:
        """Operations, activations moved and gradients of weights written; a backward is about two forwards."""
        moved = event.moved + _GRADIENT_BYTES * sum(self.sizes[name] for name in event.params)
        return 3 * (event.flops + self.operations_per_byte * moved)

    @cached_property
    def _operations_per_second(self) -> float:
        measured = [event for event in self.events if event.seconds is not None]
        seconds = sum(event.seconds or 0.0 for event in measured)
        return sum(map(self._estimate, measured)) / seconds if seconds else 0.0

    def live_bytes(self, cut: int) -> int:
        """Bytes that cross a stage boundary in front of event `cut`."""
        needed = {vid for event in self.events[cut:] for vid in event.reads} | self.last_reads
        return sum(self.meta[vid].nbytes for vid in needed if vid[0] < cut)

    def forbidden(self, cut: int) -> str | None:
        """Why no stage may begin at event `cut`, or None."""
        return next((interval.why for interval in self.no_cut if interval.first < cut <= interval.last), None)

    def plain(self) -> object:
        """What must be equal on all ranks of a replica."""
        metas = sorted((vid, meta.plain()) for vid, meta in self.meta.items())
        return (self.step, [event.plain() for event in self.events], metas, sorted(self.last_reads))

    def partition(self, windows: Sequence[int] | Sequence[Window]) -> Partition:
        """Cut into windows: first event of every stage (the first is 0), or a list of windows with owners."""
        from lightning_3d.pipeline.partition import make_partition, windows_from_starts

        if all(isinstance(start, int) for start in windows):
            return make_partition(self, windows_from_starts(self, windows))  # type: ignore[arg-type]
        return make_partition(self, list(windows))  # type: ignore[arg-type]
