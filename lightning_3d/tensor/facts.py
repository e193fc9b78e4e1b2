"""WHAT does the planner know before it runs anything?  Names, ties, repeated blocks, and what the user demands."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_3d.errors import TensorPlanError, near
from lightning_3d.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from lightning_3d.tensor.recorded.eager import run_eagerly

DEMANDS = ("column", "row", "vocab", "replicate")


@dataclass
class Facts:
    """The parameters of a module as the planner sees them; a *key* stands for the same parameter of equal blocks.

    Attributes:
        names: All parameter names, tied ones included, in order -> parameter.
        patterns: Name -> name with the indices of equal blocks replaced by `*`.
        key_of: `id(parameter)` -> key: its pattern, made unique where the user demands different things of blocks.
        shapes: Key -> global shape.
        demands: Key -> what the user demands ("column", "row", "vocab", "replicate").
        demanded_by: Key -> the pattern or class that says so.
    """

    names: dict[str, nn.Parameter]
    patterns: dict[str, str]
    key_of: dict[int, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    demands: dict[str, str] = field(default_factory=dict)
    demanded_by: dict[str, str] = field(default_factory=dict)

    def elements(self, key: str) -> int:
        return math.prod(self.shapes[key])


def gather_facts(module: nn.Module, overrides: Mapping[str, str]) -> Facts:
    """Read the module and the overrides.

    Raises:
        TensorPlanError: An override has an unknown kind, matches nothing, or contradicts another demand; or a parameter
            is already cut.
    """
    run_eagerly(module)
    names = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in names.items():
        if hasattr(parameter, "placement"):
            raise TensorPlanError(
                f"{name} is already cut over tensor-parallel ranks. A model is planned once, before it is rewritten; "
                "layers in it must be built without `group=`."
            )
    facts = Facts(names, block_patterns(module, names))
    demands = {**_declared(module), **_overridden(module, names, overrides)}
    for name, (kind, source) in _declared(module).items():
        chosen, pattern = demands[name]
        if chosen != kind:
            raise TensorPlanError(
                f"override {pattern!r}: {chosen!r} contradicts {name}, which is declared as {kind!r} by {source}. "
                "Remove the override, or use a plain layer."
            )
    by_id: dict[int, tuple[str, str]] = {id(names[n]): demand for n, demand in demands.items()}
    for name, parameter in names.items():
        if id(parameter) in facts.key_of:
            continue
        demand = by_id.get(id(parameter))
        key = facts.patterns[name] if demand is None else f"{facts.patterns[name]} [{demand[0]}]"
        facts.key_of[id(parameter)] = key
        facts.shapes.setdefault(key, tuple(parameter.shape))
        if demand is not None:
            facts.demands[key], facts.demanded_by[key] = demand
    return facts


def block_patterns(module: nn.Module, names: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Parameter name -> name with indices of equal blocks (children of a list, same class and shapes) as `*`."""
    kinds = {}
    for path, child in module.named_modules():
        kinds[path] = (type(child), tuple((k, tuple(p.shape)) for k, p in child.named_parameters()))
    repeated = set()
    for path, child in module.named_modules():
        if not isinstance(child, (nn.ModuleList, nn.Sequential)) or len(child) < 2:
            continue
        blocks = [f"{path}.{i}" if path else str(i) for i in range(len(child))]
        same = all(b in kinds for b in blocks) and len({kinds[b] for b in blocks}) == 1
        if same and any(child[0].children()):
            repeated.update(blocks)
    patterns = {}
    for name in names:
        parts = name.split(".")
        starred = ("*" if ".".join(parts[: i + 1]) in repeated else part for i, part in enumerate(parts))
        patterns[name] = ".".join(starred)
    return patterns


def _declared(module: nn.Module) -> dict[str, tuple[str, str]]:
    """What layers say that the user wrote as parallel ones: weight name -> (kind, class)."""
    classes = {ColumnParallelLinear: "column", RowParallelLinear: "row", VocabParallelEmbedding: "vocab"}
    found = {}
    for path, child in module.named_modules():
        for cls, kind in classes.items():
            if isinstance(child, cls):
                found[f"{path}.weight" if path else "weight"] = (kind, cls.__name__)
    return found


def _tails(paths: Iterable[str]) -> set[str]:
    """The last parts of names, for patterns that leave the beginning open."""
    return {".".join(path.split(".")[-count:]) for path in paths for count in (1, 2, 3)}


def _overridden(
    module: nn.Module, names: Mapping[str, nn.Parameter], overrides: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Parameter name -> (demand, pattern); where several patterns match, the last one counts."""
    demands: dict[str, tuple[str, str]] = {}
    for pattern, kind in overrides.items():
        if kind not in DEMANDS:
            raise TensorPlanError(
                f"tensor_parallel_plan: {kind!r} for {pattern!r} is not one of {', '.join(DEMANDS)}."
                + near(str(kind), DEMANDS)
            )
        hits = [n for n in names if any(fnmatch.fnmatchcase(path, pattern) for path in _paths(n))]
        if not hits:
            known = {path for n in names for path in _paths(n)}
            raise TensorPlanError(
                f"tensor_parallel_plan: {pattern!r} matches no parameter and no module of {type(module).__name__}."
                f"{near(pattern, sorted(known)) or near(pattern.strip('*.'), sorted(_tails(known)))} Patterns are "
                "matched (fnmatch) against whole names; `lightning-3d explain` lists them."
            )
        if kind != "replicate":
            hits = [n for n in hits if names[n].ndim >= 2]
            if not hits:
                raise TensorPlanError(
                    f"tensor_parallel_plan: {pattern!r} with {kind!r} matches only vectors. Matrices are cut; biases "
                    "follow their matrix. Name the matrix, or use 'replicate'."
                )
        demands.update((n, (kind, pattern)) for n in hits)
    return demands


def _paths(name: str) -> list[str]:
    """A parameter's name and the paths of all modules around it."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
