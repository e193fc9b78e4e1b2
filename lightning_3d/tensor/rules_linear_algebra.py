"""Linear algebra of batches of matrices: every rank does its own matrices (heads); a matrix is never cut."""

from __future__ import annotations

from typing import Any

from lightning_3d.tensor.collectives import copy_in
from lightning_3d.tensor.operands import align, derive, localize
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import Args, Kwargs, bind, first, register_rule, words
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded


@register_rule("linalg_solve_triangular")
def _solve_triangular(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A X = B for batches; one whole A also for a B whose columns (rows, from the right: X A = B) are cut."""
    given = bind(("A", "B"), args, kwargs)
    a, b = given.pop("A"), given.pop("B")
    sharded = [x for x in (a, b) if isinstance(x, ShardedTensor)]
    from_right, cut = align(sharded)
    group = sharded[0].group
    free = -1 if given.get("left", True) else -2
    if from_right == free and not is_sharded(a):
        return derive(func(copy_in(a, group), b.local, **given), cut, b)
    if from_right > -3:
        raise NoRule(f"{func.__name__} of matrices that are cut")
    out = func(localize(a, from_right, cut, group), localize(b, from_right, cut, group), **given)
    return derive(out, cut.at(out.ndim + from_right), *sharded)


@first(*words("inverse linalg_inv linalg_cholesky linalg_matrix_exp matrix_exp linalg_det det logdet"))
def _each_matrix(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if x.placement.dim >= x.ndim - 2 or x.placement.padding:
        raise NoRule(f"{func.__name__} of matrices that are cut")
    return derive(func(x.local, *args[1:], **kwargs), x.placement, x)
