"""HOW do many small parameters share one all-reduce?  They enter the sharded region of a forward together.

A norm's weight that meets activations cut along the sequence, or over the heads, has a part of its gradient on every
rank. One by one that is an all-reduce per parameter and backward. The parameters a forward let in are let in by *one*
autograd node in the next forward, whose backward comes when all their gradients are there: one all-reduce of all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_3d.probe.intercept import original_apply

if TYPE_CHECKING:
    from lightning_3d.tensor.group import TensorGroup

_LARGEST = 1 << 20  # elements; a larger parameter is not worth the copy


class _EnterTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(p.detach() for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [g for g in grads if g is not None]
        totals = iter(_sums(given, ctx.group))
        return None, *(None if g is None else next(totals) for g in grads)


def _sums(grads: list[Tensor], group: TensorGroup) -> list[Tensor]:
    """Each summed over the ranks, by one all-reduce per type."""
    from lightning_3d.tensor.collectives import reduce_out

    if torch.is_grad_enabled():  # a graph of the gradient is built
        return [reduce_out(g, group) for g in grads]
    out: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(g.dtype for g in grads):
        alike = [(i, g) for i, g in enumerate(grads) if g.dtype == dtype]
        flat = group.all_reduce(torch.cat([g.reshape(-1) for _, g in alike]))
        parts = flat.split([g.numel() for _, g in alike])
        out.update({i: part.view(g.shape) for (i, g), part in zip(alike, parts, strict=True)})
    return [out[i] for i in range(len(grads))]


class SharedEntries:
    """The parameters of this rank that enter sharded regions whole.

    Only inside of `one_forward`: what one forward let in is let in together by the next. Outside (a recomputation in
    the backward, code of a user who runs a cut model himself) every parameter enters alone, with the same result.
    """

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Tensor]] = {}  # by id, in the order of the first entry
        self._inside: dict[int, Tensor] | None = None  # None: no forward is open
        self._fresh = False  # nobody has entered in this forward

    @contextmanager
    def one_forward(self) -> Iterator[None]:
        """Around one forward (of one microbatch and stage)."""
        before = self._inside, self._fresh
        self._inside, self._fresh = {}, True
        try:
            yield
        finally:
            self._inside, self._fresh = before

    def enter(self, parameter: Tensor, group: TensorGroup) -> Tensor | None:
        """Its alias inside the sharded region, or None if it has to enter alone.

        Collectives: one all-reduce of the gradients of all parameters that enter together, in the backward.
        """
        if self._inside is None or parameter.numel() > _LARGEST:
            return None
        if self._fresh:
            self._let_in(group)
        alias = self._inside.get(id(parameter))
        known = self._known.get(id(parameter))
        if known is None or known() is not parameter:
            self._known[id(parameter)] = weakref.ref(parameter)
        return alias

    def _let_in(self, group: TensorGroup) -> None:
        alive = {key: (r, p) for key, r in self._known.items() if (p := r()) is not None}
        self._known = {key: r for key, (r, _) in alive.items()}
        found = [p for _, p in alive.values() if p.requires_grad and p.is_leaf]
        group.entries += bool(found)
        aliases = original_apply(_EnterTogether, group, *found) if found else ()
        self._inside = {id(p): alias for p, alias in zip(found, aliases, strict=True)}
        self._fresh = False
