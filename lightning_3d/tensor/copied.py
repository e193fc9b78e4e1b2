"""HOW is an average of weights cut that the step does not use?  Like its original, with which a hook combines it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_3d.probe import copies_in
from lightning_3d.tensor.decisions import TensorPlan
from lightning_3d.tensor.facts import Facts


def cut_copies(plan: TensorPlan, module: nn.Module, facts: Facts) -> None:
    """Decide about copies (`copies_in`) as about their originals, where the step has not decided.

    Args:
        plan: What the step decided; changed.
        module: The whole module; if its parameters have values, these count, too.
        facts: About its parameters.
    """
    trained = {name for name, parameter in facts.names.items() if parameter.requires_grad and name in plan.used}
    for name, original in copies_in(module, trained).items():
        decision = plan.decisions[original]
        demanded = facts.key_of[id(facts.names[name])] in facts.demands
        if decision.placement is None or name in plan.used or demanded:
            continue
        plan.decisions[name] = replace(decision, reason=f"like {original}, of which it is a copy")
        if original in plan.dealt:
            plan.dealt.add(name)
    for alias, name in plan.aliases.items():
        plan.decisions[alias] = plan.decisions[name]
