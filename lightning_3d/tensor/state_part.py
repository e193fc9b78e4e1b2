"""WHAT does `state_dict()` of a cut module give to user code?  This rank's parts, which cannot be saved by mistake.

A file of one rank's parts loads nowhere, and nothing would say so while it is written. So the entries work as tensors
(copies, moves, arithmetic, loading), but what would take their bytes out of the run is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.errors import TensorPlanError


class StatePart(Tensor):
    """This rank's part of a parameter, as `state_dict()` gave it; so is every copy of it.

    Attributes:
        described: The parameter's name, and which part of it this is.
    """

    described: str

    @staticmethod
    def of(value: Tensor, described: str) -> StatePart:
        part: StatePart = value.as_subclass(StatePart)
        part.described = described
        return part

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        part = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, StatePart))
        if any(not issubclass(t, StatePart) and _decides(t) for t in types):  # theirs to answer
            args, kwargs = tree_map(_plain, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        # what has as many elements is the same part in another form
        return tree_map(lambda x: StatePart.of(x, part.described) if _is_copy(x, part) else x, out)

    def __copy__(self) -> StatePart:
        return StatePart.of(self.as_subclass(Tensor), self.described)

    def __deepcopy__(self, memo: dict[int, Any]) -> StatePart:
        if id(self) not in memo:
            memo[id(self)] = StatePart.of(self.as_subclass(Tensor).detach().clone(), self.described)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("pickled (torch.save, sent to another process)")

    def untyped_storage(self) -> Any:
        self._refuse("read as bytes (save_pretrained, safetensors)")

    def storage(self) -> Any:
        self._refuse("read as bytes (save_pretrained, safetensors)")

    def numpy(self, *, force: bool = False) -> Any:
        self._refuse("made a numpy array")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("made a numpy array")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("handed to another library (dlpack)")

    def _refuse(self, what: str) -> NoReturn:
        raise TensorPlanError(
            f"state_dict() of a module that tensor parallelism has cut gave {self.described}; it cannot be {what}: "
            "what the other ranks hold would be missing in the file. For the whole model call "
            "`weights = trainer.strategy.whole_state_dict()` on all ranks (after fit, or in a hook) and save `weights` "
            "on rank zero; or save with trainer.save_checkpoint(path) and make one file of it with "
            "`lightning-3d checkpoint export`. docs/checkpoint.md has the lines for save_pretrained. To look at this "
            "rank's part use the module's parameters."
        )


def mark_state_dicts(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], rank: int, size: int) -> None:
    """From now on `state_dict()` of `module`, and of every module in it, gives `StatePart`s for what is cut.

    Args:
        module: The rewritten root.
        shapes: Whole shape of every parameter, by its (first) name.
        rank: This rank on the tensor-parallel axis.
        size: The number of ranks on it.
    """
    names = {id(p): n for n, p in module.named_parameters()}
    for child in module.modules():
        cut = {
            key: (names[id(p)], shapes[names[id(p)]])
            for key, p in child._parameters.items()
            if p is not None and hasattr(p, "placement")
        }
        if cut:
            child._register_state_dict_hook(functools.partial(_mark, cut, rank, size))


def _mark(
    cut: Mapping[str, tuple[str, tuple[int, ...]]], rank: int, size: int,
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any,
) -> None:  # fmt: skip
    """A hook of `state_dict`; at the top level of the file, so that the module can be pickled."""
    for key, (name, whole) in cut.items():
        value = state.get(prefix + key)
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):  # `keep_vars=True` asks for the parameter
            continue
        shapes = [" x ".join(map(str, s)) for s in (value.shape, whole)]
        text = f"{name!r} as the part of tensor-parallel rank {rank} of {size} ({shapes[0]} of {shapes[1]})"
        state[prefix + key] = StatePart.of(value, text)


def _decides(kind: Any) -> bool:
    """A class that answers for torch's functions in its own way."""
    return kind.__torch_function__ not in (Tensor.__torch_function__, nn.Parameter.__torch_function__, _disabled)


_disabled = torch._C._disabled_torch_function_impl


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, StatePart) else value


def _is_copy(value: Any, part: StatePart) -> bool:
    return type(value) in (Tensor, StatePart) and value.numel() == part.numel()
