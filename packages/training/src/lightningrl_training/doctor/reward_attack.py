"""The cheap part of the red team, for the doctor: a few outputs on a few tasks, in the form of the agent's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightningrl.errors import LightningError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Task, Trajectory
from lightningrl_credit.rewards import RewardSet
from lightningrl_training.doctor.findings import Finding, passed, warned
from lightningrl_training.doctor.observation import Observation
from lightningrl_training.redteam import RedTeam, RedTeamReport, Severity, choose_tasks, mutators_of
from lightningrl_training.redteam.judgement import is_async

__all__ = ["attack_rewards", "rewards_stand"]

MUTATORS: Final = ("nothing", "noise", "form", "many_answers", "wrong_content")
TASKS: Final = 4
SECONDS: Final = 10.0


async def attack_rewards(
    recipe: Recipe, rewards: RewardSet, tasks: Sequence[Task], rollouts: Sequence[Trajectory]
) -> RedTeamReport | None:
    """Attack the rewards of a run for some seconds. None where one of them is async, which may cost money, where there
    is no output to take the form of, and where an attack raised."""
    outputs = [rollout.output for rollout in rollouts if rollout.output is not None]
    if not outputs or any(is_async(reward.function) for reward in rewards.rewards):
        return None
    installed = mutators_of(load_plugins())
    team = RedTeam(
        recipe=recipe,
        rewards=rewards,
        tasks=choose_tasks(tasks, TASKS, recipe.loop.seed),
        mutators={name: installed[name] for name in MUTATORS if name in installed},
        outputs=outputs,
        seconds=SECONDS,
    )
    try:
        return await team.run()
    except LightningError:  # `lightningrl redteam` says it
        return None


def rewards_stand(seen: Observation) -> Finding:
    """Check that a few outputs earn no more than they should."""
    report = seen.attack
    if report is None:
        return passed("not attacked: a reward is async, or there is no output to begin with")
    high = [finding for finding in report.findings if finding.severity is Severity.HIGH]
    if high:
        more = f", and {len(high) - 1} others earn too much" if len(high) > 1 else ""
        return warned(
            f"{high[0].sentence} on {high[0].tasks} of {high[0].tried} tasks{more}",
            "`lightningrl redteam RECIPE` shows each of them, and what to change in the reward",
        )
    unknown = [name for name, form in report.gold.items() if not form]
    gold = f"; gold of {', '.join(unknown)} is not known" if unknown else ""
    many = str(report.outputs) if report.outputs == report.planned else f"{report.outputs} of {report.planned}"
    return passed(f"{many} outputs on {report.tasks} tasks earned no more than they should{gold}")
