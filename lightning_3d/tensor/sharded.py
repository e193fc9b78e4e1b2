"""WHAT does user code see of a cut tensor?  The global shape, while this rank holds one shard.

`ShardedTensor` works at the torch-function level, above autograd: the autograd graph is the one of the local tensors.
It has no storage, and an operation that would slip past the rules ends in `__torch_dispatch__`, which always raises, so
wrong data cannot be read silently. An operation without a rule gathers its operands and goes on with whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_3d.probe.intercept import original_apply
from lightning_3d.tensor import collectives
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.in_place import is_in_place
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, Rule, cached_handlers, words
from lightning_3d.tensor.resolve import resolve

NO_SOURCES: frozenset[str] = frozenset()


class ShardedTensor(torch.Tensor):
    """One rank's shard of a tensor, shown with the global shape.

    Args:
        local: This rank's shard (padding included).
        placement: How the global tensor is cut.
        group: The ranks that share it.
        sources: Names of the parameters whose cut this one comes from.
        shape: Global shape, if already known.
    """

    shows_global_shape = True
    local: Tensor
    placement: Placement
    group: TensorGroup
    sources: frozenset[str]
    parameter: Tensor | None = None  # of a view on a parameter, if `local` is not the parameter itself
    _global_shape: torch.Size

    @staticmethod
    def __new__(
        cls: type[ShardedTensor],
        local: Tensor,
        placement: Placement,
        group: TensorGroup,
        sources: frozenset[str] = NO_SOURCES,
        shape: torch.Size | None = None,
    ) -> ShardedTensor:
        if shape is None:
            shape = torch.Size(placement.global_shape(local.shape))
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self.local, self.placement, self.group, self.sources = local, placement, group, sources
        self._global_shape = shape
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # everything is set in __new__
        pass

    # plain Python attributes are found before the C getters of Tensor: no torch-function call
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._global_shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._global_shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.local.device

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._leaf.requires_grad_(value)

    @property
    def _leaf(self) -> Tensor:
        return self.local if self.parameter is None else self.parameter

    @property
    def grad(self) -> Tensor | None:
        """The gradient (of a parameter, or kept by `retain_grad`), cut as the tensor is."""
        grad = self._leaf.grad
        if grad is not None and self.parameter is None and self.placement.copies > 1:  # of a parameter it is summed
            grad = self.group.sum_copies(grad, self.placement.copies)
        return None if grad is None else ShardedTensor(grad, self.placement, self.group, self.sources)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and type(value) is not ShardedTensor:
            value = collectives.scatter(value.detach(), self.placement, self.group)
        elif value is not None and not value.placement.like(self.placement):
            value = collectives.scatter(whole(value).detach(), self.placement, self.group)
        with torch._C.DisableTorchFunction():  # while a step is followed, this is no operation of it
            self._leaf.grad = None if value is None else local(value)

    @property
    def data(self) -> Any:
        return ShardedTensor(self.local.data, self.placement, self.group, self.sources, self._global_shape)

    @data.setter
    def data(self, value: Tensor) -> None:
        """New values for a parameter's shard, which stays where it is: given whole, cut alike, or as a shard."""
        if not isinstance(self._leaf, torch.nn.Parameter):
            setter: Any = Tensor.data.__set__  # type: ignore[attr-defined]
            fall_back(setter, (self, value), {}, NoRule("it would exchange the storage", fatal=True))
            return
        if type(value) is ShardedTensor:
            shard = value.local if value.placement.like(self.placement) else self._part_of(whole(value))
        elif tuple(value.shape) == tuple(self._global_shape):
            shard = self._part_of(value)
        else:
            shard = value
        if shard.shape != self.local.shape or shard.dtype != self.dtype:
            name = ", ".join(sorted(self.sources)) or "a cut tensor"
            raise ValueError(
                f"{name}.data is set to a {value.dtype} tensor of shape {tuple(value.shape)}; it has the global shape "
                f"{tuple(self._global_shape)}, of which this rank holds {tuple(self.local.shape)}, in {self.dtype}. "
                "Give it a value of one of these shapes: a cut parameter keeps its shape and dtype while it is trained."
            )
        with torch.no_grad():
            self._leaf.data.copy_(shard.detach())

    def _part_of(self, value: Tensor) -> Tensor:
        return self.placement.to_local(value.detach(), self.group.rank, self.group.size)

    def dim(self) -> int:
        return len(self._global_shape)

    def numel(self) -> int:
        return self._global_shape.numel()

    def size(self, dim: int | None = None) -> Any:
        return self._global_shape if dim is None else self._global_shape[dim]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor(global {tuple(self.shape)}, {self.placement}, local {tuple(self.local.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        import copy

        return ShardedTensor(copy.deepcopy(self.local, memo), self.placement, self.group, self.sources, self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        raise RuntimeError(
            f"a tensor-parallel activation reached {func} below the sharding rules (inside a C++ extension, or a "
            "custom autograd.Function outside of a training step). Set the layer that made it to 'replicate' in the "
            "overrides, or register a rule (lightning_3d.tensor.register_rule)."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return call(func, args, kwargs or {})


def call(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `func` on arguments of which at least one is sharded."""
    handler: Rule | None = cached_handlers.get(func)
    if handler is None:
        handler = cached_handlers[func] = resolve(func)
    try:
        if kwargs.get("out") is not None:
            raise NoRule("`out=` writes into storage that is cut, or into a whole tensor from a cut one", fatal=True)
        return handler(func, args, kwargs)
    except NoRule as reason:
        return fall_back(func, args, kwargs, reason)


def fall_back(
    func: Any, args: Args, kwargs: Kwargs, reason: NoRule, again: Callable[[Args, Kwargs], Any] | None = None
) -> Any:
    """No sharded form: refute the plan while planning; otherwise gather the operands and run the global operation.

    Args:
        func: The operation.
        args, kwargs: Its arguments.
        reason: Why it has none.
        again: Of a custom Function: calls it on other arguments.
    """
    operands = [x for x in tree_leaves((args, kwargs)) if type(x) is ShardedTensor]
    if not reason.fatal and len({x.placement.axis for x in operands}) > 1:
        # activations cut along the sequence meet others: first gather only those
        args, kwargs = tree_map_only(ShardedTensor, _whole_sequence, (tuple(args), kwargs))
        return call(func, args, kwargs) if again is None else again(args, kwargs)
    group, sources = operands[0].group, merged_sources(operands)
    name = operation_name(func)
    if group.on_gather is not None:
        group.on_gather(sources, name, reason, operands)
    shapes = ", ".join(str(tuple(x.shape)) for x in operands)
    made_by = ", ".join(sorted(sources)) or "an activation that is cut along the sequence"
    if reason.fatal:
        raise RuntimeError(
            f"{name} on a tensor-parallel activation of global shape {shapes} cannot be done on shards: {reason}. "
            f"The activation comes from {made_by}; set that layer to 'replicate' in the overrides, or rewrite the "
            "operation."
        )
    group.gathers += 1
    group.warn_once(
        name,
        sources,
        f"{name} has no tensor-parallel form here ({reason}): activations of shape {shapes} are gathered, which is "
        f"right but slow. They come from {made_by}.",
    )
    in_place = is_in_place(func, name, args, kwargs)
    target = args[0] if args else kwargs.get("input")
    args, kwargs = tree_map_only(ShardedTensor, whole, (tuple(args), kwargs))
    out = func(*args, **kwargs)
    if name.startswith("_foreach_") and name.endswith("_"):
        for cut, changed in zip(target or (), args[0], strict=True):
            _write_back(cut, changed)
        return None
    if type(target) is not ShardedTensor or not in_place:
        return _lent(out, args, kwargs, operands, again is not None)
    _write_back(target, args[0] if args else kwargs["input"])
    return None if name == "__setitem__" else target


def _write_back(target: Any, changed: Tensor) -> None:
    """What an operation did in place to a gathered copy, done to the shard."""
    if type(target) is ShardedTensor:
        target.local.copy_(collectives.scatter(changed, target.placement, target.group))


def operation_name(func: Any) -> str:
    """The name of a torch function; for an attribute, the attribute's."""
    name: str = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in ("__get__", "__set__") else name


def _lent(out: Any, args: Args, kwargs: Kwargs, operands: list[ShardedTensor], of_function: bool) -> Any:
    """What an operation gives of gathered operands: if it is a view of one, a write into it would be lost.

    While planning the write is noticed and the layer stays whole; with a plan that the user forced it is an error. The
    views a custom Function gives are left as they are: autograd refuses the write itself, and module hooks look for the
    Function's node.
    """
    homes = {storage_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    group = operands[0].group

    def part(x: Tensor) -> Tensor:
        if type(x) is ShardedTensor or storage_of(x) not in homes:
            return x
        if group.on_gather is not None:
            group.lent[storage_of(x)] = x, merged_sources(operands)
            return x
        watched = x.requires_grad and torch.is_grad_enabled() and not of_function
        return original_apply(collectives.WholeCopyOfACutTensor, x) if watched else x

    return tree_map_only(Tensor, part, out)


def storage_of(x: Tensor) -> int:
    """Which storage a tensor lies in; 0 for a cut one."""
    with torch._C.DisableTorchFunction():
        return 0 if type(x) is ShardedTensor else x.untyped_storage()._cdata


def write_into_lent(name: str, args: Args, kwargs: Kwargs, func: Any, group: TensorGroup) -> frozenset[str]:
    """Planning only: whose gathered copy this operation changes in place; empty for none."""
    target = args[0] if args else kwargs.get("input")
    if not group.lent or not isinstance(target, Tensor) or not is_in_place(func, name, args, kwargs):
        return NO_SOURCES
    return group.lent.get(storage_of(local(target)), (None, NO_SOURCES))[1]


def _whole_sequence(x: ShardedTensor) -> Tensor:
    return whole(x) if x.placement.axis == "sequence" else x


# ---------------------------------------------------------------- what other rooms use
def is_sharded(x: Any) -> bool:
    """`x` is a `ShardedTensor`."""
    return type(x) is ShardedTensor


def local(x: Tensor) -> Tensor:
    """The tensor this rank holds: the shard, or `x` itself if it is whole."""
    return x.local if type(x) is ShardedTensor else x


def placement(x: Any) -> Placement | None:
    """How `x` is cut, or None if it is whole."""
    return x.placement if type(x) is ShardedTensor else None


def wrap(local: Tensor, placement: Placement, group: TensorGroup, sources: Iterable[str] = NO_SOURCES) -> ShardedTensor:
    """Show a shard as the global tensor."""
    return ShardedTensor(local, placement, group, frozenset(sources))


def map_local(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`f` of the local tensor, cut as `x` is. For `f` that keep the shape and act on each element alone."""
    if type(x) is ShardedTensor:
        return ShardedTensor(f(x.local), x.placement, x.group, x.sources)
    return f(x)


def whole(x: Tensor) -> Tensor:
    """The global tensor; differentiable.

    Collectives: one all-gather of the global tensor over the group (backward: none), if `x` is sharded.
    """
    if type(x) is not ShardedTensor:
        return x
    x.group.conversions += 1
    out = collectives.gather(x.local, x.placement, x.group)
    if x.group.on_whole is not None:
        x.group.on_whole(x, out)
    return out


def merged_sources(tensors: Iterable[Any]) -> frozenset[str]:
    """Sources of a result that comes from several sharded tensors."""
    found = [t.sources for t in tensors if type(t) is ShardedTensor]
    return found[0] if len(found) == 1 else frozenset().union(*found)


# ---------------------------------------------------------------- hot methods skip the torch-function machinery
_HOT = words(
    "view reshape transpose permute contiguous unsqueeze expand to float split chunk unbind __getitem__ __add__ "
    "__mul__ __sub__ __neg__ __truediv__ softmax masked_fill flatten"
)


def _hot_method(name: str) -> Callable[..., Any]:
    func = getattr(torch.Tensor, name)

    def method(self: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack():  # a mode (the pipeline's, a default device) must see the operation
            return func(self, *args, **kwargs)
        return call(func, (self, *args), kwargs)

    method.__name__ = name
    return method


for _method in _HOT:
    setattr(ShardedTensor, _method, _hot_method(_method))
