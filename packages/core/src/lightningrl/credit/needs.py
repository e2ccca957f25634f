"""What a credit assigner may need of a run: each need, who provides it, and the remedy, in this one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightningrl.errors import ConfigError

if TYPE_CHECKING:
    from lightningrl.config import Recipe
    from lightningrl.protocols import Capabilities
    from lightningrl.types import Task

__all__ = ["NEEDS", "SERVICES", "Need", "check_answers", "check_needs"]

SERVICES = frozenset({"logprobs", "values"})
"""Needs that the trainer backend meets, where it declares them."""


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
    "state_key": Need(lambda recipe: True, "every run has it: see lightningrl.credit.state_keys"),
    "judge": Need(lambda recipe: recipe.judge is not None, "add a [judge] table with base_url and model"),
    "answers": Need(lambda _: True, "give each training task an `answer`"),
    "logprobs": Need(lambda _: True, "use a trainer backend that tells logprobs of given tokens: backend = 'torch'"),
    "values": Need(
        lambda recipe: all(recipe.options_of(one).get("critic") is not None for one in recipe.all_policies.values() if one.trainable),
        "use a trainer backend with a critic that tells values, and give it one: backend = 'torch' and a table [learner.critic]",
    ),
}
"""By the name that stands in an assigner's `requires`."""


def check_needs(recipe: Recipe, use: Any, requires: Collection[str], capabilities: Capabilities | None = None) -> None:
    """Raise ConfigError with those that the run does not meet. `capabilities`: of its trainer backend; None = it declares none."""
    lacking = SERVICES - (SERVICES if capabilities is None else capabilities.services)
    unknown = f"which no run provides; there are: {', '.join(sorted(NEEDS))}"
    remedies = {name: NEEDS[name].remedy if name in NEEDS else unknown for name in sorted(requires)}
    if unmet := [name for name in remedies if name not in NEEDS or name in lacking or not NEEDS[name].is_met(recipe)]:
        raise ConfigError(*(f"credit assigner {use!r} needs {name!r}; {remedies[name]}" for name in unmet))


def check_answers(use: Any, requires: Collection[str], tasks: Iterable[Task]) -> None:
    """Raise ConfigError for the first training task without an answer, where the assigner needs one of each."""
    without = next((task for task in tasks if task.answer is None), None) if "answers" in requires else None
    if without is not None:
        raise ConfigError(f"credit assigner {use!r} needs 'answers', and task {without.id!r} has none; {NEEDS['answers'].remedy}")
