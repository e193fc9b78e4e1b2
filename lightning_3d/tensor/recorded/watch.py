"""WHAT happens during a recording that the recorder cannot see?  Two watchers: below torch functions, and Python.

`Kernels` sees every aten operation: values that are read, shapes that depend on values, and the sequence a replay must
repeat. `PythonCode` sees every Python call: random numbers, output, globals that are read or written.
"""

from __future__ import annotations

import dis
import gc
import random
import sys
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_3d.probe import SharedPatch
from lightning_3d.tensor.recorded.tape import Refused
from lightning_3d.tensor.registry import words

_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ALIASES = ("aten.detach", "aten.view.default", "aten.alias")
_OURS = (
    *("torch", "lightning_3d.tensor", "lightning_3d.probe", "lightning_3d.comm", "contextlib", "importlib", "typing"),
    *(
        "warnings",
        "abc",
        "enum",
        "copy",
        "inspect",
        "functools",
        "collections",
        "linecache",
        "threading",
        "logging",
        "re",
    ),
)
_TRAINERS = ("lightning.", "pytorch_lightning")
_OUTPUT = frozenset(words("print write input open writelines"))
_UNPREDICTABLE = ("random", "_random", "numpy.random", "time", "datetime", "secrets", "uuid")
_MUTATORS = frozenset(
    words("append extend add update setdefault insert pop popitem clear remove discard appendleft popleft")
)


class Kernels(TorchDispatchMode):
    """Every aten operation below the torch functions.

    Attributes:
        log: Names of the operations, in order; without those that only make another view.
        why: The first value that was read, or shape that depends on values.
        trusted: Greater than zero while code of ours reads values that the program will read as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.why: str | None = None
        self.trusted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        reads = self.why is None and not self.trusted and bool(_DEPENDS & set(func.tags))
        if reads and not _indexes_by_numbers(func, args):
            self.why = f"it reads a value, or makes a shape that depends on values ({func})"
        name = str(func)
        if not name.startswith(_ALIASES):
            self.log.append(name)
        return out


def _indexes_by_numbers(func: Any, args: Any) -> bool:
    """`x[index]` has a shape that depends on values only if the index is a mask."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    masks = (torch.bool, torch.uint8)
    return not any(isinstance(i, torch.Tensor) and i.dtype in masks for i in tree_leaves(args[1]))


class PythonCode:
    """Python functions that run while this is open, by `sys.setprofile` of this thread.

    Args:
        entered: Told of every function of the user's code (or of a library other than torch) before it first runs:
            its code and its globals. It may raise `Refused`.
    """

    def __init__(self, entered: Callable[[CodeType, dict[str, Any]], None]) -> None:
        self._codes: dict[CodeType, dict[str, Any]] = {}
        self._entered = entered
        self.why: str | None = None

    @staticmethod
    def available() -> bool:
        """Nobody else profiles this thread."""
        return sys.getprofile() is None

    def __enter__(self) -> PythonCode:
        _collector.acquire()  # its callbacks and finalizers would look like the block's own code
        self._random = random.getstate(), _numpy_state()
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        sys.setprofile(None)
        _collector.release()
        if (random.getstate(), _numpy_state()) != self._random:
            self._refuse("it draws random numbers of Python or NumPy")

    def _refuse(self, why: str) -> None:
        self.why = self.why or why

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and _for_us(frame):
            return
        if event == "call":
            code, home = frame.f_code, frame.f_globals.get("__name__", "")
            if code not in self._codes and not home.startswith(_OURS):
                self._codes[code] = frame.f_globals
                if self.why is None:
                    self._enter(code, frame.f_globals)
                if home.startswith(_TRAINERS):
                    self._refuse(f"it asks the LightningModule or the trainer ({code.co_name})")
        elif event == "c_call" and not frame.f_globals.get("__name__", "").startswith(_OURS):
            name = getattr(argument, "__name__", "")
            if name in _OUTPUT:
                self._refuse(f"it writes output ({name})")
            elif _home(argument).startswith(_UNPREDICTABLE):
                self._refuse(f"it calls {_home(argument)}.{name}, which gives another value every time")

    def _enter(self, code: CodeType, space: dict[str, Any]) -> None:
        try:
            self._entered(code, space)
        except Refused as reason:
            self.why = str(reason)
        except Exception as error:  # the user's call must not see it
            self.why = f"what {code.co_name} looks at was not found ({type(error).__name__}: {error})"

    def check(self) -> None:
        """Raises `Refused` if the code did, or may have done, something a program could not repeat."""
        if self.why is None:
            for code, namespace in self._codes.items():
                written = _written(code, namespace)
                if written is not None:
                    self.why = f"{code.co_name} may change {written}"
                    break
        if self.why is not None:
            raise Refused(self.why)


def _for_us(frame: FrameType) -> bool:
    """Code of Python's library that our own code called."""
    at: FrameType | None = frame
    while at is not None:
        home = at.f_globals.get("__name__", "")
        if home.partition(".")[0] not in sys.stdlib_module_names:
            return at is not frame and home.startswith("lightning_3d.")
        at = at.f_back
    return False


_collecting = True


def _stop_collector() -> None:
    global _collecting
    _collecting = gc.isenabled()
    gc.disable()


def _resume_collector() -> None:
    if _collecting:
        gc.enable()


_collector = SharedPatch(_stop_collector, _resume_collector)
"""The garbage collector is off while anybody records."""


def _home(function: Any) -> str:
    """The module a builtin function, or the object it is a method of, comes from."""
    owner = getattr(function, "__self__", None)
    named = type(owner).__module__ if owner is not None and not hasattr(owner, "__spec__") else None
    return str(named or getattr(function, "__module__", None) or getattr(owner, "__name__", None) or "")


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, keys, *rest = numpy.random.get_state()
    return kind, keys.tobytes(), tuple(rest)


def _written(code: CodeType, namespace: dict[str, Any]) -> str | None:
    """A global or enclosing variable, or a global container, that the code writes."""
    containers = [n for n in code.co_names if isinstance(namespace.get(n), (list, dict, set))]
    mutates = bool(_MUTATORS & set(code.co_names))
    for instruction in dis.get_instructions(code):
        operation = instruction.opname
        if operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return f"the global {instruction.argval}"
        if operation in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars:
            return f"the enclosing variable {instruction.argval}"
        mutates = mutates or operation in ("STORE_SUBSCR", "DELETE_SUBSCR")
    return f"the global container {containers[0]}" if containers and mutates else None
