"""MAY the path of a step be another one than it was?  What Python state it looked at, and what is different now.

Glue code branches on things no tensor shows: `batch_idx % 2`, `self.current_epoch`, a flag that a callback sets. A
trace notes whether the step looked at the indices or at the Trainer, and what the plain attributes of the open modules
were. If it did, or they are others now, the step is followed before it is run (`path.py`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_3d.pipeline.holders import is_opaque
from lightning_3d.pipeline.probe_net import of_the_user
from lightning_3d.probe import SharedPatch

_PROPERTIES = ("current_epoch", "global_step", "trainer")
_SIMPLE = (bool, int, float, str, type(None))
NOT_THE_USERS = ("training", "forward", "log", "log_dict", "_trainer", "_fabric", "_current_fx_name")

_FEW = 4
_thread = threading.local()
_patches: dict[tuple[type, str], SharedPatch] = {}


class Looks:
    """Whether a step looked at an index or at the Trainer."""

    def __init__(self) -> None:
        self.seen = False


class WatchedIndex(int):
    """An index that notes when code computes with it or compares it."""

    looks: Looks


def watched(value: Any, looks: Looks) -> Any:
    """`value`, if it is an integer one that notes its use."""
    if type(value) is not int:
        return value
    made = WatchedIndex(value)
    made.looks = looks
    return made


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: WatchedIndex, *args: Any) -> Any:
        self.looks.seen = True
        return plain(self, *args)

    return method


_WATCHED = """add radd sub rsub mul rmul floordiv rfloordiv truediv rtruediv mod rmod divmod rdivmod pow rpow and rand
or ror xor rxor lshift rshift neg abs eq ne lt le gt ge bool hash int float index"""
for _name in re.findall(r"\w+", _WATCHED):
    setattr(WatchedIndex, f"__{_name}__", _noting(f"__{_name}__"))


@contextmanager
def watching(module: nn.Module, looks: Looks) -> Iterator[None]:
    """While open, this thread's reads of the epoch, the step and the Trainer are noted."""
    before = getattr(_thread, "looks", None)
    _thread.looks = looks
    try:
        with ExitStack() as stack:
            for name in _PROPERTIES:
                owner = next((c for c in type(module).__mro__ if isinstance(vars(c).get(name), property)), None)
                if owner is not None:
                    stack.enter_context(_patch(owner, name)())
            yield
    finally:
        _thread.looks = before


def _patch(owner: type, name: str) -> SharedPatch:
    if (owner, name) not in _patches:
        plain: property = vars(owner)[name]

        def get(self: Any) -> Any:
            looks = getattr(_thread, "looks", None)
            if looks is not None:
                looks.seen = True
            with of_the_user():  # without a Trainer it raises
                return plain.__get__(self)

        noting = property(get, plain.fset, plain.fdel, plain.__doc__)
        _patches[owner, name] = SharedPatch(lambda: setattr(owner, name, noting), lambda: setattr(owner, name, plain))
    return _patches[owner, name]


def open_modules(module: nn.Module, atoms: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules whose code is glue."""
    closed = {id(m) for atom in atoms for m in atom.modules()}
    return [m for m in module.modules() if id(m) not in closed]


def plain_state(modules: Iterable[nn.Module]) -> object:
    """Plain attributes of modules, and of the plain objects they hold (a config)."""
    return [(key, _plain(value)) for m in modules for key, value in m.__dict__.items() if key not in NOT_THE_USERS]


def named_state(root: nn.Module, modules: Iterable[nn.Module]) -> dict[str, object]:
    """The same under names, for messages; tensors of a few numbers with their values."""
    names = {id(m): n for n, m in root.named_modules()}
    found: dict[str, object] = {}
    for m in modules:
        own = {**m.__dict__, **m._buffers}
        for key, value in own.items():
            if key in NOT_THE_USERS or key.startswith("_"):
                continue
            shown = value.tolist() if isinstance(value, Tensor) and value.numel() <= _FEW else _plain(value)
            found[".".join(filter(None, (names.get(id(m), ""), key)))] = shown
    return found


def _plain(value: Any, depth: int = 1) -> object:
    if isinstance(value, _SIMPLE):
        return value
    if depth and isinstance(value, (list, tuple)):
        return [_plain(x, 0) for x in value[:64]]
    if depth and isinstance(value, dict):
        return [(str(k), _plain(x, 0)) for k, x in list(value.items())[:64]]
    if depth and is_opaque(value):
        return [(k, _plain(x, 0)) for k, x in list(vars(value).items())[:64]]
    return type(value).__name__
