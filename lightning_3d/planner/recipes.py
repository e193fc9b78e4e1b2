"""HOW MANY bytes does a parameter cost?  Weights, gradients, optimizer state, by precision and ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_3d.errors import ConfigurationError, near


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter of training with Adam.

    Attributes:
        weight: The parameter.
        gradient: Its gradient.
        optimizer: Moments and master copy: shared over dp from ZeRO stage 1 on.
        extra: A second gradient (for accumulation in float32) that no stage shares.
        compute: In ZeRO 3, of a parameter that is gathered for use.
        reduced: Of a gradient on its way over dp.
    """

    weight: float
    gradient: float
    optimizer: float
    extra: float = 0.0
    compute: float = 2.0
    reduced: float = 4.0

    @property
    def total(self) -> float:
        """Bytes of one parameter with nothing shared."""
        return self.weight + self.gradient + self.optimizer + self.extra


RECIPES: dict[str, Recipe] = {
    "64-true": Recipe(8, 8, 16, compute=8, reduced=8),
    "32-true": Recipe(4, 4, 8, compute=4),
    "bf16-mixed": Recipe(4, 4, 8, compute=4),
    "16-mixed": Recipe(4, 4, 8, compute=4),
    "bf16-true": Recipe(2, 2, 12, reduced=2),
    "16-true": Recipe(2, 2, 12, reduced=2),
    "bf16-true-float32-gradients": Recipe(2, 4, 12),
    "pure-bf16": Recipe(2, 2, 4, reduced=2),
    "pure-bf16-float32-reduction": Recipe(2, 2, 4),
    # Megatron-LM: bf16 or fp16 weights, gradients added in float32, master and moments
    "megatron": Recipe(2, 4, 12),
    "megatron-bf16-gradients": Recipe(2, 2, 12, reduced=2),
    # Rajbhandari et al. 2020 (ZeRO), section 3.1: K = 12
    "zero-paper": Recipe(2, 2, 12, reduced=2),
    # measured on BigScience's machines: beside master and moments a float32 gradient and a flat copy, all shared
    "deepspeed": Recipe(2, 2, 20, reduced=2),
    "deepspeed-bf16": Recipe(2, 2, 20, extra=4),
    # FSDP with mixed precision: float32 shards, gathered in bf16, reduced in float32
    "fsdp": Recipe(4, 4, 8, compute=2),
    "nanotron": Recipe(2, 2, 12, extra=4),
}
_OFFLOADED = "-offloaded"
"""Behind a recipe's name: the optimizer's bytes are in the host's memory."""


def recipe_named(name: str) -> Recipe:
    """Bytes per parameter by name.

    Raises:
        ConfigurationError: There is no such recipe.
    """
    found = RECIPES.get(name.removesuffix(_OFFLOADED))
    if found is None:
        raise ConfigurationError(f"recipe {name!r} is not known; known are {', '.join(RECIPES)}.{near(name, RECIPES)}")
    return replace(found, optimizer=0.0) if name.endswith(_OFFLOADED) else found


def recipe_of_run(precision: str, master_weights: bool, float32_gradients: bool, offload: bool) -> tuple[str, str]:
    """The precision of products and the recipe of a run of this library.

    Args:
        precision: The Trainer's: "bf16-mixed", "32-true", ...
        master_weights, float32_gradients, offload: The strategy's arguments.
    """
    name = precision if precision in RECIPES else "32-true"
    if name in ("bf16-true", "16-true"):
        if not master_weights:
            name = "pure-bf16"
        elif float32_gradients:
            name = "bf16-true-float32-gradients"
    products = {"64": "fp64", "32": "fp32", "16": "fp16"}.get(precision.split("-")[0], "bf16")
    return products, name + (_OFFLOADED if offload else "")


class States(NamedTuple):
    """Bytes of model states on one rank."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def states(params: float, recipe: Recipe, zero: int, dp: int) -> States:
    """Bytes of `params` parameters on one of `dp` ranks (Rajbhandari et al. 2020, Table 1)."""
    weights = params * recipe.weight / (dp if zero >= 3 else 1)
    gradients = params * (recipe.gradient / (dp if zero >= 2 else 1) + recipe.extra)
    return States(weights, gradients, params * recipe.optimizer / (dp if zero >= 1 else 1))
