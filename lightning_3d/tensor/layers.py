"""HOW is one layer cut?  The three parallel layers, for the rewrite and for use by hand.

`rewrite` turns an `nn.Linear` or `nn.Embedding` into one of these in place. By hand there are two ways:

* `ColumnParallelLinear(8, 32)` in a model is a *declaration*: it is an ordinary `nn.Linear` until the model is
  rewritten, and the planner has to cut it that way.
* `ColumnParallelLinear(8, 32, group=...)` is cut at once. All ranks must build it from the same random state.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.comm import Communicator
from lightning_3d.deferred import is_deferred
from lightning_3d.errors import TensorPlanError
from lightning_3d.tensor import collectives
from lightning_3d.tensor.group import TensorGroup, as_group
from lightning_3d.tensor.operands import along_sequence, partial_to_whole, sequence_to_whole
from lightning_3d.tensor.placement import Placement
from lightning_3d.tensor.rules_autograd import hook_on_whole
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded, whole

Cuts = dict[str, tuple[Placement, frozenset[str]]]
"""Parameter of a module -> (how it is cut, its full name as source)."""


def shard_parameter(
    parameter: nn.Parameter, cut: Placement, group: TensorGroup, sources: frozenset[str] = frozenset()
) -> None:
    """Replace a parameter's data by this rank's shard; the object stays the same.

    Hooks on its gradient that were registered before go on to see the whole gradient.
    """
    hooks: Any = parameter._backward_hooks or {}
    for key, hook in list(hooks.items()):
        hooks[key] = hook_on_whole(hook, cut, group, sources)
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        warnings.warn(
            f"{', '.join(sorted(sources)) or 'a parameter'} has a hook by register_post_accumulate_grad_hook. It is "
            "cut over tensor-parallel ranks, so from now on the hook finds this rank's part of it, and of its "
            "gradient. Leave the parameter whole with tensor_parallel_plan if the hook needs all of it.",
            stacklevel=2,
        )
    parameter.global_shape = tuple(parameter.shape)  # type: ignore[attr-defined]
    parameter.placement = cut  # type: ignore[attr-defined]
    shard = cut.to_local(parameter.detach(), group.rank, group.size).clone(memory_format=torch.contiguous_format)
    parameter.grad = None
    if parameter.requires_grad and not is_deferred(parameter):
        # a gradient accumulator made before (a kept graph, a hook) expects the old shape; another dtype drops it
        other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
        parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = shard


def mark_parameters(module: nn.Module) -> None:
    """Tell a copied (or loaded) module's parameters again that they are shards: copies of parameters forget it."""
    for name, (cut, _) in (module.__dict__.get("tensor_cuts") or {}).items():
        parameter: Any = module._parameters.get(name)
        if parameter is not None and not hasattr(parameter, "placement") and not getattr(parameter, "is_absent", False):
            parameter.placement, parameter.global_shape = cut, cut.global_shape(parameter.shape)


def sharded_view(name: str) -> property:
    """A property that shows a module's parameter with its global shape."""

    def get(module: nn.Module) -> Any:
        parameter = module._parameters.get(name)
        if parameter is None:
            if name in module._parameters:
                return None
            raise AttributeError(f"{type(module).__name__} has no parameter {name!r}")
        cuts: Cuts = module.__dict__.get("tensor_cuts", {})
        if name not in cuts or getattr(parameter, "is_absent", False):  # absent: another pipeline stage holds it
            return parameter
        if is_sharded(parameter):  # `torch.func.functional_call` with what `named_parameters()` gave
            return parameter
        cut, source = cuts[name]
        group: TensorGroup = module.tensor_group  # type: ignore[assignment]
        if cut.copies == 1:
            return ShardedTensor(parameter, cut, group, source)
        view = ShardedTensor(collectives.sum_copies(parameter, cut.copies, group), cut, group, source)
        view.parameter = parameter
        return view

    return property(get)


class _ParallelLayer(nn.Module):
    """State of a cut module: `tensor_group` and `tensor_cuts` are None until it is cut."""

    tensor_group: TensorGroup | None = None
    tensor_cuts: Cuts | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        mark_parameters(self)

    def _cut_by_hand(self, cuts: dict[str, Placement], group: TensorGroup) -> None:
        for name, cut in cuts.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                shard_parameter(parameter, cut, group)
        kept = {name: cut for name, cut in cuts.items() if self._parameters.get(name) is not None}
        self.__dict__["tensor_cuts"] = {n: (c, frozenset([f"{type(self).__name__}.{n}"])) for n, c in kept.items()}
        self.__dict__["tensor_group"] = group


def _divisible(what: str, width: int, size: int) -> None:
    if width % size:
        raise TensorPlanError(
            f"{what} is {width}, which cannot be cut into {size} equal parts. Choose a multiple of {size}, or an "
            "ordinary nn.Linear."
        )


class ColumnParallelLinear(nn.Linear, _ParallelLayer):
    """Y = X A^T + b with A cut over its rows (the columns of A^T): Y_r = X A_r^T + b_r.

    | pass | computes | communicates over tp | bytes |
    |---|---|---|---|
    | forward | Y_r from the whole X | nothing | 0 |
    | backward dX | sum over r of dY_r A_r | all-reduce, shared by all readers of X (*) | size of X |
    | backward dA, db | dY_r^T X, sum of dY_r: own rows only | nothing | 0 |

    (*) it runs while dA is computed, if this layer is the only reader.

    With sequence parallelism X comes cut along the sequence: forward an all-gather, backward a reduce-scatter of X.

    Args:
        in_features: Size of X's last dim.
        out_features: Size of Y's last dim, all ranks together.
        bias: Learn an additive bias.
        gather_output: Return the whole Y (an all-gather of Y) instead of one that is cut along its last dim.
        group: Cut at once over these ranks. Without it the layer is a declaration for the planner.
        device: As in `nn.Linear`.
        dtype: As in `nn.Linear`.

    Raises:
        TensorPlanError: With `group`, if the outputs cannot be dealt evenly.
    """

    gather_output = False
    weight: Any = sharded_view("weight")
    bias: Any = sharded_view("bias")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        group: TensorGroup | Communicator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.gather_output = gather_output
        if group is not None:
            group = as_group(group)
            _divisible("ColumnParallelLinear: out_features", out_features, group.size)
            cut = Placement(0, (out_features,))
            self._cut_by_hand({"weight": cut, "bias": cut}, group)

    def forward(self, x: Tensor) -> Tensor:
        y = self._local_forward(x)
        return whole(y) if self.gather_output else y

    def _local_forward(self, x: Tensor) -> Tensor:
        group, cuts = self.tensor_group, self.tensor_cuts
        if group is None or cuts is None:
            return F.linear(x, self.weight, self.bias)
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        cut, source = cuts["weight"]
        plain = not torch._C._len_torch_function_stack() and (bias is None or _cut_alike(cuts, cut))
        plain = plain and not is_sharded(weight) and not is_sharded(bias) and cut.copies == 1
        if not plain or cut.dim != 0 or (type(x) is ShardedTensor and not along_sequence(x)):
            return F.linear(x, self.weight, self.bias)
        assert weight is not None
        if type(x) is ShardedTensor:
            y = F.linear(sequence_to_whole(x), weight, bias)
        else:
            y = collectives.column_linear(x, weight, bias, group)
        return ShardedTensor(y, cut.at(y.ndim - 1), group, source)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {describe_cuts(self)}"


class RowParallelLinear(nn.Linear, _ParallelLayer):
    """Y = X A^T + b with A cut over its columns, X over its last dim: Y = sum over r of X_r A_r^T, then + b.

    | pass | computes | communicates over tp | bytes |
    |---|---|---|---|
    | forward | sum of the partial products, b added once after it | all-reduce of Y | size of Y |
    | backward dX | dY A_r: own part only | nothing | 0 |
    | backward dA, db | dY^T X_r; db is whole and equal on all ranks | nothing | 0 |

    With sequence parallelism Y is left cut along the sequence: forward a reduce-scatter, backward an all-gather of Y.
    Given a whole X, each rank takes its part of it (backward: an all-gather of dX).

    Args:
        in_features: Size of X's last dim, all ranks together.
        out_features: Size of Y's last dim.
        bias: Learn an additive bias.
        group: Cut at once over these ranks. Without it the layer is a declaration for the planner.
        device: As in `nn.Linear`.
        dtype: As in `nn.Linear`.

    Raises:
        TensorPlanError: With `group`, if the inputs cannot be dealt evenly.
    """

    weight: Any = sharded_view("weight")
    bias: Any = sharded_view("bias")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: TensorGroup | Communicator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if group is not None:
            group = as_group(group)
            _divisible("RowParallelLinear: in_features", in_features, group.size)
            self._cut_by_hand({"weight": Placement(1, (in_features,))}, group)

    def forward(self, x: Tensor) -> Tensor:
        group, cuts = self.tensor_group, self.tensor_cuts
        if group is None or cuts is None or torch._C._len_torch_function_stack():
            return F.linear(x, self.weight, self.bias)
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        cut, _ = cuts["weight"]
        fits = type(x) is ShardedTensor and x.placement.dim == x.ndim - 1 and x.placement.like(cut)
        if not fits or cut.dim != 1 or cut.padding or "bias" in cuts or is_sharded(weight):
            return F.linear(x, self.weight, self.bias)
        assert weight is not None
        y = partial_to_whole(F.linear(x.local, weight), group)  # type: ignore[attr-defined]
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {describe_cuts(self)}"


class VocabParallelEmbedding(nn.Embedding, _ParallelLayer):
    """Y = E[index] with the table E cut over its rows (tokens); padded so that every rank has as many.

    | pass | computes | communicates over tp | bytes |
    |---|---|---|---|
    | forward | own rows, zeros for tokens of other ranks, summed | all-reduce of Y | size of Y |
    | backward dE | own rows only; padding rows get none | nothing | 0 |

    Args:
        num_embeddings: Number of tokens, all ranks together; need not be divisible.
        embedding_dim: Size of each row.
        padding_idx: As in `nn.Embedding`.
        group: Cut at once over these ranks. Without it the layer is a declaration for the planner.
        **options: As in `nn.Embedding`.
    """

    weight: Any = sharded_view("weight")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: TensorGroup | Communicator | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **options)
        if group is not None:
            group = as_group(group)
            cut = Placement(0, (num_embeddings,), -num_embeddings % group.size)
            self._cut_by_hand({"weight": cut}, group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {describe_cuts(self)}"


def _cut_alike(cuts: Cuts, weight: Placement) -> bool:
    return "bias" in cuts and cuts["bias"][0].like(weight)


def describe_cuts(module: nn.Module) -> str:
    """How a module's parameters are cut, for its `repr`: `rank 0 of 2, weight 48+48 along dim 0`."""
    group: TensorGroup | None = module.__dict__.get("tensor_group")
    cuts: Cuts = module.__dict__.get("tensor_cuts") or {}
    if group is None or not cuts:
        return "not cut yet"
    words = [f"rank {group.rank} of {group.size}"]
    for name, (cut, _) in cuts.items():
        sizes = "+".join(map(str, cut.segments)) + (f" (+{cut.padding} padding)" if cut.padding else "")
        shared = f", shared by {cut.copies} ranks each" if cut.copies > 1 else ""
        if cut.shares:
            shared = f", outputs gathered by {'+'.join(map(str, cut.shares))} ranks"
        words.append(f"{name} {sizes} along dim {cut.dim}{shared}")
    return ", ".join(words)
