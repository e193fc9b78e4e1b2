"""CAN this module be trained here, and do its hooks look at gradients?"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils._pytree import tree_leaves

from lightning_3d.deferred import Deferred
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout

_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
ZERO_GRAD_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")
BACKWARD_HOOKS = ("on_after_backward",)
GRADIENT_HOOKS = (
    *ZERO_GRAD_HOOKS,
    *BACKWARD_HOOKS,
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)


def check_is_whole(module: Any) -> None:
    """Refuse a module that another strategy has cut.

    Raises:
        ConfigurationError: Its parameters are parts.
    """
    if any(hasattr(p, "placement") or getattr(p, "is_absent", False) for p in module.parameters()):
        raise ConfigurationError(
            f"{type(module).__name__} was already cut by another strategy; its parameters here are parts. Make a "
            "new module (load_from_checkpoint, or a second instance), or go on with the Trainer that cut it."
        )


def check_is_made(module: nn.Module) -> None:
    """Refuse layers whose shapes are not known yet.

    Raises:
        ConfigurationError: Lazy modules that have not run.
    """
    lazy = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigurationError(
            f"{', '.join(lazy[:3])} of {type(module).__name__} have no shape yet: lazy modules (nn.LazyLinear, ...) "
            "get theirs in the first forward, but the optimizer and the cut need it before. Run the model once on a "
            "batch of zeros in __init__, setup() or configure_model(), or give the sizes (nn.Linear)."
        )


def check_can_be_trained(
    module: Any, layout: Layout, callbacks: Iterable[Any], microbatches: int | str = "auto"
) -> None:
    """Refuse what tensor or pipeline parallelism cannot train; warn of what they train differently.

    Args:
        module: The user's module.
        layout: How it will be cut.
        callbacks: The Trainer's.
        microbatches: The user's choice; with one of them a batch is not cut, so nothing differs.

    Raises:
        ConfigurationError: A callback that averages weights, a training_step that reads the loader itself, or manual
            optimization with a pipeline.
    """
    parted = layout.replica_size > 1
    if parted and _reads_loader(module):
        raise ConfigurationError(
            f"training_step of {type(module).__name__} takes dataloader_iter and reads its batches itself. With "
            f"tensor_parallel_size={layout.tp} and pipeline_parallel_size={layout.pp} the batch is needed outside of "
            "it: to plan the cut, to compare it between ranks, to cut microbatches. Write training_step(self, batch, "
            "batch_idx), or use data parallelism alone."
        )
    for callback in callbacks if parted or (layout.zero and layout.dp > 1) else ():
        if any(c.__name__ == "ModelPruning" for c in type(callback).__mro__):
            raise ConfigurationError(
                f"{type(callback).__name__} exchanges parameters, and the storage they share with its copies, while "
                "the model is trained; here parameters are parts of larger buffers that were planned before. Use it "
                "with data parallelism alone: tensor_parallel_size=1, pipeline_parallel_size=1, zero_stage=0."
            )
        name = type(callback).__name__
        averages = any(c.__name__ in _AVERAGING for c in type(callback).__mro__)
        if averages and layout.zero == 3:
            raise ConfigurationError(
                f"{name} reads all parameters between steps, when zero_stage=3 has divided their values over "
                f"{layout.dp} replicas. Use zero_stage=2 (without tensor and pipeline parallelism), or average "
                "checkpoints afterwards."
            )
        if averages and parted:
            raise ConfigurationError(
                f"{name} copies the whole module before it is cut over {layout.tp} tensor-parallel ranks and "
                f"{layout.pp} pipeline stages, so its average has other shapes than the parts that are trained. "
                "Use it with tensor_parallel_size=1 and pipeline_parallel_size=1 (data parallelism works), or "
                "average checkpoints afterwards."
            )
    if layout.pp == 1:
        return
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} uses manual optimization (automatic_optimization=False) with "
            f"pipeline_parallel_size={layout.pp}. Its training_step calls backward itself, but with a pipeline no "
            "rank has the whole graph. Use pipeline_parallel_size=1 (tensor and data parallelism work), or "
            "automatic optimization."
        )
    if microbatches == 1:
        return
    drifting = sorted({type(m).__name__.lstrip("_") for m in module.modules() if _changes_buffers(m)})
    if drifting:
        rank_zero_warn(
            f"{', '.join(drifting)} changes buffers with every forward (power iterations, running statistics): in a "
            "pipeline once per microbatch instead of once per batch. Set num_microbatches=1 if that matters."
        )
    if any(isinstance(m, _BatchNorm) for m in module.modules()):
        rank_zero_warn(
            "BatchNorm in a pipeline normalises every microbatch by itself and updates its running statistics once "
            "per microbatch, as gradient accumulation does; replica 0's statistics are used for evaluation and "
            "saved. Set num_microbatches=1, or use a norm that does not depend on the batch, if that matters."
        )


def is_overridden(module: Any, callbacks: Iterable[Any], hooks: Sequence[str]) -> bool:
    """Whether the user's module, or a callback that is not Lightning's, has one of these hooks."""
    base = next(c for c in type(module).__mro__ if c.__name__ == "LightningModule")
    return any(getattr(type(module), h) is not getattr(base, h) for h in hooks if hasattr(base, h)) or any(
        hook in vars(c)
        for callback in callbacks
        for c in type(callback).__mro__
        if not c.__module__.startswith(("lightning.", "pytorch_lightning.", "lightning_3d."))
        for hook in hooks
    )


def _reads_loader(module: Any) -> bool:
    step = getattr(module, "training_step", None)
    return step is not None and "dataloader_iter" in inspect.signature(step).parameters


def _changes_buffers(module: Any) -> bool:
    """With every forward, other than BatchNorm."""
    return isinstance(module, _SpectralNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats)


def check_is_python(module: nn.Module, layout: Layout) -> None:
    """Refuse compiled code that reads parameters where nobody can follow it.

    Raises:
        ConfigurationError: TorchScript modules with parameters, and a model that is cut.
    """
    scripted = [
        name
        for name, part in module.named_modules()
        if isinstance(part, torch.jit.ScriptModule) and next(part.parameters(), None) is not None
    ]
    if scripted and layout.replica_size > 1:
        raise ConfigurationError(
            f"{', '.join(scripted[:3])} was compiled by torch.jit.script or torch.jit.trace. Its code reads its "
            f"parameters itself, so tensor_parallel_size={layout.tp} and pipeline_parallel_size={layout.pp} can "
            "neither follow nor cut it. Use the module it was made from (torch.compile of blocks works), or data "
            "parallelism alone."
        )


def check_owns_its_memory(module: nn.Module) -> None:
    """Refuse parameters that are two objects on one memory: each would get memory of its own.

    Raises:
        ConfigurationError: There are some; the message names them.
    """
    places: dict[object, list[tuple[int, int, str]]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if (place := _place_of(parameter.data)) is not None:
            space, begin, end = place
            places[space].append((begin, end, name))
    for found in places.values():
        for (_, end, first), (begin, _, second) in pairwise(sorted(found)):
            if begin < end:
                raise ConfigurationError(
                    f"parameters {first!r} and {second!r} are two objects that share memory (tied by `.data`, or "
                    "views of one tensor). Parameters get memory of their own here, or are cut, so they would drift "
                    "apart. Tie weights by assigning the parameter: `head.weight = embedding.weight`."
                )


def warn_of_views(module: Any) -> None:
    """Say what will go stale when parameters move into buffers of their own: tensors that share their memory."""
    owners: dict[object, list[tuple[int, int, str]]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if (place := _place_of(parameter.data)) is not None:
            owners[place[0]].append((*place[1:], name))
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            if f"{key}_orig" in part._parameters:  # computed anew by a hook
                continue
            for leaf in tree_leaves(value):
                owner = _owner_of(leaf, owners) if not isinstance(leaf, nn.Parameter) else None
                if owner is not None:
                    rank_zero_warn(
                        f"{f'{path}.{key}' if path else key} shares its memory with parameter {owner!r} (a view made "
                        "before training). Parameters get memory of their own with the optimizer's shards, or are cut, "
                        "so training will not change it. Make the view where it is used (a property, or in forward)."
                    )


def _owner_of(value: object, owners: Mapping[object, list[tuple[int, int, str]]]) -> str | None:
    """The parameter a tensor shares memory with."""
    place = _place_of(value)
    if place is None:
        return None
    space, begin, end = place
    return next((name for low, high, name in owners.get(space, ()) if low < end and begin < high), None)


def _place_of(value: object) -> tuple[object, int, int] | None:
    """Where a tensor's elements are: in which memory, from where to where. None for what has none of its own.

    Addresses count, not storages: what came back from numpy or dlpack has a storage of its own on the same memory.
    """
    if isinstance(value, Deferred):
        if value.window.cell.solid is None:
            return _extent(value.window.cell, 0, value.form)
        value = value.value()  # it was seen, and has an address
    if type(value) is not Tensor or value.is_meta or value.layout is not torch.strided:
        return None
    return _extent(value.device, value.data_ptr(), value)


def _extent(space: object, address: int, form: Tensor) -> tuple[object, int, int] | None:
    if not form.numel():
        return None
    begin = address or form.storage_offset() * form.itemsize
    last = sum((n - 1) * step for n, step in zip(form.shape, form.stride(), strict=True))
    return space, int(begin), int(begin) + (int(last) + 1) * form.itemsize
