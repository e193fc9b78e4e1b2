"""WHERE do a model's first values come from, and when?  Large models get them after the cut, each rank its part.

Three kinds of tensors come out of `configure_model` (or out of `__init__`): with values; deferred (made inside of
`building_model`); and on the meta device, where the user said so: these are made by their modules' initialisation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.comm import Communicator
from lightning_3d.deferred import (
    agree_on_records,
    building,
    is_deferred,
    is_unwritten,
    leave_empty,
    reading_later,
    realize,
    realize_all,
    realize_all_but_parameters,
)
from lightning_3d.layout import Layout
from lightning_3d.materialize import materialize
from lightning_3d.proof import LARGEST_RUN


def divides_parameters(layout: Layout) -> bool:
    """Whether a rank keeps less than the whole model."""
    return layout.replica_size > 1 or (layout.zero == 3 and layout.dp > 1)


@contextmanager
def building_model(divided: bool, device: torch.device, world: Communicator | None) -> Iterator[None]:
    """Around code that builds the model: large tensors get their values later.

    Args:
        divided: A rank may keep less than the whole model; otherwise nothing is deferred.
        device: Where the model will be.
        world: All ranks, if they run already: rank zero's random state counts. Collective then.
    """
    if not divided:
        yield
        return
    if world is not None:
        _set_rng_states(world.broadcast_object(_collect_rng_states(include_cuda=False), 0))
    with building(device), reading_later():
        yield


def materialize_meta(module: nn.Module, divided: bool, device: torch.device) -> None:
    """What the user built on the meta device gets values, or (`divided`) will get them."""
    with building(device) if divided else nullcontext():
        materialize(module, device)


def settle(module: nn.Module, layout: Layout, world: Communicator, runs_whole: bool) -> None:
    """Before the module is planned: which of its parameters stay without values?  And the others are made equal.

    Those of models that are run to be proved get their values now; those of larger models when they are cut.

    Args:
        module: The LightningModule, converted to the run's precision.
        layout: The run's.
        world: All ranks.
        runs_whole: The user wants the model to be run whatever its size (`verify=True`).

    Collectives: those of `agree_on_records`; broadcasts of all tensors with values from rank zero.
    """
    size = sum(p.numel() for p in module.parameters())
    if runs_whole or (size <= LARGEST_RUN and layout.replica_size > 1):
        realize_all(module)
    realize_all_but_parameters(module)
    agree_on_records(module, world)
    eager = [t for t in [*module.parameters(), *module.buffers()] if not is_deferred(t)]
    _tell_cost(module, layout, sum(t.nbytes for t in eager), size)
    with torch.no_grad():
        for tensor in eager:
            world.broadcast(tensor.data if tensor.is_contiguous() else _contiguous(tensor), 0)


def without_values(module: nn.Module) -> list[str]:
    """Names of the parameters that were made without values; they will be zeros, the same on all ranks."""
    return [name for name, parameter in module.named_parameters() if is_unwritten(parameter)]


def warn_of_zeros(names: Collection[str]) -> None:
    """Somebody left parameters without values, and no checkpoint is read into them."""
    if names:
        some = ", ".join([*list(names)[:3], *["..."][: len(names) > 3]])
        rank_zero_warn(
            f"lightning_3d: {len(names)} parameters were made without values and no checkpoint is read into them, so "
            f"they begin as zeros: {some}. Pass ckpt_path if there is one; build the model without "
            "init_module(empty_init=True) to get values by its own initialisation."
        )


def forget_values(module: nn.Module) -> None:
    """A checkpoint will be read into all parameters: what they were to get need not be computed."""
    for parameter in module.parameters():
        leave_empty(parameter)


def finish(module: nn.Module, optimizers: Collection[Optimizer]) -> None:
    """After the cut: whatever has no values gets them, of parameters this rank's part."""
    realize_all(module)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    realize(value)


def _tell_cost(module: nn.Module, layout: Layout, nbytes: int, size: int) -> None:
    if layout.world_size > 1 and divides_parameters(layout) and size > LARGEST_RUN and nbytes > 4 * LARGEST_RUN:
        rank_zero_info(
            f"lightning_3d: {type(module).__name__} was built before the Trainer could divide it: {nbytes / 2**30:.1f} "
            "GiB on every rank, until it is cut. If that is too much, build the layers in configure_model(): then each "
            "rank makes its part only, with the same values."
        )


def _contiguous(tensor: Tensor) -> Tensor:
    tensor.data = tensor.data.contiguous()
    return tensor.data
