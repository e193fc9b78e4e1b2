"""WHAT of Python can a step change?  Random generators, iterators, counters: found, put back, equal for all that run.

A step that is followed or proved before training must not be noticed by the training: ranks that drew another number
of random numbers take other paths. Found are torch's, Python's and numpy's global generators, and what is reachable
from the module's attributes and from the globals, closures and defaults of its code: generators, iterators, plain
objects, containers, class attributes, small arrays and tensors.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.probe import reach, saved
from lightning_3d.probe.reach import home, is_iterator, is_open, is_random, parts_of

_LARGE = 1000  # a table of that size is data: put back, but not looked into
_BYTES = 2**24  # arrays and tensors up to that size are copied
_MOST = 200_000
_SEQUENCES: tuple[Any, ...] = ([], (), "", range(0), range(2**70))
_COPYABLE: tuple[Any, ...] = (itertools.count, *(type(iter(x)) for x in _SEQUENCES))
_MACHINERY = frozenset(
    ("_thread", "threading", "queue", "_queue", "socket", "_socket", "asyncio", "multiprocessing", "concurrent")
)
"""What holds something of these runs by itself (a prefetcher, a client): its state is not ours to put back."""
_FILES = frozenset(("_io", "io", "tempfile"))
_MUTABLE = (dict, list, set, deque)
_WITH_PARTS = (*reach.FUNCTIONS, property, staticmethod, classmethod, tuple, frozenset)

Moment = Callable[[], None]
"""The state of one moment: a call puts it back."""


class Replayed:
    """An iterator that can be rewound: it keeps what it has taken from the iterator it stands for.

    Copies of it (a copy of the model has one) read the same items, each from its own place.
    """

    def __init__(self, source: Iterator[Any], taken: list[Any] | None = None, at: int = 0) -> None:
        self._source, self._taken, self.at = source, [] if taken is None else taken, at

    def __iter__(self) -> Replayed:
        return self

    def __next__(self) -> Any:
        if self.at == len(self._taken):
            self._taken.append(next(self._source))
        self.at += 1
        return self._taken[self.at - 1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Replayed:
        return Replayed(self._source, self._taken, self.at)

    __copy__ = lambda self: self.__deepcopy__({})  # noqa: E731

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_source"), name)

    def finish(self, pristine: Any) -> Any:
        """What takes its place after the experiment: an iterator like the original one, where there can be one."""
        if not self._taken:
            return self._source
        self.at = 0
        return self if pristine is None else pristine


class PythonState:
    """The Python state a module's code may change, as it is now.

    Args:
        module: Its attributes, and what its code names, are looked through.
        counters: Not only generators and iterators: also plain objects, containers, class attributes, ... The
            attributes of the modules themselves are `ModuleState`'s.
        closed: Modules that are not looked into.
    """

    def __init__(self, module: nn.Module, counters: bool = True, closed: Iterable[nn.Module] = ()) -> None:
        self._package = home(type(module)) if not reach.is_library(type(module)) else ""
        self._counters = counters
        self._seen: dict[Any, Any] = {}
        self._pieces: list[saved.Saved] = [*saved.global_generators()]
        self._iterators: dict[int, tuple[Any, list[Callable[[Any], None]]]] = {}
        self._todo: deque[Any] = deque()
        self._seen |= {id(child): child for shut in closed for child in shut.modules()}
        children = [child for child in module.modules() if id(child) not in self._seen]
        self._seen |= {id(child): child for child in children}
        for child in children:
            self._hold(child.__dict__, reach.held_attributes(child) or {})
            self._add(type(child))
        while self._todo and len(self._seen) < _MOST:
            self._look(self._todo.popleft())
        self._streams = {key: (Replayed(it), _copied(it)) for key, (it, _) in self._iterators.items()}
        self._place([stream for stream, _ in self._streams.values()])
        self._start = [(piece, piece.take()) for piece in self._pieces]

    # -- use
    @property
    def generators(self) -> list[Any]:
        """The random generators it has found."""
        return [piece.source for piece in self._pieces if isinstance(piece, saved.Generator)]

    def taken_down(self) -> Moment:
        """The state of this moment."""
        pieces = _moment_of(self._pieces)
        at = [(stream, stream.at) for stream, _ in self._streams.values()]

        def put() -> None:
            pieces()
            for stream, position in at:
                stream.at = position

        return put

    def narrow(self) -> None:
        """From now on only that is taken down which has changed since the beginning, and what is random.

        For runs that do what was just run, and meet often: simulated ranks.
        """
        self._pieces = [piece for piece, before in self._start if not piece.same(before)]

    def changed(self) -> list[saved.Saved]:
        """What is not as it was at the beginning; of dictionaries the keys, one by one. Generators are left out."""
        found: list[saved.Saved] = []
        for piece, before in self._start:
            if isinstance(piece, saved.Generator) or piece.same(before):
                continue
            found += piece.changed(before) if isinstance(piece, saved.Items) else [piece]
        return found

    def taken(self) -> list[tuple[saved.Saved, Any]]:
        """All but generators, as it is now; for `changed_since`."""
        return [(piece, piece.take()) for piece, _ in self._start if not isinstance(piece, saved.Generator)]

    def changed_since(self, taken: list[tuple[saved.Saved, Any]]) -> bool:
        """Whether anything is not as it was."""
        return not all(piece.same(before) for piece, before in taken)

    @property
    def pieces(self) -> list[saved.Saved]:
        """All but generators."""
        return [piece for piece, _ in self._start if not isinstance(piece, saved.Generator)]

    def accept(self, which: Callable[[saved.Saved], bool]) -> None:
        """Those that `which` is true of stay as they are by now when it is closed; generators and iterators do not."""
        self._start = [(p, state) for p, state in self._start if isinstance(p, saved.Generator) or not which(p)]

    def restore(self, only: Callable[[Any], bool] | None = None) -> None:
        """Begin again: all as it was; as often as one likes.

        Args:
            only: Beside generators and iterators put back only contents that satisfy this.
        """
        self._put_back(only)
        self._place([stream for stream, _ in self._streams.values()])

    def close(self) -> None:
        """Put all back for good."""
        self._put_back()
        self._place([stream.finish(pristine) for stream, pristine in self._streams.values()])

    def _put_back(self, only: Callable[[Any], bool] | None = None) -> None:
        for piece, before in self._start:
            if only is None or isinstance(piece, saved.Generator) or (not piece.same(before) and only(piece.take())):
                piece.put(before)
        for stream, _ in self._streams.values():
            stream.at = 0

    def _place(self, iterators: list[Any]) -> None:
        for (_, slots), iterator in zip(self._iterators.values(), iterators, strict=True):
            for put in slots:
                put(iterator)

    # -- walk
    def _is_users(self, value: Any) -> bool:
        """Code of the user: not of a library, nor of a package of models (whose globals are its own business)."""
        package = home(value)
        return package == self._package or not reach.is_installed(package)

    def _save(self, piece: saved.Saved) -> None:
        if self._counters:
            self._pieces.append(piece)

    def _add(self, value: Any) -> None:
        if not isinstance(value, reach.ATOMS) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._todo.append(value)

    def _hold(self, container: Any, items: dict[Any, Any]) -> None:
        """Look at what is held under keys; an iterator is exchanged there."""
        for key, value in items.items():
            if _must_be_replayed(value):
                _, slots = self._iterators.setdefault(id(value), (value, []))
                slots.append(functools.partial(container.__setitem__, key))
            else:
                self._add(value)

    def _look(self, value: Any) -> None:
        if is_random(value):
            self._pieces.append(saved.Generator(value))
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif reach.is_array(value):
            if value.nbytes <= _BYTES and value.flags.writeable and not value.dtype.hasobject:
                self._save(saved.Array(value))
        elif isinstance(value, _MUTABLE):
            self._save(saved.Items(value) if isinstance(value, dict) else saved.Elements(value))
            if len(value) <= _LARGE:
                self._container(value)
        elif isinstance(value, type):
            if self._is_users(value):
                self._class(value)
        elif isinstance(value, types.FunctionType):
            if self._is_users(value):
                self._function(value)
        elif not isinstance(value, types.ModuleType) and (is_open(value) or isinstance(value, _WITH_PARTS)):
            self._object(value)

    def _container(self, value: Any) -> None:
        if isinstance(value, dict):
            self._hold(value, dict(reach.items_of(value)))
        elif isinstance(value, (list, deque)):
            self._hold(value, dict(enumerate(reach.contents_of(value))))
        else:
            for item in value:
                self._add(item)

    def _object(self, value: Any) -> None:
        attributes = reach.held_attributes(value)
        if any(home(type(part)) in _MACHINERY for part in (attributes or {}).values()):
            return
        if attributes is not None and value.__dict__ is not None and not isinstance(value, type):
            self._save(saved.Items(value.__dict__))
            self._hold(value.__dict__, attributes)
        elif held := reach.held_slots(value):
            self._save(saved.Slots(value))
            for item in held.values():
                self._add(item)
        if not isinstance(value, nn.Module):
            for part in parts_of(value):
                if not _must_be_replayed(part):
                    self._add(part)
        self._add(type(value))

    def _class(self, kind: type) -> None:
        data = {k: v for k, v in vars(kind).items() if not k.startswith("__") and not isinstance(v, reach.FUNCTIONS)}
        self._save(saved.ClassAttributes(kind))
        for key, value in data.items():
            if _must_be_replayed(value):
                _, slots = self._iterators.setdefault(id(value), (value, []))
                slots.append(functools.partial(type.__setattr__, kind, key))
            else:
                self._add(value)
        for value in vars(kind).values():
            if isinstance(value, reach.FUNCTIONS):
                self._add(value)
        for base in kind.__bases__:
            self._add(base)

    def _function(self, function: types.FunctionType) -> None:
        for part in parts_of(function):
            if not _must_be_replayed(part):
                self._add(part)
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._cell(cell)
        if function.__dict__:
            self._save(saved.Items(function.__dict__))
        named: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for space, name in reach.globals_of(function.__code__, function.__globals__):
            if (id(space), name) not in self._seen:
                self._seen[id(space), name] = space
                named.setdefault(id(space), (space, []))[1].append(name)
        for space, names in named.values():
            self._save(saved.Names(space, tuple(names)))
            self._hold(space, {n: space[n] for n in names})

    def _cell(self, cell: types.CellType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:
            return
        if _must_be_replayed(value):
            _, slots = self._iterators.setdefault(id(value), (value, []))
            slots.append(lambda new: setattr(cell, "cell_contents", new))
        else:
            self._save(saved.Cell(cell))

    def _tensor(self, value: Tensor) -> None:
        small = not isinstance(value, nn.Parameter) and type(value) is Tensor and value.is_leaf and not value.is_meta
        if small and not value.is_inference() and value.layout is torch.strided and value.nbytes <= _BYTES:
            self._save(saved.SmallTensor(value))


def _must_be_replayed(value: Any) -> bool:
    """An iterator whose place nobody can see or set; one that is an object of the user's has attributes."""
    if not is_iterator(value) or is_random(value) or home(type(value)) in _FILES:
        return False
    kind: Any = type(value)
    return reach.hides_state(kind) or not is_open(value)


def _copied(iterator: Any) -> Any:
    """An independent copy of a simple iterator, else None."""
    if not isinstance(iterator, _COPYABLE):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return copy.copy(iterator)
        except TypeError:  # newer Pythons do not copy all of them
            return None


_open: list[PythonState] = []
_lock = threading.Lock()


@contextmanager
def python_state(module: nn.Module, counters: bool = True, closed: Iterable[nn.Module] = ()) -> Iterator[PythonState]:
    """The Python state is put back at the end; `restore()` of what it gives begins again in between.

    Args:
        module: See `PythonState`.
        counters, closed: See `PythonState`.
    """
    state = PythonState(module, counters, closed)
    with _lock:
        _open.append(state)
    try:
        yield state
    finally:
        with _lock:
            _open.remove(state)
        state.close()


def own_generators(module: nn.Module) -> list[Any]:
    """The random generators of torch, Python and numpy that are held by a module or named by its code."""
    with python_state(module, counters=False) as state:
        return [g for g in state.generators if all(g is not known.source for known in saved.global_generators())]


def common_state() -> Moment:
    """Of what copies of a model have in common in this process, as it is now.

    That is: the global random generators, and all of the models whose `python_state` is open.
    """
    states = list(_open)
    if states:
        moments = [state.taken_down() for state in states]
    else:
        moments = [_moment_of([*saved.global_generators()])]

    def put() -> None:
        for moment in moments:
            moment()

    return put


def _moment_of(pieces: list[saved.Saved]) -> Moment:
    before = [(piece, piece.take()) for piece in pieces]

    def put() -> None:
        for piece, state in before:
            piece.put(state)

    return put
