"""Needs of credit assigners: each, who provides it, and the remedy, in one place. Distributions add their own by the
hook `lightningrl_credit_needs`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightningrl.errors import ConfigError
from lightningrl.plugins import Plugin, PluginManager
from lightningrl.protocols import Need

if TYPE_CHECKING:
    from lightningrl.backends import Capabilities
    from lightningrl.recipe import Recipe
    from lightningrl.types import Task, Trajectory, TrajectoryGroup, Transition

__all__ = ["NEEDS", "PLUGINS", "check_answers", "check_needs", "find_unrecorded", "installed_needs"]


def _trajectories(groups: Sequence[TrajectoryGroup]) -> Iterator[Trajectory]:
    return (trajectory for group in groups for trajectory in group.trajectories)


def _calls(groups: Sequence[TrajectoryGroup]) -> Iterator[Transition]:
    return (call for trajectory in _trajectories(groups) for call in trajectory.transitions)


def _compares(groups: Sequence[TrajectoryGroup]) -> bool:
    return any(sum(trajectory.reward is not None for trajectory in group.trajectories) > 1 for group in groups)


def _has_evidence(groups: Sequence[TrajectoryGroup]) -> bool:
    return any(trajectory.evidence is not None for trajectory in _trajectories(groups))


NEEDS: Mapping[str, Need] = {
    "group": Need(
        lambda recipe: recipe.loop.group_size > 1,
        "set loop.group_size above 1, or take one that compares nothing: credit.use = 'reinforce'",
        _compares,
    ),
    "turn_rewards": Need(
        lambda recipe: bool(recipe.intermediate_rewards),
        "add an [intermediate_rewards.NAME] table",
        lambda groups: any(call.rewards for call in _calls(groups)),
    ),
    "agents": Need(
        lambda recipe: bool(recipe.adapters or recipe.roles),
        "name an adapter in `adapters`, or the agent's roles in [roles.NAME] tables",
        lambda groups: any(call.agent is not None for call in _calls(groups)),
    ),
    "branches": Need(
        lambda recipe: recipe.loop.max_staleness == 0,
        "a branch is sampled by the weights of the rollout that it leaves: set loop.max_staleness = 0",
        lambda groups: any(group.branches for group in groups),
        "train with credit.use = 'branches'; `lightningrl branch` measures one rollout, and X-rays show that beside "
        "all methods",
    ),
    "state_key": Need(lambda recipe: True, "every run has it: see lightningrl_credit.states"),
    "judge": Need(
        lambda recipe: recipe.judge is not None, "add a [judge] table with base_url and model", _has_evidence
    ),
    "answers": Need(
        lambda _: True,
        "give each training task an `answer`",
        lambda groups: any(trajectory.task.answer is not None for trajectory in _trajectories(groups)),
    ),
    "logprobs": Need(
        lambda _: True,
        "use a trainer backend that tells logprobs of given tokens: backend = 'torch'",
        _has_evidence,
        is_service=True,
    ),
    "values": Need(
        lambda recipe: all(
            recipe.options_of(policy).get("critic") is not None
            for policy in recipe.all_policies.values()
            if policy.trainable
        ),
        "use a trainer backend with a critic that tells values, and give it one: backend = 'torch' and a table "
        "[learner.critic]",
        _has_evidence,
        is_service=True,
    ),
}
"""Needs of our own assigners, by the name that stands in `requires`."""
PLUGINS = tuple(
    Plugin(name=name, summary=need.remedy, factory=partial(NEEDS.get, name)) for name, need in NEEDS.items()
)


def installed_needs(plugins: PluginManager) -> dict[str, Need]:
    """Needs of all installed distributions, by name."""
    return {name: plugin.build() for name, plugin in plugins.records("lightningrl_credit_needs").items()}


def check_needs(
    recipe: Recipe,
    use: Any,
    requires: Collection[str],
    capabilities: Capabilities | None = None,
    needs: Mapping[str, Need] = NEEDS,
) -> None:
    """Raise ConfigError with the needs that the run does not meet. `capabilities`: its trainer backend's; None = it
    declares none."""

    def remedy(name: str) -> str | None:
        """Advice on an unmet need; None = it is met."""
        if name not in needs:
            return _unknown(needs)
        is_provided = not needs[name].is_service or capabilities is None or name in capabilities.services
        return None if is_provided and needs[name].is_met(recipe) else needs[name].remedy

    unmet = {name: advice for name in sorted(requires) if (advice := remedy(name)) is not None}
    if unmet:
        raise ConfigError(*(f"credit assigner {use!r} needs {name!r}; {advice}" for name, advice in unmet.items()))


def find_unrecorded(
    requires: Collection[str], groups: Sequence[TrajectoryGroup], needs: Mapping[str, Need] = NEEDS
) -> str | None:
    """The first need that recorded groups do not meet, with the remedy; None = they meet all."""
    for name in sorted(requires):
        if name not in needs:
            return f"needs {name!r}; {_unknown(needs)}"
        if not needs[name].is_recorded(groups):
            return f"needs {name!r}; {needs[name].later or needs[name].remedy}"
    return None


def _unknown(needs: Mapping[str, Need]) -> str:
    return f"which no run provides; there are: {', '.join(sorted(needs))}"


def check_answers(use: Any, requires: Collection[str], tasks: Iterable[Task]) -> None:
    """Raise ConfigError for the first training task without an answer, where the assigner needs one of each."""
    without = next((task for task in tasks if task.answer is None), None) if "answers" in requires else None
    if without is not None:
        raise ConfigError(
            f"credit assigner {use!r} needs 'answers', and task {without.id!r} has none; {NEEDS['answers'].remedy}"
        )
