"""What a credit assigner may need of a run: each need, who provides it, and the remedy, in this one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightningrl.errors import ConfigError

if TYPE_CHECKING:
    from lightningrl.config import Recipe

__all__ = ["NEEDS", "Need", "check_needs"]


@dataclass(frozen=True, slots=True)
class Need:
    """Something that not every run has."""

    is_met: Callable[[Recipe], bool]
    remedy: str


NEEDS: Mapping[str, Need] = {
    "group": Need(
        lambda recipe: recipe.loop.group_size > 1,
        "set loop.group_size above 1, or take one that compares nothing: credit.use = 'reinforce'",
    ),
    "turn_rewards": Need(lambda recipe: bool(recipe.intermediate_rewards), "add an [intermediate_rewards.NAME] table"),
    "agents": Need(
        lambda recipe: bool(recipe.adapters or recipe.roles),
        "name an adapter in `adapters`, or the agent's roles in [roles.NAME] tables",
    ),
    "branches": Need(
        lambda recipe: recipe.loop.max_staleness == 0,
        "a branch is sampled by the weights of the rollout that it leaves: set loop.max_staleness = 0",
    ),
    "judge": Need(lambda recipe: recipe.judge is not None, "add a [judge] table with base_url and model"),
}
"""By the name that stands in an assigner's `requires`."""


def check_needs(recipe: Recipe, use: Any, requires: Collection[str]) -> None:
    """Raise ConfigError with those that the run does not meet."""
    unknown = f"which no run provides; there are: {', '.join(sorted(NEEDS))}"
    remedies = {name: NEEDS[name].remedy if name in NEEDS else unknown for name in sorted(requires)}
    if unmet := [name for name in remedies if name not in NEEDS or not NEEDS[name].is_met(recipe)]:
        raise ConfigError(*(f"credit assigner {use!r} needs {name!r}; {remedies[name]}" for name in unmet))
