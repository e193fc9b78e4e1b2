"""WHAT does a call do on this rank?  A tape of the local operations the rules emit, above autograd.

Recording only observes: every operation is run as it would be anyway. What cannot be put on the tape only ends it
(`why`); the call goes on under the rules.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_3d.tensor import sharded
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.placement import Placement
from lightning_3d.tensor.recorded import operations
from lightning_3d.tensor.recorded.tape import (
    Ambient,
    Constant,
    Operation,
    Ref,
    Refused,
    Shards,
    Slot,
    Stream,
    Tape,
    Text,
    name_of,
)
from lightning_3d.tensor.recorded.watch import Kernels
from lightning_3d.tensor.registry import Args, Kwargs

_thread = threading.local()
_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, TensorGroup, Placement, Enum, type)

OVERLAP_FROM = 2**20
"""Elements from which communication on an accelerator is worth more than the time its launch takes."""


def current() -> Recorder | None:
    """The recorder of this thread, if a call is being recorded."""
    return getattr(_thread, "recorder", None)


class Recorder(TorchFunctionMode):
    """Names every tensor it sees and notes every operation on them.

    Args:
        device: Type of the device whose autocast state counts.
        slots: Where parameters, buffers and tensor attributes of the block are.

    Attributes:
        tape: What was recorded.
        why: Why it cannot become a program, or None.
        kernels: The watcher below torch functions.
        bytes: Size of all tensors it has seen (views counted again).
    """

    def __init__(self, device: str, slots: list[Slot]) -> None:
        super().__init__()
        self.tape = Tape()
        self.why: str | None = None
        self.kernels = Kernels()
        self._device = device
        self._entry = _ambient(device)
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []  # an id means something only while its tensor lives
        self._made, self.bytes = 0, 0
        self._inside = False  # a leaf runs: what it calls is part of it
        self._stream: Stream | None = None
        for slot in slots:
            tensor = slot.where[slot.key]
            if id(tensor) not in self._names:
                self._name(tensor, f"p{len(self.tape.slots)}")
                self.tape.slots.append(slot)

    # -- names
    def _name(self, tensor: Tensor, name: str) -> Ref:
        self._names[id(tensor)] = name
        self._alive.append(tensor)
        self.bytes += tensor.nbytes
        if tensor.requires_grad:
            self.tape.tracked.add(name)
        if tensor.device.type != "cpu" and tensor.numel() >= OVERLAP_FROM:
            self.tape.large.add(name)
        return Ref(name)

    def input(self, tensor: Tensor) -> None:
        """The next input of the program."""
        if id(tensor) not in self._names:
            self._name(tensor, f"x{self.tape.inputs}")
        self.tape.inputs += 1

    def refuse(self, why: str) -> None:
        """End the tape; the first reason counts."""
        self.why = self.why or why

    # -- what is observed
    @contextmanager
    def recording(self) -> Iterator[None]:
        """Observe this thread while open."""
        _thread.recorder = self
        try:
            with self.kernels, self:
                yield
        finally:
            _thread.recorder = None
        self.refuse(self.kernels.why) if self.kernels.why else None

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if any(type(a) is sharded.ShardedTensor for a in tree_leaves((args, kwargs))):
            shapes = func.__self__.__name__ in operations.ATTRIBUTES if name == "__get__" else name in operations.SHAPES
            with nullcontext() if shapes else self:
                return sharded.call(func, args, kwargs)
        if name in ("__get__", "__set__", "__delete__"):
            return self._attribute(func, name, args, kwargs)
        if name in operations.SHAPES or name in operations.MODES:
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            with self:
                return iter(args[0].unbind(0))
        twin = operations.opened(func)
        if twin is not None:
            with self:
                return twin(*args, **kwargs)
        if name in operations.EFFECTS or operations.is_higher_order(func):
            self.refuse(f"it reads a value or has a side effect that a program cannot repeat ({name})")
        return self._run(func, args, kwargs)

    def _attribute(self, func: Any, access: str, args: Args, kwargs: Kwargs) -> Any:
        name = func.__self__.__name__
        if access != "__get__":
            self.refuse(f"it assigns Tensor.{name}")
        elif name in operations.VIEWS:
            return self._run(func, args, kwargs)
        elif name not in operations.ATTRIBUTES:
            self.refuse(f"it reads Tensor.{name}")
        return func(*args, **kwargs)

    def _run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        out = func(*args, **kwargs)
        if out is not NotImplemented:
            self._note(func, args, kwargs, out)
        return out

    def leaf(self, func: Any, args: Args, kwargs: Kwargs, run: Callable[..., Any] | None = None) -> Any:
        """Run something as one operation, by `run` if that is not `func` itself."""
        if self._inside:
            return (run or func)(*args, **kwargs)
        self._inside = True
        try:
            with torch._C.DisableTorchFunction():
                out = (run or func)(*args, **kwargs)
        finally:
            self._inside = False
        self._note(func, args, kwargs, out)
        return out

    @contextmanager
    def stream(self, open_stream: Callable[..., Any], group: TensorGroup, like: Tensor) -> Iterator[None]:
        """A region of `rank_stream`, which the program opens in the same place."""
        region = open_stream(group, like)
        self.kernels.trusted += 1
        with torch._C.DisableTorchFunction():
            region.__enter__()
        self.kernels.trusted -= 1
        try:
            self._stream = Stream(group, self._encode(like), len(self.tape.operations))
        except Refused as reason:
            self.refuse(str(reason))
        try:
            yield
        finally:
            self._stream = None
            self.kernels.trusted += 1
            with torch._C.DisableTorchFunction():
                region.__exit__(None, None, None)
            self.kernels.trusted -= 1

    # -- the tape
    def _note(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        if self.why is not None:
            return
        try:
            self._append(func, args, kwargs, out)
        except Refused as reason:
            self.why = str(reason)
        except Exception as error:  # whatever it is: the user's call must not see it
            self.why = f"{name_of(func)} cannot be put on the tape ({type(error).__name__}: {error})"

    def _append(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        state = _ambient(self._device)
        if state[3:] != self._entry[3:]:
            raise Refused("it opens saved-tensor hooks (an activation checkpoint) or inference mode inside")
        ambient = None if state == self._entry else Ambient(state[0], state[1], state[2], self._device)
        operation = Operation(func, self._encode(tuple(args)), self._encode(kwargs), None, self._stream, ambient)
        if isinstance(out, Tensor):
            operation.result = self._fresh(out)
        elif isinstance(out, (tuple, list)):
            if not all(isinstance(o, Tensor) or o is None for o in out):
                raise Refused(f"{name_of(func)} returns something else than tensors")
            operation.result = tuple(None if o is None else self._known(o) or self._fresh(o) for o in out)
        elif isinstance(out, (int, float, bool, str, torch.dtype, torch.device)):
            return  # of shapes and types alone: a value read is seen by `Kernels`
        elif out is not None:
            raise Refused(f"{name_of(func)} returns {type(out).__name__}")
        self.tape.operations.append(operation)

    def _known(self, tensor: Tensor) -> Ref | None:
        name = self._names.get(id(tensor))
        return None if name is None else Ref(name)

    def _fresh(self, tensor: Tensor) -> Ref | None:
        """A name for a new tensor; None for one that has one (an in-place operation)."""
        if type(tensor) is sharded.ShardedTensor:
            raise Refused("a rule gives a cut tensor from whole ones")
        if id(tensor) in self._names:
            return None
        self._made += 1
        return self._name(tensor, f"t{self._made - 1}")

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            known = self._known(value)
            if known is None:
                raise Refused(
                    f"it uses a tensor of shape {tuple(value.shape)} that is no input, parameter, buffer or attribute "
                    "(a global, a closure, or made where the recorder cannot see it)"
                )
            return known
        if value is None or value is Ellipsis or type(value) in (int, bool, str):
            return Text(repr(value))
        if type(value) is float:
            return Text(repr(value) if math.isfinite(value) else f"float('{value}')")
        if isinstance(value, (tuple, list)):
            return (list if type(value) is list else tuple)(self._encode(v) for v in value)
        if type(value) is dict:
            return {k: self._encode(v) for k, v in value.items()}
        if type(value) is slice:
            return slice(self._encode(value.start), self._encode(value.stop), self._encode(value.step))
        if isinstance(value, _CONSTANTS) or type(value).__module__.startswith("torch._C"):
            if isinstance(value, torch.Generator):
                raise Refused("it uses a random generator of its own")
            return Constant(value)
        raise Refused(f"an argument of type {type(value).__name__} cannot be put on the tape")

    def output(self, value: Any) -> Any:
        """The encoded return value of the call.

        Raises:
            Refused: It holds something the caller could not be given again.
        """
        if type(value) is sharded.ShardedTensor:
            return Shards(self._encode(value.local), value.placement, value.group, value.sources)
        if isinstance(value, (tuple, list, dict)) and type(value) not in (tuple, list, dict):
            raise Refused(f"it returns a {type(value).__name__}")
        if isinstance(value, (tuple, list)):
            return type(value)(self.output(v) for v in value)
        if isinstance(value, dict):
            return {k: self.output(v) for k, v in value.items()}
        return self._encode(value)


def _ambient(device: str) -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_inference_mode_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
