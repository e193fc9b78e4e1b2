"""Randomness on shards: a stream per rank inside a sharded region, one common stream outside.

Each dropout on a sharded activation draws one seed from the *default CPU generator*, which is in step on all ranks, and
runs on a stream made of that seed and the rank. The default generator stays in step, nothing has to be tracked, and a
recomputed checkpoint replays its masks by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.group import TensorGroup, is_shape_only
from lightning_3d.tensor.operands import derive, no_copies
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import Args, Kwargs, argument, first, words
from lightning_3d.tensor.sharded import ShardedTensor

_GOLDEN = 0x9E3779B97F4A7C15  # spreads neighbouring ranks over the seed space


@contextmanager
def rank_stream(group: TensorGroup, x: Tensor) -> Iterator[None]:
    """Random numbers for `x`'s device that differ between the ranks; the default generators end as they began.

    The CPU generator advances by one draw (of the seed). A tensor without values draws nothing.
    """
    if is_shape_only(x):
        yield
        return
    # a draw from the CPU generator: reading it does not wait for a device
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(0, 2**62))
    module = torch.get_device_module(x.device) if x.device.type != "cpu" else torch.random
    state = module.get_rng_state() if x.device.type == "cpu" else module.get_rng_state(x.device)
    own = (seed + _GOLDEN * (group.rank + 1)) % 2**63
    try:
        if x.device.type == "cpu":
            torch.default_generator.manual_seed(own)
        else:
            with module.device(x.device):
                module.manual_seed(own)
        yield
    finally:
        if x.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            module.set_rng_state(state, x.device)


def global_dropout_mask(x: Tensor, p: float) -> Tensor:
    """The scaled dropout mask one process would draw for the whole `x`."""
    return F.dropout(torch.ones(tuple(x.shape), dtype=x.dtype, device=x.device), p, True)


def dropout(x: ShardedTensor, p: float, in_place: bool = False) -> ShardedTensor:
    """Dropout with an own mask per rank, or exactly the global one if the group asks for it.

    In place it writes into the shard: what shares its storage (a view, the base of one) sees it, too.
    """
    if x.group.exact_dropout:
        mask = x.placement.to_local(global_dropout_mask(x, p), x.group.rank, x.group.size)
        return derive(x.local.mul_(mask) if in_place else x.local * mask, x.placement, x)
    with rank_stream(x.group, x.local):
        return derive(F.dropout(x.local, p, True, in_place), x.placement, x)


@first("dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def _dropout(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, p = args[0], argument(args, kwargs, 1, "p", 0.5)
    training = argument(args, kwargs, 2, "training", kwargs.get("train", True))
    in_place = func.__name__.endswith("_") or argument(args, kwargs, 3, "inplace", False)
    if not training or p == 0:
        return x
    if not func.__name__.startswith("dropout"):
        raise NoRule(f"{func.__name__} couples whole channels")
    no_copies(x.placement, "other masks on")
    out = dropout(x, p, in_place)
    return x if in_place else out


@first("dropout1d", "dropout2d", "dropout3d")
def _channel_dropout(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if not argument(args, kwargs, 2, "training", True) or argument(args, kwargs, 1, "p", 0.5) == 0:
        return args[0]
    raise NoRule(f"{func.__name__} couples whole channels")


@first(*words("bernoulli bernoulli_ rand_like randn_like normal_ uniform_ exponential_ log_normal_ cauchy_"))
def _draw(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Random values of the shape of `x`, other ones on every rank."""
    x = args[0]
    if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
        raise NoRule(f"{func.__name__} with the user's own generator")
    no_copies(x.placement, "other random numbers on")
    if x.group.exact_dropout:
        return _drawn_exactly(func, x, args[1:], kwargs)
    with rank_stream(x.group, x.local):
        out = func(x.local, *args[1:], **kwargs)
    return x if func.__name__.endswith("_") else derive(out, x.placement, x)


def _drawn_exactly(func: Any, x: ShardedTensor, rest: Args, kwargs: Kwargs) -> Any:
    """The random values one process would draw for the whole `x`: this rank's part of them."""
    if func.__name__ == "bernoulli" or any(isinstance(a, Tensor) for a in (*rest, *kwargs.values())):
        raise NoRule(f"{func.__name__} draws by the values of a tensor")
    drawn = func(torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device), *rest, **kwargs)
    part = x.placement.to_local(drawn, x.group.rank, x.group.size)
    if func.__name__.endswith("_"):
        x.local.copy_(part)
        return x
    return derive(part, x.placement, x)
