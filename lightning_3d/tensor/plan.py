"""HOW should an unmodified model be cut?  Assume, follow the user's code, refute, repeat.

Greedy in execution order: `follow.Follow` assumes every weight that meets a whole input to be column-parallel. What the
rules cannot carry refutes an assumption: another segmentation of that weight is tried (a fused q|k|v), else it stays
whole (`search.Search`). This file puts the experiment around it: fake parameters, state as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lightning_3d.errors import TensorPlanError
from lightning_3d.probe import FakeParameters
from lightning_3d.tensor.copied import cut_copies
from lightning_3d.tensor.decisions import TensorPlan
from lightning_3d.tensor.facts import Facts, gather_facts
from lightning_3d.tensor.search import LONELY, Search, Step
from lightning_3d.tensor.untouched import quiet_failures, untouched

_ENOUGH = 0.95
_WORTH = 0.01  # part of the parameters for which another plan is worth its price
_MOST_SHIFTS = 4


def plan_tensor_parallel(
    module: nn.Module,
    step: Step,
    size: int,
    *,
    overrides: Mapping[str, str] | None = None,
    sequence: bool = False,
    strict: float | None = None,
    smallest_vocabulary: int = 65,
    device: torch.device | None = None,
) -> TensorPlan:
    """Decide how every parameter of `module` is cut over `size` ranks.

    Nothing is computed: parameters are fake while `step` runs, values that do not depend on them stay real, and the
    module and the random state are left as they were. The plan does not depend on the rank.

    Args:
        module: The whole model, on any device (also meta).
        step: Runs the user's step on a real batch: `lambda m: m.training_step(batch, 0)`. It must be repeatable.
        size: Number of tensor-parallel ranks.
        overrides: Pattern (fnmatch, on parameter names and module paths) -> "column", "row", "vocab" or "replicate".
            The last pattern that matches a parameter counts.
        sequence: Cut activations between blocks along dim -2 (sequence parallelism).
        strict: Least fraction of the parameters that must be cut.
        smallest_vocabulary: Embeddings and heads with fewer rows stay whole.
        device: Where the fake parameters are; default: where the module's parameters are (meta: CPU).

    Returns:
        The plan; whatever could not be cut is "replicated", with the reason.

    Raises:
        TensorPlanError: An override matches nothing or is refuted by the user's code, a parameter is already cut, less
            than `strict` could be cut, or shapes depend on values that a meta model does not have.

    Collectives: none.
    """
    begin = time.perf_counter()
    facts = gather_facts(module, overrides or {})
    if device is None:
        device = next((p.device for p in facts.names.values() if not p.is_meta), torch.device("cpu"))
    runs = 0

    def attempt(relaxed: bool, whole: Mapping[str, str]) -> TensorPlan:
        nonlocal runs
        search = Search(module, step, size, facts, sequence, not relaxed, smallest_vocabulary)
        search.beliefs.replicated.update(whole)
        plan = _run(search, module, facts, device)
        runs += plan.runs
        return plan

    # first without reductions over cut features: a norm between two linears breaks their pair. Only if that leaves much
    # whole, with them (a norm over all heads costs one small all-reduce)
    best, relaxed = attempt(False, {}), False
    if best.sharded_fraction < _ENOUGH:
        other = attempt(True, {})
        if other.sharded_fraction > best.sharded_fraction + _WORTH:
            best, relaxed = other, True
    best = _shifted(best, facts, partial(attempt, relaxed))
    cut_copies(best, module, facts)
    best.runs, best.seconds = runs, time.perf_counter() - begin
    if strict is not None and best.sharded_fraction < strict:
        raise _too_little(best, strict)
    return best


def _run(search: Search, module: nn.Module, facts: Facts, device: torch.device) -> TensorPlan:
    """With fake parameters; if the step needs values (or torch cannot follow it without), with the real ones."""
    try:
        with untouched(module) as start, quiet_failures(), FakeParameters(module, device) as fakes:
            names = {i: facts.key_of[id(facts.names[name])] for i, name in fakes.names.items()}
            return search.settle(names, start)
    except TensorPlanError:
        raise
    except Exception as error:
        meta = next((name for name, p in facts.names.items() if p.is_meta), None)
        if meta is not None and isinstance(error, (DynamicOutputShapeException, DataDependentOutputException)):
            raise TensorPlanError(
                f"the step has shapes that depend on values ({error}), so planning needs real parameters, but {meta} "
                "is on the meta device. Materialise the model, or move that part out of the step."
            ) from error
        if meta is not None:
            raise
    # outside of the handler: if the step fails with real parameters too, that is the error the user should see
    with untouched(module) as start:
        plan = search.settle({id(p): facts.key_of[id(p)] for p in facts.names.values()}, start)
    plan.used_values = True
    return plan


def _shifted(best: TensorPlan, facts: Facts, attempt: Callable[[Mapping[str, str]], TensorPlan]) -> TensorPlan:
    """Pairs begin where they cut most: a small layer before them is left whole if that frees a large one.

    In order of execution a small first layer (the input projection of a network, say) would pair with the large second
    one, and the large third would be left over.
    """
    whole: dict[str, str] = {}
    keys = {name: facts.key_of[id(parameter)] for name, parameter in facts.names.items()}
    total = sum(facts.elements(key) for key in keys.values())
    for _ in range(_MOST_SHIFTS):
        order = list(dict.fromkeys(keys.values()))
        decisions = {keys[name]: decision for name, decision in best.decisions.items()}
        lonely = [k for k in order if decisions[k].kind == "replicated" and LONELY in decisions[k].reason]
        lonely = [k for k in lonely if facts.elements(k) > _WORTH * total]
        if not lonely:
            break
        left = max(lonely, key=facts.elements)
        columns = [k for k in order[: order.index(left)] if decisions[k].kind == "column" and len(facts.shapes[k]) > 1]
        smaller = [k for k in columns if facts.elements(k) < facts.elements(left) and k not in facts.demands]
        better = None
        for key in smaller[-_MOST_SHIFTS:]:
            plan = attempt({**whole, key: f"left whole so that {left} can be cut"})
            if plan.sharded_fraction > best.sharded_fraction + _WORTH:
                better = plan
                whole[key] = f"left whole so that {left} can be cut"
                break
        if better is None:
            break
        best = better
    return best


def _too_little(plan: TensorPlan, least: float) -> TensorPlanError:
    whole = "\n".join(f"  {r.pattern} {r.shape}: {r.why}" for r in plan.rows() if r.kind == "replicated")
    return TensorPlanError(
        f"only {plan.sharded_fraction:.1%} of the parameters can be cut over {plan.size} tensor-parallel ranks; at "
        f"least {least:.1%} was asked for. What stays whole, and why:\n{whole}"
    )
