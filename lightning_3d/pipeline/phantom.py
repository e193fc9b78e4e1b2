"""WHAT stands for a value that another stage has?

`Phantom`: a tracked value of another stage: shape, dtype, device, no storage. Glue code passes it around; an operation
on it before the window is not computed at all, one inside the window uses the received value. (For a parameter of
another stage: `absent.py`.) `Turned`: tensors that become one for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_3d.absence import is_passive
from lightning_3d.errors import PipelineError
from lightning_3d.pipeline.events import TensorMeta, Vid


def _has_gradient(x: Tensor, requires_grad: bool = True) -> bool:
    """Whether `x.requires_grad_(requires_grad)` changes nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad == requires_grad


class Resolver(Protocol):
    """Whoever can turn a phantom into the value it stands for."""

    def value(self, phantom: Phantom) -> Any: ...


class Phantom(Tensor):
    """Shape, dtype, device and `requires_grad` of a value that another stage computes; no storage.

    Attributes:
        run: The run it belongs to; it knows the value once it has been received.
        vid: Name of the value.
    """

    run: Resolver
    vid: Vid

    @staticmethod
    def make(run: Resolver, vid: Vid, meta: TensorMeta) -> Phantom:
        phantom: Phantom = Tensor._make_wrapper_subclass(
            Phantom,
            meta.size,
            strides=meta.stride,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad,
        )
        phantom.run, phantom.vid = run, vid
        return phantom

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise PipelineError(f"{func} reached a value of another pipeline stage below the torch-function level.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_passive(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.requires_grad_ and _has_gradient(args[0], *args[1:], **kwargs):
            return args[0]  # what libraries do in hooks on embeddings, for activation checkpoints
        # no interpreter is on: a phantom inside an opaque object reached an owned atom, or a checkpoint recomputes
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([x.run.value(x) if isinstance(x, Phantom) else x for x in leaves], spec)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Phantom(value {self.vid}, {tuple(self.size())})"


class Turned:
    """Plain tensors of glue code that tracked values changed in place: they stand for those till the step ends."""

    def __init__(self) -> None:
        self._kinds: list[tuple[Any, type]] = []
        self._kept: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def turn(self, tensor: Any, run: Resolver) -> None:
        """From now on it is a phantom; its `vid` is to be set."""
        self._kinds.append((tensor, tensor.__class__))
        tensor.__class__ = Phantom
        tensor.run = run

    def back(self) -> None:
        """All are what they were before they were changed."""
        for tensor, kind in reversed(self._kinds):
            tensor.__class__ = kind
            tensor.__dict__.pop("run", None)
            tensor.__dict__.pop("vid", None)
        self._kinds.clear()

    @contextmanager
    def keeping(self, values: Any, phantom: Callable[[Vid], Phantom]) -> Iterator[Any]:
        """Around the forward of an activation checkpoint with these arguments.

        Gives what it is to keep of them for its recomputation: phantoms in place of what will be turned back.
        """
        leaves, spec = tree_flatten(values)
        kept = [x for x in leaves if self._has(x)]
        self._kept += kept
        try:
            yield tree_unflatten([phantom(x.vid) if self._has(x) else x for x in leaves], spec) if kept else values
        finally:
            del self._kept[len(self._kept) - len(kept) :]

    def is_fleeting(self, value: Any) -> bool:
        """Whether it is one of them, and no checkpoint that is open keeps what it stands for."""
        return self._has(value) and not any(value is x for x in self._kept)

    def _has(self, value: Any) -> bool:
        return any(value is tensor for tensor, _ in self._kinds)
