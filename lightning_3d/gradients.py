"""HOW LARGE is the module's gradient on the whole mesh, and how is it clipped?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.engine import Engine
from lightning_3d.probe import own_named_parameters
from lightning_3d.zero import ReleasedParameter, Zero, scale_gradients, total_norm


def gradient_norm(engine: Engine, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
    """Norm of the whole mesh's gradient of one optimizer, every element counted once.

    Collectives: one all-reduce of one number over all ranks (stage 0: over the replica).
    """
    zero = _zero(engine)
    zero.shown.collect()
    by_id = {id(slot.held): slot for slot in zero.slots.values()}
    counted = engine.counted
    gradients = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slot = by_id.get(id(parameter))
            name = slot.name if slot is not None else engine.names[id(parameter)]
            if name in counted and parameter.grad is not None:
                gradients.append(parameter.grad)
    # a sharded optimizer's pieces are disjoint over dp; without shards every replica holds the same gradient
    group_of_ranks = engine.mesh.world if zero.stage else engine.mesh.replica
    with engine.mesh.ledger.during("clip"):
        return total_norm(gradients, group_of_ranks, engine.mesh.device, norm_type)


def clip(engine: Engine, optimizer: Optimizer, max_norm: float) -> Tensor:
    """Scale an optimizer's gradients to `max_norm` at most; returns the norm before. Collective, as the norm."""
    norm = gradient_norm(engine, optimizer)
    shown = _zero(engine).shown
    scale_gradients((shown.whole(p) for g in optimizer.param_groups for p in g["params"]), norm, max_norm)
    return norm


def norm_of(engine: Engine, gradients: Sequence[Tensor], norm_type: float) -> Tensor | None:
    """The mesh's norm of what one rank sees of the module's gradients (in `.grad` of its or the optimizer's).

    The same of its parameters, which tensor parallelism divides (what a pipeline has elsewhere cannot be read at all).

    Returns:
        None where these are other tensors, or where this rank holds all there is.

    Collectives: one all-reduce of one number over all ranks.
    """
    mesh, counted = engine.mesh, engine.counted
    if gradients and all(id(x) in engine.names for x in gradients):
        return _norm_of_weights(engine, gradients, norm_type)
    # every replica has the whole of these, so one of them counts
    first = mesh.at.dp == 0
    known = {id(p.grad): first and n in counted for n, p in engine.held.items() if p.grad is not None}
    whole = all(id(g) in known for g in gradients)
    for slot in _zero(engine).slots.values():
        if slot.held is not slot.parameter and slot.held.grad is not None:
            known[id(slot.held.grad)] = slot.name in counted and (first or slot.bucket.sharded)
    alone = mesh.layout.world_size == 1 or (gradients and whole and mesh.layout.replica_size == 1)
    if alone or not all(id(g) in known for g in gradients):
        return None
    with mesh.ledger.during("clip"):
        return total_norm([g for g in gradients if known[id(g)]], mesh.world, mesh.device, norm_type)


def _norm_of_weights(engine: Engine, weights: Sequence[Tensor], norm_type: float) -> Tensor | None:
    """Those that stages of a pipeline or ZeRO-3 have elsewhere say so themselves, when they are read."""
    elsewhere = any(isinstance(x, ReleasedParameter) or getattr(x, "is_absent", False) for x in weights)
    if engine.layout.tp == 1 or elsewhere:
        return None
    with torch._C.DisableTorchFunction():  # inside of a step they would show themselves whole
        mine = [x.detach() for x in weights if engine.counts(engine.names[id(x)])]
    with engine.mesh.ledger.during("norm"):
        return total_norm(mine, engine.mesh.tensor, engine.mesh.device, norm_type)


def norms_of(engine: Engine, module: nn.Module, norm_type: float, summed: bool) -> dict[str, Tensor] | None:
    """Norms of the whole gradients of a module's parameters, by its names; a parameter without a gradient has none.

    Args:
        engine: The run.
        module: The run's module, or a part of it.
        norm_type: p of the p-norm, or `inf`.
        summed: Gradients are reduced over the replicas; otherwise (between accumulated batches) each has its own.

    Returns:
        None where the module has parameters that are not the run's.

    Collectives: two all-reduces of a number per parameter, over all ranks (or those of the replica).
    """
    names = {}
    for name, parameter in own_named_parameters(module).items():
        if id(parameter) not in engine.names:
            return None
        names[name] = engine.names[id(parameter)]
    zero = _zero(engine)
    zero.shown.collect()
    group = engine.mesh.world if summed else engine.mesh.replica
    counted, infinite = engine.counted, math.isinf(norm_type)
    parts = torch.zeros(len(names), dtype=torch.float64, device=engine.mesh.device)
    there = torch.zeros(len(names), dtype=torch.uint8, device=engine.mesh.device)
    for index, name in enumerate(names.values()):
        gradient = _counted_gradient(engine, name, summed) if name in counted else None
        if gradient is None:
            continue
        there[index] = 1
        if gradient.numel():
            norm = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
            parts[index] = norm if infinite else norm**norm_type
    with engine.mesh.ledger.during("norm"):
        group.all_reduce(there, "max")
        group.all_reduce(parts, "max" if infinite else "sum")
    norms = parts if infinite else parts ** (1.0 / norm_type)
    dtypes = [engine.parameters[name].dtype for name in names.values()]
    return {
        name: norm.to(dtype)
        for name, norm, dtype, has in zip(names, norms.unbind(), dtypes, there.tolist(), strict=True)
        if has
    }


def norms_while_planned(module: nn.Module, norm_type: float) -> dict[str, Tensor]:
    """What a step that asks for norms finds while it is being followed: of gradients without values, not as uses."""
    with torch._C.DisableTorchFunction():
        named = own_named_parameters(module).items()
        return {name: p.grad.norm(norm_type) for name, p in named if p.grad is not None}


def _counted_gradient(engine: Engine, name: str, summed: bool) -> Tensor | None:
    """What this rank counts of a parameter's gradient."""
    parameter = engine.parameters[name]
    if not summed:
        return parameter.grad
    slot = _zero(engine).slot_of(parameter)
    if slot is not None and slot.bucket.sharded:
        return slot.held.grad
    held = parameter if slot is None else slot.held
    return held.grad if engine.mesh.at.dp == 0 else None


def _zero(engine: Engine) -> Zero:
    assert engine.zero is not None, "there are gradients only after set-up for `fit`"
    return engine.zero
