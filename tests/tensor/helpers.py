"""Shards of a global tensor on all ranks, and what a function of them gives back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.comm import Communicator
from lightning_3d.probe import intercept_functions
from lightning_3d.tensor import (
    Placement,
    ShardedTensor,
    TensorGroup,
    ThreadCommunicator,
    function_guard,
    local,
    placement,
    plan_tensor_parallel,
    run_simulated,
    verify_tensor_plan,
)
from lightning_3d.testing import relative_error

EXACT = 1e-9


class Refused(BaseException):
    """A rule refused (used where gathering would hide it)."""


def refusing_groups(size: int) -> list[TensorGroup]:
    """All ranks as dry groups; an op without a rule raises `Refused` instead of gathering."""

    def refuse(*_: Any) -> None:
        raise Refused

    groups = []
    for rank in range(size):
        group = TensorGroup(Communicator("tp", rank, size), dry=True)
        group.on_gather = refuse
        group.strict = True  # nothing that needs another rank
        groups.append(group)
    return groups


def shards(x: Tensor, cut: Placement, groups: Sequence[TensorGroup]) -> list[ShardedTensor]:
    return [ShardedTensor(cut.to_local(x, g.rank, g.size).clone(), cut, g) for g in groups]


def reassembled(parts: Sequence[Tensor], size: int) -> Tensor:
    """The global tensor from what the ranks hold (equal everywhere if it is whole)."""
    cut = placement(parts[0])
    if cut is None:
        assert all(torch.equal(p, parts[0]) for p in parts)
        return parts[0]
    for rank, part in enumerate(parts):  # copies hold equal values
        assert torch.equal(local(part), local(parts[rank - rank % cut.copies]))
    return cut.to_global([local(p) for p in parts], size)


def compare(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], cuts: Sequence[Placement | None], size: int
) -> list[ThreadCommunicator]:
    """`function` and all its gradients on shards against the global ones; the simulated ranks (for their ledgers)."""
    originals = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    out = function(*originals)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    (out * weight).sum().backward()

    def body(comm: ThreadCommunicator) -> Any:
        group = TensorGroup(comm)
        leaves, shown = [], []
        for tensor, cut in zip(tensors, cuts, strict=True):
            leaf = tensor.clone() if cut is None else cut.to_local(tensor, comm.rank, size).clone()
            leaf.requires_grad_(tensor.is_floating_point())
            leaves.append(leaf)
            shown.append(leaf if cut is None else ShardedTensor(leaf, cut, group))
        result = function(*shown)
        assert tuple(result.shape) == tuple(out.shape)
        (result * weight).sum().backward()
        return result.detach(), leaves, comm

    with intercept_functions(function_guard, 1):
        ranks = run_simulated(size, body)
    got = reassembled([r[0] for r in ranks], size)
    assert relative_error(got, out) < 1e-12
    for index, (original, cut) in enumerate(zip(originals, cuts, strict=True)):
        grads = [r[1][index].grad for r in ranks]
        if not original.requires_grad:
            continue
        if cut is None:
            assert all(relative_error(g, original.grad) < 1e-12 for g in grads), f"gradient of operand {index}"
        else:
            whole = cut.to_global_gradient(
                [torch.zeros_like(r[1][index]) if g is None else g for r, g in zip(ranks, grads, strict=True)], size
            )
            assert relative_error(whole, original.grad) < 1e-12, f"gradient of operand {index}"
    return [r[2] for r in ranks]


def random_factors(n: int, rng: random.Random) -> list[int]:
    """A random shape of `n` elements."""
    shape: list[int] = []
    while n > 1:
        factor = rng.choice([k for k in range(2, n + 1) if n % k == 0])
        shape.append(factor)
        n //= factor
    if rng.random() < 0.3:
        shape.insert(rng.randrange(len(shape) + 1), 1)
    return shape or [1]


def check_model(case: tuple[Any, Any, float], size: int, sequence: bool = False) -> None:
    """Loss and every gradient of the cut model against the original.

    Args:
        case: (makes the model, its step, least part of the parameters that two ranks must divide).
        size: Number of ranks.
        sequence: With sequence parallelism, which may gather.
    """
    build, step, least = case
    torch.manual_seed(0)
    model = build()
    plan = plan_tensor_parallel(model, step, size, sequence=sequence)
    report = verify_tensor_plan(model, plan, step)
    assert report.worst <= EXACT, str(report)
    if not sequence:
        assert size != 2 or plan.sharded_fraction >= least, f"\n{plan}"
        assert report.gathers == 0
