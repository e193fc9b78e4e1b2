"""WHAT did an equal block make of equal arguments?  Remembered, so that a new length probes one block and not all.

Blocks are alike when their modules, parameter shapes and plain attributes are equal and the first trace found that they
do the same. An object a block changes (its layer of a cache) is found by the block's place in the list. What else a
block does besides its result (attributes it leaves, arguments it changes in place) is never taken from memory: such a
block is probed every time.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.events import Event, Leaf, TensorMeta, Trace
from lightning_3d.pipeline.holders import holders, is_opaque, slots

_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)
_NO_CONFIGURATION = ("_parameters", "_buffers", "_modules", "training", "forward")


@dataclass
class Remembered:
    """The result of one atom call: as in `Event`, but a value is its `TensorMeta`, a hooked submodule its name."""

    spec: TreeSpec
    leaves: list[Leaf]
    flops: int
    moved: int
    random: bool
    single: bool
    hooked: list[tuple[str, list[Any], Any]]
    holders: list[tuple[int, list[Any], object]]  # number less the block's place, keys afterwards, content before

    def signature(self) -> tuple[object, ...]:
        """What must be equal for two calls to have done the same."""
        leaves = [(k, x.plain() if isinstance(x, TensorMeta) else repr(x)) for k, x in self.leaves]
        return (str(self.spec), leaves, self.flops, self.random, [name for name, *_ in self.hooked], self.holders)


@dataclass
class AtomMemory:
    """Results of atom calls, by kind of atom and arguments.

    Attributes:
        changes: What atoms change of the Python state around them (`saved.meaning`).
        read_later: What a step reads of the state that another one has left.
    """

    changes: set[Hashable] = field(default_factory=set)
    read_later: set[Hashable] = field(default_factory=set)

    _calls: dict[str, dict[Hashable, Remembered]] = field(default_factory=dict)
    _kind_of: dict[str, int] = field(default_factory=dict)
    _known: dict[Hashable, Remembered] = field(default_factory=dict)

    def recall(self, name: str, key: Hashable, arguments: Any) -> Remembered | None:
        """What an atom of this kind did with these arguments."""
        kind = self._kind_of.get(name)
        found = None if kind is None or key is None else self._known.get((kind, key))
        if found is None or not found.holders:
            return found
        present, place = holders(arguments), place_of(name)
        numbers = [offset + place for offset, *_ in found.holders]
        same = all(
            0 <= number < len(present) and content(present[number]) == before
            for number, (_, _, before) in zip(numbers, found.holders, strict=True)
        )
        return found if same else None

    def remember(
        self, name: str, atom: nn.Module, key: Hashable, event: Event, trace: Trace, before: Mapping[int, object]
    ) -> None:
        """Keep the result of a call that was probed; `before`: what was in the holders it changed."""
        if key is None or event.mutations or event.attributes:
            return
        place = place_of(name)
        changed = [(number - place, keys, before[number]) for number, keys in event.holders]
        paths = {id(m): path for path, m in atom.named_modules()}
        hooked = [(paths[id(m)], metas, spec) for m, metas, spec in event.hooked]
        leaves = []
        for kind, payload in event.leaves:
            if kind == "value":
                meta = trace.meta[payload]
                if meta.placement is not None or payload[0] != len(trace.events) - 1:
                    return
                leaves.append(Leaf("value", meta))
            elif kind == "input" or (kind == "constant" and isinstance(payload, _SIMPLE)):
                leaves.append(Leaf(kind, payload))
            else:
                return
        single = event.single is not None
        found = Remembered(event.spec, leaves, event.flops, event.moved, event.random, single, hooked, changed)
        if name in self._kind_of:
            self._known.setdefault((self._kind_of[name], key), found)
        else:
            self._calls.setdefault(name, {})[key] = found

    def learn(self, atoms: Mapping[str, nn.Module]) -> None:
        """Sort the atoms of the first trace into kinds. Calls of finer atoms, of an earlier try, are forgotten."""
        self._calls = {name: calls for name, calls in self._calls.items() if name in atoms}
        kinds: dict[object, int] = {}
        lists: dict[str, dict[str, nn.Module]] = {}
        for name in self._calls:
            lists.setdefault(name.rpartition(".")[0], {})[name] = atoms[name]
        places = {parent: _numbers_of_places(elements) for parent, elements in lists.items() if len(elements) > 1}
        for name, calls in self._calls.items():
            did = tuple(sorted((repr(key), repr(found.signature())) for key, found in calls.items()))
            structure = _structure(atoms[name], places.get(name.rpartition(".")[0], set()))
            kind = kinds.setdefault((structure, did), len(kinds))
            self._kind_of[name] = kind
            for key, found in calls.items():
                self._known.setdefault((kind, key), found)
        self._calls.clear()


def key_of(module: nn.Module, leaves: list[Any], spec: TreeSpec) -> Hashable:
    """Everything a result may depend on besides the kind of atom; None if that cannot be told."""
    arguments: list[object] = []
    for x in leaves:
        if isinstance(x, Tensor):
            arguments.append(TensorMeta.of(x).plain())
        elif isinstance(x, _SIMPLE):
            arguments.append((type(x).__name__, str(x)))
        elif is_opaque(x):
            arguments.append(type(x))
        else:
            return None
    modules = list(module.modules())
    hooks = tuple((len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules)
    autocast = tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in ("cpu", "cuda"))
    with torch._C.DisableTorchFunctionSubclass():
        trainable = tuple(p.requires_grad for p in module.parameters())
    training = tuple(m.training for m in modules)
    return (tuple(arguments), str(spec), trainable, training, hooks, torch.is_grad_enabled(), autocast)


def _structure(atom: nn.Module, ignored: set[tuple[str, str]]) -> object:
    """The modules, shapes and plain attributes of an atom."""
    described = []
    for path, module in atom.named_modules():
        attributes = sorted(
            (key, type(value).__name__, repr(value))
            for key, value in module.__dict__.items()
            if isinstance(value, _SIMPLE) and key not in _NO_CONFIGURATION and (path, key) not in ignored
        )
        tensors = [
            (key, None if x is None else (tuple(getattr(x, "local_shape", x.shape)), str(x.dtype)))
            for store in (module._parameters, module._buffers)
            for key, x in store.items()
        ]
        described.append((path, sharding.original_class(module), type(module), repr(attributes), repr(tensors)))
    return tuple(described)


def _numbers_of_places(atoms: Mapping[str, nn.Module]) -> set[tuple[str, str]]:
    """Attributes that hold, in every element of a list, just its place in the list (`layer_idx`): (module, name)."""
    found: set[tuple[str, str]] | None = None
    for name, atom in atoms.items():
        place = _place(name)
        mine = {
            (path, key)
            for path, module in atom.named_modules()
            for key, value in module.__dict__.items()
            if type(value) is int and value == place
        }
        found = mine if found is None else found & mine
    return found or set()


def place_of(name: str) -> int:
    """The place of an element in its list; 0 for other modules."""
    return _place(name) or 0


def _place(name: str) -> int | None:
    digits = re.search(r"(\d+)$", name)
    return int(digits[1]) if digits else None


def content(holder: Any) -> object:
    """What is in a list, a dict or an object, as far as it can be compared."""
    return [
        (str(key), repr(value) if isinstance(value, _SIMPLE) else type(value).__name__)
        for key, value in slots(holder) or []
    ]
