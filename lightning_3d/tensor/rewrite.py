"""Execute a plan: parameters become this rank's shards, in place; the user's code runs on unmodified.

The `nn.Parameter` objects stay the same ones (so optimizers built before keep working), only their data is replaced. A
module with cut parameters changes its class so that reading `module.weight` gives the view with the global shape.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.comm import Communicator
from lightning_3d.errors import TensorPlanError
from lightning_3d.tensor.decisions import TensorPlan
from lightning_3d.tensor.group import TensorGroup, as_group
from lightning_3d.tensor.layers import (
    ColumnParallelLinear,
    Cuts,
    RowParallelLinear,
    VocabParallelEmbedding,
    describe_cuts,
    mark_parameters,
    shard_parameter,
    sharded_view,
)
from lightning_3d.tensor.placement import Placement

_classes: dict[Any, type[nn.Module]] = {}


def rewrite(module: nn.Module, plan: TensorPlan, group: TensorGroup | Communicator) -> None:
    """Cut `module` as planned.

    Every cut parameter gets `.placement` and `.global_shape`. Exact `nn.Linear` and `nn.Embedding` become
    `ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding`; subclasses of them inherit from both; all
    others get a subclass of the same name.

    Args:
        module: The whole model, as planned; all ranks hold the same weights.
        plan: For this model.
        group: The tensor-parallel ranks; a `Communicator` gets default knobs. Its `sequence_dim` follows the plan.

    Raises:
        TensorPlanError: The model is already cut, or is not the one that was planned.
    """
    group = as_group(group)
    names = dict(module.named_parameters(remove_duplicate=False))
    _check(names, plan, group)
    group.sequence_dim = -2 if plan.sequence else None
    cuts: dict[str, Cuts] = {}
    done: set[int] = set()
    for name, parameter in names.items():
        cut = plan.decisions[name].placement
        if cut is None:
            continue
        if id(parameter) not in done:
            shard_parameter(parameter, cut, group, frozenset([name]))
            done.add(id(parameter))
        path, _, leaf = name.rpartition(".")
        cuts.setdefault(path, {})[leaf] = (cut, frozenset([name]))
    swapped: dict[int, Cuts] = {}
    for path, own in cuts.items():
        child = module.get_submodule(path)
        swapped.setdefault(id(child), {}).update(own)
        _adopt(child, swapped[id(child)], group)


def cut_optimizer_state(optimizer: Optimizer, group: TensorGroup) -> None:
    """State that was made before the rewrite (Adagrad's sums, moments filled by the user), cut as its parameter is."""
    for parameter, state in optimizer.state.items():
        cut: Placement | None = getattr(parameter, "placement", None)
        if cut is None:
            continue
        shape = parameter.global_shape  # type: ignore[attr-defined]
        for key, value in state.items():
            if isinstance(value, Tensor) and tuple(value.shape) == shape:
                state[key] = cut.to_local(value, group.rank, group.size).clone()


def _check(names: dict[str, nn.Parameter], plan: TensorPlan, group: TensorGroup) -> None:
    """The model is whole and is the one the plan was made for."""
    if plan.size != group.size:
        raise TensorPlanError(f"the plan is for {plan.size} tensor-parallel ranks, the group has {group.size}.")
    if set(names) != set(plan.decisions):
        odd = sorted(set(names) ^ set(plan.decisions))
        raise TensorPlanError(
            f"the plan was made for another model: parameters that do not agree: {', '.join(odd[:5])}."
        )
    first: dict[int, str] = {}
    for name, parameter in names.items():
        if hasattr(parameter, "placement"):
            raise TensorPlanError(
                f"{name} is already cut; a model is rewritten once. Keep the plan and use the model as it is."
            )
        if tuple(parameter.shape) != plan.shapes[name]:
            raise TensorPlanError(f"{name} has shape {tuple(parameter.shape)}, the plan is for {plan.shapes[name]}.")
        other = first.setdefault(id(parameter), name)
        if plan.decisions[name].placement != plan.decisions[other].placement:
            raise TensorPlanError(
                f"{name} and {other} are one tied parameter, but the plan cuts them differently "
                f"({plan.decisions[name].placement} and {plan.decisions[other].placement})."
            )


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class a module had before it was rewritten."""
    return module.__dict__.get("tensor_original_class", type(module))


def _adopt(module: nn.Module, cuts: Cuts, group: TensorGroup) -> None:
    """Give a module with cut parameters a class that shows them whole."""
    before = original_class(module)
    module.__dict__.update(tensor_group=group, tensor_cuts=cuts, tensor_original_class=before)
    parallel = _parallel_class(module, cuts)
    if isinstance(module, parallel) and parallel is not nn.Module:
        return
    if before in (nn.Linear, nn.Embedding) and parallel is not nn.Module:
        module.__class__ = parallel
        return
    module.__class__ = _cut_class(before, parallel, tuple(sorted(cuts)))


def _cut_class(before: type[nn.Module], parallel: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of `before`, with its name, that shows the parameters `names` whole."""
    key = (before, parallel, names)
    if key not in _classes:

        def restore(self: nn.Module, state: dict[str, Any]) -> None:
            before.__setstate__(self, state)
            mark_parameters(self)

        def reduce(self: nn.Module, protocol: Any) -> Any:
            """Pickled by what it is made of: the class itself has no place in its module."""
            return (_empty, key, *before.__reduce_ex__(self, protocol)[2:])

        def extra_repr(self: nn.Module) -> str:
            known = (before.extra_repr(self), describe_cuts(self))
            return ", ".join(text for text in known if text)

        body: dict[str, Any] = {name: sharded_view(name) for name in names}
        body.update(__module__=before.__module__, __qualname__=before.__qualname__, __doc__=before.__doc__)
        body.update(__setstate__=restore, __reduce_ex__=reduce, extra_repr=extra_repr)
        bases = (before,) if parallel is nn.Module else (before, parallel)
        _classes[key] = type(before.__name__, bases, body)
    return _classes[key]


def _empty(before: type[nn.Module], parallel: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An instance whose state is still to be set."""
    made: nn.Module = object.__new__(_cut_class(before, parallel, names))
    return made


def _parallel_class(module: nn.Module, cuts: Cuts) -> type[nn.Module]:
    """Which of our layers the cuts make of it; `nn.Module` for none."""
    if "weight" not in cuts:
        return nn.Module
    cut = cuts["weight"][0]
    if isinstance(module, nn.Linear):
        return ColumnParallelLinear if cut.dim == 0 else RowParallelLinear
    if isinstance(module, nn.Embedding) and cut.dim == 0:
        return VocabParallelEmbedding
    return nn.Module
