"""HOW is an average of weights cut that the step does not use?  Like its original, with which a hook combines it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from torch import nn

from lightning_3d.probe import copies_in
from lightning_3d.tensor.decisions import TensorPlan
from lightning_3d.tensor.facts import Facts


def cut_copies(plan: TensorPlan, module: nn.Module, facts: Facts, used: Set[str]) -> None:
    """Decide about copies (`copies_in`) as about their originals, where the step has not decided.

    Args:
        plan: What the step decided; changed.
        module: The whole module.
        facts: About its parameters.
        used: Keys of the weights that the step uses.
    """
    keys = {name: facts.key_of[id(parameter)] for name, parameter in facts.names.items()}
    trained = {name for name, parameter in facts.names.items() if parameter.requires_grad and keys[name] in used}
    for name, original in copies_in(module, trained).items():
        decision = plan.decisions[original]
        if decision.placement is None or keys[name] in used or keys[name] in facts.demands:
            continue
        plan.decisions[name] = replace(decision, reason=f"like {original}, of which it is a copy")
        if original in plan.dealt:
            plan.dealt.add(name)
    for alias, name in plan.aliases.items():
        plan.decisions[alias] = plan.decisions[name]
