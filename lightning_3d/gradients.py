"""HOW LARGE is the module's gradient on the whole mesh, and how is it clipped?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.engine import Engine
from lightning_3d.zero import Zero, scale_gradients, total_norm


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

    Returns:
        None where these are other tensors, or where this rank holds all there is.

    Collectives: one all-reduce of one number over all ranks.
    """
    mesh, counted = engine.mesh, engine.counted
    # every replica has the whole of these, so one of them counts
    first = mesh.at.dp == 0
    known = {id(p.grad): first and n in counted for n, p in engine.held.items() if p.grad is not None}
    whole = all(id(g) in known for g in gradients)
    for slot in _zero(engine).slots.values():
        if slot.held is not slot.parameter and slot.held.grad is not None:
            known[id(slot.held.grad)] = slot.name in counted
    alone = mesh.layout.world_size == 1 or (gradients and whole and mesh.layout.replica_size == 1)
    if alone or not all(id(g) in known for g in gradients):
        return None
    with mesh.ledger.during("clip"):
        return total_norm([g for g in gradients if known[id(g)]], mesh.world, mesh.device, norm_type)


def _zero(engine: Engine) -> Zero:
    assert engine.zero is not None, "there are gradients only after set-up for `fit`"
    return engine.zero
