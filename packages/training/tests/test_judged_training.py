"""Training by a judge's ranking alone, where every reward is the same: the doctor passes it, and a judge that goes by
places is told of."""

from __future__ import annotations

import logging

import pytest

from lightningrl.recipe import Recipe
from lightningrl_credit.judge_assigner import GroupJudge
from lightningrl_credit.scoring import ScoredStep
from lightningrl_testing.groups import make_group
from lightningrl_training.build import build_scorer
from lightningrl_training.doctor.findings import Verdict
from lightningrl_training.doctor.observation import Observation
from lightningrl_training.doctor.signal_checks import reward_varies
from lightningrl_training.step_warnings import StepWarnings
from lightningrl_training.tasks import TaskSets

RECIPE = Recipe.model_validate(
    {
        "agent": "a.py:a",
        "tasks": {"train": "a.py:t"},
        "policy": {"model": "org/model"},
        "rewards": {"spoke": {"use": "a.py:r"}},
    }
)


@pytest.mark.parametrize(
    ("needs", "signals", "verdict"),
    [
        ({"group", "judge"}, (True, False), Verdict.PASS),
        ({"group", "judge"}, (False, False), Verdict.FAIL),
        ({"group"}, (False, False), Verdict.FAIL),
    ],
)
def test_equal_rewards_are_no_fault_where_a_judge_tells_rollouts_apart(
    needs: set[str], signals: tuple[bool, ...], verdict: Verdict
) -> None:
    groups = tuple(make_group((None,), (None,), rewards=(1.0, 1.0)) for _ in signals)
    tasks = TaskSets(train=(), validation=())
    seen = Observation(recipe=RECIPE, tasks=tasks, groups=groups, signals=signals, requires=frozenset(needs))
    assert reward_varies(seen).verdict is verdict


@pytest.mark.parametrize(("lead", "count"), [(0.4, 1), (-0.4, 1), (0.1, 0)])
def test_a_judge_that_goes_by_places_is_told_of_once(lead: float, count: int, caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"groups": 2.0, "groups_without_signal": 0.0, "credit/grade_earlier": lead}
    step = ScoredStep(groups=(), advantages=(), samples=(), metrics=metrics, outcomes={})
    warnings = StepWarnings(RECIPE, build_scorer(RECIPE, GroupJudge()), lambda: None)
    with caplog.at_level(logging.WARNING):
        for number in (2, 3):
            warnings.rollouts(number, [], step, [])
    said = [record.getMessage() for record in caplog.records if "goes by places" in record.getMessage()]
    assert len(said) == count
    assert all(f"{lead:+.2f}" in sentence for sentence in said)
