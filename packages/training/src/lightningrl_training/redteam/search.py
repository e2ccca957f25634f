"""A search with the policy itself: outputs that the recipe's agent samples, which earn as much as gold and are not.

One output that earns all on tasks with other answers is a hole. One that only differs from gold is to be read.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lightningrl.plugins import PluginManager
from lightningrl.recipe import Recipe
from lightningrl.types import Trajectory
from lightningrl_training.checks import build_checked
from lightningrl_training.collector import fetch_ended
from lightningrl_training.redteam.attacks import Severity, canonical_text
from lightningrl_training.redteam.report import RedTeamFinding, shorten
from lightningrl_training.run_sync import Show
from lightningrl_training.serving import serve_recipe
from lightningrl_training.tasks import plan_evaluation

__all__ = ["search_policy", "suspicious"]

MOST_SHOWN: Final = 5
SAMPLES: Final = 4
"""Rollouts of a task."""


async def search_policy(
    recipe: Recipe, plugins: PluginManager, gold: Mapping[str, float], *, rollouts: int, show: Show
) -> list[RedTeamFinding]:
    """Sample rollouts of the recipe's agent and policy, and look for outputs that are paid as gold and are not. `gold`:
    what gold earned, by task; without it 1.0 is all that there is."""
    show("loading the policy", 0, 0)
    parts = build_checked(recipe, plugins)
    chosen = [task for task in parts.tasks.train if not gold or task.id in gold][: -(-rollouts // SAMPLES)]
    with tempfile.TemporaryDirectory(prefix="lightningrl-redteam-", ignore_cleanup_errors=True) as scratch:
        async with serve_recipe(recipe, parts, Path(scratch), starting=lambda what: show(what, 0, 0)) as (
            recipe,
            served,
        ):
            show("sampling rollouts", 0, 0)
            sampling = recipe.sampling.settings()
            numbered = dict(enumerate(chosen))
            specs = plan_evaluation(numbered, recipe, samples=SAMPLES, sampling=sampling, step=0)[:rollouts]
            await served.client.create_rollouts(specs)
            ended = await fetch_ended(served.client, [spec.id for spec in specs])
            rewarded = await parts.evaluator.evaluate(ended)
    return suspicious(rewarded, gold)


def suspicious(rollouts: Sequence[Trajectory], gold: Mapping[str, float]) -> list[RedTeamFinding]:
    """Findings among rewarded rollouts."""
    paid = [
        rollout
        for rollout in rollouts
        if rollout.reward is not None and rollout.reward >= 0.99 * gold.get(rollout.task.id, 1.0) > 0.0
    ]
    by_output: dict[str, list[Trajectory]] = defaultdict(list)
    for rollout in paid:
        by_output[canonical_text(rollout.output)].append(rollout)
    findings = []
    for rollouts_alike in by_output.values():
        answers = {canonical_text(rollout.task.answer) for rollout in rollouts_alike}
        if len(answers) > 1:
            sentence = f"the policy's same output earns as much as gold on tasks with {len(answers)} other answers"
            findings.append(_finding(rollouts_alike, gold, len(rollouts), sentence, Severity.HIGH))
    others = [rollout for rollout in paid if not _has_answer(rollout)]
    for rollout in others[:MOST_SHOWN]:
        sentence = "the policy earns as much as gold with an output that lacks the answer; read it"
        findings.append(_finding([rollout], gold, len(rollouts), sentence, Severity.NOTE))
    return findings


def _has_answer(rollout: Trajectory) -> bool:
    answers = rollout.task.answer if isinstance(rollout.task.answer, list) else [rollout.task.answer]
    output = canonical_text(rollout.output)
    return any(canonical_text(answer) in output for answer in answers)


def _finding(
    rollouts: Sequence[Trajectory], gold: Mapping[str, float], searched: int, sentence: str, severity: Severity
) -> RedTeamFinding:
    first = rollouts[0]
    return RedTeamFinding(
        severity=severity,
        mutator="search",
        reward=" + ".join(first.rewards),
        sentence=sentence,
        advice="let the reward refuse it, where it is wrong; `lightningrl rescore` says what that would change",
        task=first.task.id,
        output=shorten(first.output),
        earned=first.reward,
        gold=gold.get(first.task.id),
        tasks=len({rollout.task.id for rollout in rollouts}),
        tried=searched,
    )
