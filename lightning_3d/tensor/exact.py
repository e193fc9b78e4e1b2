"""HOW does user code run in an experiment?  In float64, without dropout, random state put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import RULES, Args, Kwargs, words
from lightning_3d.tensor.resolve import reentered
from lightning_3d.tensor.sharded import fall_back, is_sharded

_LIFTED = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}
_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_DROPOUTS = frozenset(
    words(
        """
        dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_alpha_dropout dropout1d dropout2d
        dropout3d feature_dropout_ feature_alpha_dropout_
        """
    )
)


class Exactly(TorchFunctionMode):
    """Run user code in float64 without dropout: requests for a lower precision are lifted, dropout passes through."""

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":
            with self:
                return reentered(func)(*args, **kwargs)
        if func in _BACKWARDS and not any(map(is_sharded, tree_leaves((args, kwargs)))):
            with self:  # also for what a checkpoint recomputes
                return reentered(func)(*args, **kwargs)
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        if "grouped_mm" in name and args[0].dtype == torch.float64:
            if not any(is_sharded(a) for a in args):
                return _grouped_product(*args, **kwargs)
            try:
                return RULES[name](_grouped_product, args, kwargs)
            except NoRule as reason:
                return fall_back(_grouped_product, args, kwargs, reason)
        if name in ("float", "half", "bfloat16"):
            return args[0].double()
        if name == "__get__" or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **{k: _lift(v) for k, v in kwargs.items()})
        if name in ("__set__", "__delete__"):  # of an attribute: the tensor itself, maybe a parameter of the original
            exact = args[0].dtype not in _LIFTED
            return func(args[0], *(_lift(v) if exact else v for v in args[1:]))
        args, kwargs = tree_map(_lift, (tuple(args), kwargs))
        return func(*args, **kwargs)


def _grouped_product(x: Tensor, weight: Tensor, *, offs: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    """`grouped_mm` of rows by groups, which torch does not have in float64."""
    ends = offs.tolist()
    parts = [x[a:b] @ weight[e] for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
    parts.append(x.new_zeros(x.shape[0] - ends[-1], weight.shape[-1]))
    out = torch.cat(parts)
    return out if bias is None else out + bias


def _lift(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _LIFTED.get(value, value)
    if isinstance(value, Tensor) and value.dtype in _LIFTED:
        return value.to(_LIFTED[value.dtype])
    return value


@contextmanager
def experiment(seed: int) -> Iterator[None]:
    """Random state and default dtype as before afterwards."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def relative_difference(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest entry; infinite if the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    got, want = _dense(got), _dense(want)
    if not (want.is_floating_point() or want.is_complex()):
        got, want = got.double(), want.double()
    difference = torch.where(got == want, 0, got - want).abs().max().item()  # the same infinity is no difference
    scale = want.where(want.isfinite(), 0).abs().max().item()
    return difference / scale if scale > 1e-13 else difference


def _dense(x: Tensor) -> Tensor:
    return (x.to_dense() if x.is_sparse else x).detach()


def widest(dtype: torch.dtype) -> torch.dtype:
    """The type an experiment uses in place of `dtype`."""
    return _LIFTED.get(dtype, dtype)
