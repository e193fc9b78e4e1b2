"""HOW is glue code interpreted?  The base of the two interpreters: the tracing run and the run of one window.

While an interpreter is active, every torch function that glue code calls (`on_op`), every call of an atom
(`on_atom`), every custom autograd Function and every `self.log` goes through it. Atoms themselves run untouched.
"""

from __future__ import annotations

import functools
import inspect
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import BackwardHook
from torchmetrics import MetricCollection

from lightning_3d.absence import is_passive
from lightning_3d.errors import PipelineError
from lightning_3d.pipeline.compiled import Uncompiled, enter_piece, leave_piece
from lightning_3d.pipeline.events import Event, TensorMeta, Trace, Vid
from lightning_3d.pipeline.holders import holders, set_slots, slots
from lightning_3d.pipeline.packed import spelled_out
from lightning_3d.pipeline.phantom import Phantom, Turned
from lightning_3d.pipeline.regions import checkpoint_regions
from lightning_3d.probe import intercept_functions, parameters_shown
from lightning_3d.wrapping import compiled_alone

_NOTHING = object()


class _Thread(threading.local):
    glue: Glue | None = None


_thread = _Thread()


def current() -> Glue | None:
    """The interpreter that is active in this thread."""
    return _thread.glue


_regions = checkpoint_regions(current)


class Unwind(BaseException):
    """The window is over: leave the user's step. Not an `Exception`, so that user code does not catch it."""


class _Active:
    """See `Glue.active`; a class, since a generator costs more than some windows' glue code."""

    def __init__(self, glue: Glue) -> None:
        self._glue = glue

    def __enter__(self) -> None:
        self._before = _thread.glue
        _thread.glue = self._glue
        self._uncompiled = Uncompiled()
        self._uncompiled.__enter__()
        self._glue.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._glue.__exit__(*error)
        self._uncompiled.__exit__()
        _thread.glue = self._before
        if self._glue._turned:
            self._glue._turned.back()


class _Paused:
    """See `Glue.paused`; a class as well."""

    def __init__(self, glue: Glue) -> None:
        self._glue, self._popped = glue, False

    def __enter__(self) -> None:
        self._glue.inside += 1
        self._compiled = enter_piece()
        if torch.overrides._get_current_function_mode() is self._glue:
            self._popped = True
            torch.overrides._pop_mode()

    def __exit__(self, *_: object) -> None:
        if self._popped:
            torch.overrides._push_mode(self._glue)
        if self._compiled:
            leave_piece()
        self._glue.inside -= 1


class Glue(TorchFunctionMode, ABC):
    """Base interpreter: counts events, routes them, and makes the phantoms of events that are not computed here.

    Args:
        module: The root module.
        atoms: Name -> module of the closed pieces.

    Attributes:
        n: Number of the next event.
        inside: Greater than zero while an event runs: what it calls is not glue code.
        checkpointed: An activation checkpoint was made, in glue code or in an atom.
    """

    trace: Trace

    def __init__(self, module: nn.Module, atoms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.module, self.atoms = module, atoms
        self.n, self.inside, self.checkpointed = 0, 0, False
        self._turned = Turned()

    # -- what an interpreter does
    @abstractmethod
    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a torch function in glue code."""

    @abstractmethod
    def on_atom(self, name: str, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a closed piece; `run` is its real forward."""

    @abstractmethod
    def on_log(self, name: str, value: Any, kwargs: dict[str, Any]) -> None:
        """A call of `self.log`."""

    @contextmanager
    def on_region(self) -> Iterator[None]:
        """Around the forward of one activation checkpoint."""
        yield

    @abstractmethod
    def value(self, phantom: Phantom) -> Any:
        """What Python code that reads a phantom's value gets."""

    # -- routing
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside or is_passive(func):
            return func(*args, **(kwargs or {}))
        instead = spelled_out(func)
        if instead is not None:
            with self:
                return instead(*args, **(kwargs or {}))
        iterate = func is Tensor.__iter__
        # torch has taken the mode off its stack while this runs; the flag is for custom Functions the event calls
        self.inside += 1
        try:
            out = self.on_op(Tensor.unbind if iterate else func, args, kwargs or {})
        finally:
            self.inside -= 1
        return iter(out) if iterate else out

    def paused(self) -> AbstractContextManager[None]:
        """Run code without the interpreter: popped when it is the innermost mode (no overhead), else flagged."""
        return _Paused(self)

    def active(self, surrounded: bool = False) -> AbstractContextManager[None]:
        """Interpret all glue code of this thread.

        Args:
            surrounded: `surroundings` is open already.
        """
        return _Active(self) if surrounded else self._surrounded()

    @contextmanager
    def _surrounded(self) -> Iterator[None]:
        with surroundings(self.module, self.atoms), _Active(self):
            yield

    def keeping(self, values: Any) -> AbstractContextManager[Any]:
        """Around the forward of an activation checkpoint; gives what it is to keep of its arguments."""
        return self._turned.keeping(values, self.phantom)

    # -- results of events that are not computed here
    def phantom(self, vid: Vid) -> Phantom:
        return Phantom.make(self, vid, self.trace.meta[vid])

    def emit(self, event: Event, leaves: Any = (), arguments: Any = None) -> Any:
        """The result of `event` as phantoms, and its side effects on what glue code can see."""
        if event.single is not None:
            return self.phantom(event.single)
        for index, vid in event.mutations.items():
            self._turn(leaves[index], vid)
        needs_holders = event.holders or any(leaf.kind == "holder" for leaf in event.leaves)
        found = holders(arguments) if needs_holders else []
        values = []
        for kind, payload in event.leaves:
            if kind == "value":
                values.append(self.phantom(payload))
            elif kind == "input":
                values.append(leaves[payload])
            else:
                values.append(found[payload] if kind == "holder" else payload)
        out, hooked, attributes, contents = tree_unflatten(values, event.spec)
        for (number, keys), new in zip(event.holders, contents, strict=True):
            set_slots(found[number], list(zip(keys, new, strict=True)))
        for (submodule, arg_leaves, spec), result in zip(event.hooked, hooked, strict=True):
            _fire_hooks(submodule, self._hook_arguments(arg_leaves, spec), result)
        for (submodule, name), kept, value in zip(event.attributes, event.kept, attributes, strict=True):
            held = submodule.__dict__.get(name)
            if kept and type(held) is type(value):
                set_slots(held, slots(value) or [])
            else:
                object.__setattr__(submodule, name, value)
        return out

    def _turn(self, tensor: Any, vid: Vid) -> None:
        """An argument was changed in place: from now on it is another tracked value."""
        if not isinstance(tensor, Phantom):
            self._turned.turn(tensor, self)
        tensor.vid = vid

    def _hook_arguments(self, leaves: list[Any], spec: Any) -> Any:
        unknown = (-1, 0)
        made = [Phantom.make(self, unknown, x) if isinstance(x, TensorMeta) else x for x in leaves]
        return tree_unflatten(made, spec)


def _fire_hooks(submodule: nn.Module, arguments: Any, result: Any) -> None:
    """Call a submodule inside an atom that is not run here, so that its forward hooks see the (phantom) result."""
    args, kwargs = arguments
    with replaced_forward(submodule, lambda *_, **__: result):
        submodule(*args, **kwargs)


def _on_function(proceed: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A custom autograd Function called by glue code is one event."""
    glue = current()
    if glue is None or glue.inside:
        return proceed(*args, **kwargs)
    if cls is BackwardHookFunction:
        raise PipelineError(
            "a module with full backward hooks (register_full_backward_hook, register_full_backward_pre_hook) is cut "
            "into several pieces for the pipeline, so no stage has both its inputs and its outputs. Put the hook on "
            "modules inside of it: " + ", ".join(list(glue.atoms)[:4]) + (", ..." if len(glue.atoms) > 4 else "") + "."
        )
    if cls is torch.utils.checkpoint.CheckpointFunction:
        raise PipelineError(
            "activation checkpointing with use_reentrant=True cuts the graph between stages. Use "
            "checkpoint(..., use_reentrant=False)."
        )

    def call(*a: Any, **k: Any) -> Any:
        return proceed(*a, **k)

    call.__name__ = f"{cls.__name__}.apply"
    with glue.paused():
        return glue.on_op(call, args, kwargs)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give one module instance another `forward` for a while."""
    before = module.__dict__.get("forward", _NOTHING)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        _put_back(module, "forward", before)


def _put_back(module: nn.Module, key: str, before: Any) -> None:
    if before is _NOTHING:
        module.__dict__.pop(key, None)
    else:
        module.__dict__[key] = before


@contextmanager
def surroundings(module: nn.Module, atoms: Mapping[str, nn.Module]) -> Iterator[None]:
    """Everything that leads to an active interpreter is in place while this is open."""
    with _installed(module, atoms), intercept_functions(_on_function, 0), _regions(), parameters_shown():
        yield


@contextmanager
def _installed(root: nn.Module, atoms: Mapping[str, nn.Module]) -> Iterator[None]:
    """Route atom calls and `self.log` to the active interpreter. Instance attributes, only while this is open.

    So nothing is left for `deepcopy` (EMA callbacks) or `pickle`, and a rewritten class is always the one that runs.
    """
    undo: list[tuple[nn.Module, str, Any]] = []

    def put(module: nn.Module, key: str, value: Any) -> None:
        undo.append((module, key, module.__dict__.get(key, _NOTHING)))
        module.__dict__[key] = value

    try:
        for name, atom in atoms.items():
            compiled = atom.__dict__.get("_compiled_call_impl")
            plain = atom.forward if compiled is None else compiled_alone(atom, compiled)
            put(atom, "forward", _routed(name, atom, plain))
            if compiled is not None:
                put(atom, "_compiled_call_impl", None)
            if _hooked_backward(atom):
                # around the routed forward they would look for the graph of a value another stage has
                put(atom, "_backward_hooks", OrderedDict())
                put(atom, "_backward_pre_hooks", OrderedDict())
        put(root, "log", functools.partial(_log, root))
        put(root, "log_dict", functools.partial(_log_dict, root))
        yield
    finally:
        for module, key, before in reversed(undo):
            _put_back(module, key, before)


def _routed(name: str, atom: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Args: `plain` is the real forward, compiled if the user compiled it."""
    run = plain
    if _hooked_backward(atom):
        run = functools.partial(_run_hooked, atom, run, atom._backward_hooks, atom._backward_pre_hooks)

    @functools.wraps(atom.forward)
    def routed(*args: Any, **kwargs: Any) -> Any:
        glue = _thread.glue
        if glue is not None and not glue.inside:
            return glue.on_atom(name, atom, run, args, kwargs)
        compiled = enter_piece()  # a checkpoint in glue code recomputes
        try:
            args, kwargs = _received(args, kwargs)
            return plain(*args, **kwargs)
        finally:
            if compiled:
                leave_piece()

    return routed


def _received(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Values in place of phantoms: a compiler would follow those."""
    leaves, spec = tree_flatten((args, kwargs))
    if any(isinstance(x, Phantom) for x in leaves):
        args, kwargs = tree_unflatten([x.run.value(x) if isinstance(x, Phantom) else x for x in leaves], spec)
    return args, kwargs


def _hooked_backward(module: nn.Module) -> bool:
    """Whether it has full backward hooks (the older kind goes to the result's graph, where that is)."""
    full = bool(module._backward_hooks) and module._is_full_backward_hook is True
    return full or bool(module._backward_pre_hooks)


def _run_hooked(atom: nn.Module, run: Callable[..., Any], hooks: Any, pre_hooks: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module with its full backward hooks around it, as `nn.Module.__call__` does."""
    hook = BackwardHook(atom, list(hooks.values()), list(pre_hooks.values()))
    return hook.setup_output_hook(run(*hook.setup_input_hook(args), **kwargs))


def _log(module: nn.Module, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    glue = current()
    if glue is None:  # a hook that runs in the backward
        _class_of(module).log(module, name, value, *args, **kwargs)
        return
    if args:
        kwargs.update(zip(_log_parameters(_class_of(module)), args, strict=False))
    glue.on_log(name, value, kwargs)


def _log_dict(module: nn.Module, dictionary: Any, *args: Any, **kwargs: Any) -> None:
    metrics = isinstance(dictionary, MetricCollection)
    for name, value in dictionary.items(keep_base=False) if metrics else dictionary.items():
        _log(module, name, value, *args, **kwargs)


def _class_of(module: Any) -> Any:
    return type(module)


@functools.cache
def _log_parameters(cls: Any) -> tuple[str, ...]:
    """Names of the parameters of `LightningModule.log` after (self, name, value)."""
    return tuple(inspect.signature(cls.log).parameters)[3:]
