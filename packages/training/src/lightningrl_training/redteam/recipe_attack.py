"""The attack on a recipe: its rewards and some of its tasks are built, and nothing else: no policy, no server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightningrl.errors import ConfigError
from lightningrl.loading import load_callable
from lightningrl.plugins import PluginManager, load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Task
from lightningrl_client.recipe_file import read_recipe
from lightningrl_training.build import build_tasks_and_rewards
from lightningrl_training.redteam.attack import RedTeam, choose_tasks, mutators_of
from lightningrl_training.redteam.files import is_async
from lightningrl_training.redteam.report import RedTeamReport
from lightningrl_training.run_sync import Show, show_nobody

__all__ = ["TASKS", "TASKS_OF_A_JUDGE", "attack_recipe"]

TASKS: Final = 32
TASKS_OF_A_JUDGE: Final = 3
"""Tasks by default where a reward is async: it may ask a model, which costs money."""


async def attack_recipe(
    source: Path | Recipe,
    *,
    tasks: int | None = None,
    seed: int = 0,
    seconds: float = 120.0,
    gold: str | Callable[[Task], Any] | None = None,
    only: Sequence[str] = (),
    search: int = 0,
    settings: Mapping[str, Any] | None = None,
    show: Show = show_nobody,
) -> RedTeamReport:
    """Attack the rewards of a recipe.

    tasks     so many of the training tasks, at random; None = 32, or 3 where a reward is async
    seed      of their choice
    seconds   for all of it but the search
    gold      a function, or `file.py:name`, from a task to the output that earns the most; None = the task
              source's, or made of the answers
    only      names of the mutators to take; empty = all that are installed
    search    rollouts of the recipe's own agent and policy to look through, too; 0 = none
    show      told what is being done, and how much of how much is

    Raises ConfigError or PluginError for what cannot be built.
    """
    recipe, wrong = read_recipe(source, settings or {})
    if wrong:
        raise ConfigError(*wrong)
    plugins = load_plugins()
    task_source, loaded, rewards = build_tasks_and_rewards(recipe, plugins)
    by_default = TASKS_OF_A_JUDGE if any(is_async(reward.function) for reward in rewards) else TASKS
    team = RedTeam(
        recipe=recipe,
        rewards=rewards,
        tasks=choose_tasks(loaded.train, tasks or by_default, seed),
        mutators=_chosen(plugins, only),
        gold=(load_callable(gold, recipe.folder) if isinstance(gold, str) else gold)
        or getattr(task_source, "gold", None),
        seconds=seconds,
        show=lambda done, planned: show("rewarding outputs", done, planned),
    )
    report = await team.run()
    if not search:
        return report
    from lightningrl_training.redteam.search import search_policy

    sampled = await search_policy(recipe, plugins, team.gold_returns, rollouts=search, show=show)
    return replace(report, findings=(*report.findings, *sampled))


def _chosen(plugins: PluginManager, only: Sequence[str]) -> dict[str, Any]:
    """The mutators of these names, or all. Raises ConfigError for a name that is none."""
    mutators = mutators_of(plugins)
    for name in only:
        if name not in mutators:
            raise ConfigError(f"no reward mutator named {name!r}; installed: {', '.join(sorted(mutators))}")
    return {name: mutator for name, mutator in mutators.items() if not only or name in only}
