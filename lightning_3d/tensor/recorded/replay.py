"""IS the program the call?  It is replayed on what the recorded call got, and must do exactly the same.

The program as recorded: the same aten operations in the same order, the same values to the last bit, the same autograd
graph, the same random state and buffers afterwards. The simplified program: the same values to the last bit, and the
gradients of the program as recorded up to rounding (its graph is another one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_3d.tensor.recorded.tape import Refused, Slot
from lightning_3d.tensor.recorded.watch import Kernels
from lightning_3d.tensor.sharded import local

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Between two orders of summation: a missing or doubled collective is wrong by a factor."""


class Moment:
    """What a call starts from, so that it can be repeated: values of inputs and buffers, random state.

    Args:
        tensors: The inputs.
        slots: The block's tensors.
        device: Where the block computes.
    """

    def __init__(self, tensors: list[Tensor], slots: list[Slot], device: torch.device) -> None:
        self._device = device
        self._inputs = tensors
        self._values = [t.detach().clone() for t in tensors]
        self._buffers = {
            id(t): t.detach().clone() for t in (s.where[s.key] for s in slots) if not isinstance(t, torch.nn.Parameter)
        }
        self._random = random_state(device)
        # what the history of the inputs begins with, before the call may change them in place
        self._nodes = [t.grad_fn for t in tensors]

    def ends(self) -> dict[int, str]:
        """Where the graph of the recorded call ends: id of a node, or of a leaf -> name."""
        found = {id(node): f"x{i}" for i, node in enumerate(self._nodes) if node is not None}
        return found | {id(t): f"x{i}" for i, t in enumerate(self._inputs) if t.is_leaf}

    def again(self, program: Callable[..., Any], slots: list[Slot], watched: bool = True) -> Replay:
        """Run the program on copies of everything it could change; the real parameters take no part in the graph.

        Args:
            program: Any form of it.
            slots: Where its parameters are.
            watched: Note the aten operations (a compiled program does not run under a watcher).
        """
        parameters = [self._twin(slot.where[slot.key]) for slot in slots]
        leaves = [
            value.clone().requires_grad_(t.requires_grad) for t, value in zip(self._inputs, self._values, strict=True)
        ]
        inputs = [leaf.clone() if node is not None else leaf for leaf, node in zip(leaves, self._nodes, strict=True)]
        ends = {id(p): f"p{i}" for i, p in enumerate(parameters)} | {id(x): f"x{i}" for i, x in enumerate(inputs)}
        ends |= {id(x.grad_fn): f"x{i}" for i, x in enumerate(inputs) if x.grad_fn is not None}
        nodes = [x.grad_fn for x in inputs]
        after = random_state(self._device)
        set_random_state(self._random, self._device)
        kernels = Kernels()
        try:
            with kernels if watched else nullcontext():
                output = program(parameters, *inputs)
            end = random_state(self._device)
        finally:
            set_random_state(after, self._device)
        changed = [p.detach() for p, s in zip(parameters, slots, strict=True) if id(s.where[s.key]) in self._buffers]
        return Replay(
            tensors_of(output), kernels.log, graph(output, ends), end, changed, parameters + leaves, nodes, self._random
        )

    def _twin(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._buffers:
            return self._buffers[id(tensor)].clone().requires_grad_(tensor.requires_grad)
        return torch.nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)

    def buffers(self, slots: list[Slot]) -> list[Tensor]:
        """The block's buffers as they are now."""
        return [t for t in (s.where[s.key] for s in slots) if id(t) in self._buffers]


@dataclass
class Replay:
    """What a run did."""

    outputs: list[Tensor]
    kernels: list[str]
    graph: list[Any]
    random: list[Tensor]
    buffers: list[Tensor]
    leaves: list[Tensor]
    nodes: list[Any]  # kept alive: their ids are in the graph
    start: list[Tensor] = field(default_factory=list)

    def gradients(self) -> list[Tensor | None]:
        """Of a sum of all outputs, with weights that differ from element to element.

        Collectives: those of the backward.
        """
        outputs = [o for o in self.outputs if o.requires_grad]
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]
        if not outputs or not leaves:
            return []
        weights = [torch.linspace(0.5, 1.5, o.numel(), device=o.device).view(o.shape).to(o.dtype) for o in outputs]
        with torch.autocast(outputs[0].device.type, enabled=False):
            return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))


def compare(recorded: Replay, replay: Replay) -> None:
    """Raises `Refused` where the program as recorded does not repeat the call exactly."""
    if replay.kernels != recorded.kernels:
        pairs = enumerate(zip(recorded.kernels, replay.kernels, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(recorded.kernels), len(replay.kernels)))
        found = [k[place] if place < len(k) else "nothing" for k in (recorded.kernels, replay.kernels)]
        raise Refused(f"it runs operations the recorder cannot see ({found[0]}; the program runs {found[1]})")
    if replay.graph != recorded.graph:
        raise Refused("its autograd graph is not that of the operations the recorder saw")
    compare_values(recorded, replay)


def compare_values(recorded: Replay, replay: Replay) -> None:
    """Raises `Refused` where values, random state or buffers differ."""
    if not all(map(same, recorded.outputs, replay.outputs)) or len(recorded.outputs) != len(replay.outputs):
        raise Refused("a replay gives other values")
    if not all(map(torch.equal, recorded.random, replay.random)):
        raise Refused("a replay draws other random numbers")
    if not all(map(same, recorded.buffers, replay.buffers)):
        raise Refused("a replay leaves other buffers")


def close(exact: Replay, compiled: Replay) -> None:
    """Raises `Refused` where a compiled program computes something else; it may round and draw otherwise."""
    start_is_end = all(map(torch.equal, exact.start, exact.random))
    for a, b in zip(exact.outputs, compiled.outputs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or a.requires_grad != b.requires_grad:
            raise Refused("the compiled program gives tensors of another kind")
        if start_is_end and a.is_floating_point() and not _within_rounding(a, b):
            raise Refused("the compiled program gives other values")


def compare_gradients(exact: list[Tensor | None], simple: list[Tensor | None], values: bool = True) -> None:
    """Raises `Refused` where another form of the program has other gradients.

    Args:
        exact: Those of the program as recorded.
        simple: Those of the other form.
        values: Compare more than which there are (a compiled program may draw other random numbers).
    """
    for a, b in zip(exact, simple, strict=True):
        if (a is None) != (b is None):
            raise Refused("the simplified program does not reach the same leaves")
        if values and a is not None and b is not None and not _within_rounding(a, b):
            raise Refused("the simplified program has other gradients")


def _within_rounding(a: Tensor, b: Tensor) -> bool:
    if not a.numel():
        return True
    a, b = a.detach(), b.detach()
    scale = a.abs().max().double().item()
    error = (a.double() - b.double()).abs().max().item()
    return error <= _TOLERANCE.get(a.dtype, 1e-3) * max(scale, 1e-30) or same(a, b)


def graph(output: Any, ends: dict[int, str]) -> list[Any]:
    """The autograd graph of some outputs in a form that can be compared: node names and edges, in order of discovery.

    Args:
        output: What was computed.
        ends: Ids of nodes and of leaf tensors at which the graph is left, with their names.
    """
    numbers: dict[Any, int] = {}
    nodes: list[Any] = []
    todo = [t.grad_fn for t in tensors_of(output) if t.grad_fn is not None][::-1]
    while todo:
        node = todo.pop()
        if node in numbers:
            continue
        numbers[node] = len(nodes)
        nodes.append(node)
        if id(node) not in ends:
            todo += [n for n, _ in node.next_functions[::-1] if n is not None]
    return [_described(node, numbers, ends) for node in nodes]


def _described(node: Any, numbers: dict[Any, int], ends: dict[int, str]) -> Any:
    variable = getattr(node, "variable", None)
    name = ends.get(id(node)) or (ends.get(id(variable)) if variable is not None else None)
    if name is not None:
        return name
    edges = tuple((None if n is None else numbers[n], i) for n, i in node.next_functions)
    return type(node).__name__, edges


def tensors_of(output: Any) -> list[Tensor]:
    """All (local) tensors in what a call returned."""
    return [local(x) for x in tree_leaves(output) if isinstance(x, Tensor)]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach(), b.detach()
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def random_state(device: torch.device) -> list[Tensor]:
    """State of the generators a block may draw from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Undo of `random_state`."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)


def has_room(device: torch.device, needed: int) -> bool:
    """An accelerator has so many bytes free: an error in the middle of a replay would leave the other ranks waiting."""
    if device.type == "cpu":
        return True
    room = torch.get_device_module(device)
    free = room.mem_get_info(device)[0] + room.memory_reserved(device) - room.memory_allocated(device)
    return bool(free > needed)


@contextmanager
def hidden_from_checkpoints() -> Iterator[None]:
    """What is computed inside is not kept for an activation checkpoint around the call."""
    inside = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    with torch.autograd.graph.saved_tensors_hooks(_same, _same) if inside else nullcontext():
        yield


def _same(x: Any) -> Any:
    return x
