"""How far two computations of one probability may lie apart without a fault: what number formats make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightningrl.recipe import Recipe

__all__ = ["FAR", "ROUNDING", "Rounding", "number_format"]

FAR = math.log(1.2)
"""A log-ratio beyond which PPO's clip, 0.2, takes a token for one that has been learned already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """What one number format makes of the same weights in another order of summation."""

    mean: float
    """Of |log p(trainer) - log p(rollout)|."""
    far: float
    """Share of tokens beyond `FAR`."""
    largest: float | None
    """Of any token; None = a few are large without a fault."""


ROUNDING = {
    # 24 bits: clean runs of the examples have means of some 1e-7 and a largest of 1e-5; ten times that is no rounding any more
    "float32": Rounding(mean=1e-5, far=0.0, largest=1e-3),
    # 8 bits: 0.2 % of each logit, so some hundredths where engine and learner sum in another order, and a few tokens far off
    "bfloat16": Rounding(mean=0.03, far=0.01, largest=None),
}


def number_format(recipe: Recipe, policy: str) -> str:
    """Of engine and learner: float32 where both are torch's and nothing else is said."""
    said = recipe.options_of(recipe.all_policies[policy]).get("dtype", "float32" if recipe.backend == "torch" else "bfloat16")
    return said if said in ROUNDING else "bfloat16"
