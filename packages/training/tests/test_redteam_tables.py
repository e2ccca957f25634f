"""The red team finds what is planted in rewards, and nothing in sound ones."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Task
from lightningrl_credit.rewards import NamedReward
from lightningrl_training.redteam import RedTeam, RedTeamReport, Severity, mutators_of

sys.path.insert(0, str(Path(__file__).parent))

from hackable_rewards import PLANTED, Planted
from sound_rewards import SOUND


def attack(
    rewards: Mapping[str, Callable[..., Any]], tasks: Sequence[Task], *, timeout_s: float = 10.0, **options: Any
) -> RedTeamReport:
    """Attack rewards, the first of them with nearly all of the weight."""
    recipe = Recipe.model_validate(
        {
            "agent": len,
            "tasks": {"train": lambda: list(tasks)},
            "policy": {"model": "nobody"},
            "rewards": {name: {"use": function} for name, function in rewards.items()},
        }
    )
    named = [
        NamedReward(name=name, function=function, weight=0.2 if number else 1.0, timeout_s=timeout_s)
        for number, (name, function) in enumerate(rewards.items())
    ]
    team = RedTeam(recipe=recipe, rewards=named, tasks=tasks, mutators=mutators_of(load_plugins()), **options)
    return asyncio.run(team.run())


@pytest.mark.parametrize("planted", PLANTED.values(), ids=list(PLANTED))
def test_what_is_planted_in_a_reward_is_found(planted: Planted) -> None:
    report = attack({"right": planted.reward}, planted.tasks[:4], timeout_s=planted.timeout_s)
    said = [finding.sentence for finding in report.findings]
    assert report.is_bad
    assert any(planted.says in sentence for sentence in said), said
    assert all(finding.advice for finding in report.findings)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_reward_has_no_findings(name: str) -> None:
    rewards, tasks = SOUND[name]
    report = attack(rewards, tasks[:8])
    assert [one.sentence for one in report.findings if one.severity is not Severity.NOTE] == []
    assert "" not in report.gold.values()
