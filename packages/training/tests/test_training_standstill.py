"""A run whose validation is no better at its end says so, with the likely reason."""

from __future__ import annotations

from typing import Any

import pytest

from lightningrl.recipe import Recipe
from lightningrl_testing.groups import make_trajectory
from lightningrl_training.step_warnings import StepWarnings, explain_standstill, has_stood_still, last_validation

RECIPE = Recipe.model_validate(
    {
        "agent": "a.py:a",
        "tasks": {"train": "a.py:t"},
        "policy": {"model": "org/model"},
        "rewards": {"right": {"use": "exact"}},
    }
)
EMPTY = {"groups": 4.0, "groups_without_signal": 0.0, "reward": 0.2, "learn/lr": 1e-5}


def rows(*scores: float, **metrics: float) -> list[dict[str, Any]]:
    """A validation before the first step and after each of them."""
    first, *later = scores
    steps = [{"step": step, **EMPTY, **metrics, "validation/reward": score} for step, score in enumerate(later, 1)]
    return [{"step": 0, "validation/reward": first}, *steps]


@pytest.mark.parametrize(
    ("scores", "stood"),
    [((0.2, 0.2), True), ((0.2, 0.1, 0.2), True), ((0.2, 0.3, 0.1), False), ((1.0, 1.0), False), ((0.2,), False)],
)
def test_a_run_stands_still_where_no_validation_beats_the_first(scores: tuple[float, ...], stood: bool) -> None:
    assert has_stood_still(rows(*scores), 1.0) is stood


def test_a_run_that_never_validated_says_nothing() -> None:
    assert not has_stood_still([], 1.0)
    assert not has_stood_still([{"step": 1, **EMPTY}], 1.0)
    assert not has_stood_still([{"step": 5, **EMPTY, "validation/reward": 0.1}], 1.0), "its beginning is not known"


def test_a_policy_that_became_worse_is_told_to_take_smaller_steps() -> None:
    sentence = explain_standstill(rows(0.9, 0.3, 0.1), RECIPE, answers=None, earned=1.0)
    assert "0.900 then, 0.300 since; it became worse" in sentence and "lower learner.learning_rate" in sentence
    assert "another learner.learning_rate" not in sentence


def test_a_validation_that_falls_beyond_its_interval_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    warnings = StepWarnings(RECIPE, None, lambda: None)  # type: ignore[arg-type]

    def validate(right: int, best: float | None) -> str:
        caplog.clear()
        seen = [make_trajectory(f"r{number}", (), reward=float(number < right)) for number in range(20)]
        warnings.validation("validation after step 4", seen, {"reward": right / 20}, best=best)
        return caplog.text

    assert "worse" not in validate(18, None)
    assert "worse" not in validate(17, 0.9)
    assert "became worse: 0.200" in (text := validate(4, 0.9)) and "0.900 at its best" in text
    assert "worse" not in validate(2, 0.9), "once"
    assert "worse" in validate(2, 0.95), "for each best"


@pytest.mark.parametrize(
    ("metrics", "answers", "earned", "said"),
    [
        (
            {"groups_without_signal": 4.0},
            (2, 20),
            1.0,
            "8 of 8 groups taught nothing, for their rewards were equal: raise loop.group_size",
        ),
        (
            {},
            (19, 20),
            1.0,
            "19 of 20 answers are what they were, to the letter, and 2 steps at a learning rate of 1e-05 move no weight by more than "
            "some 2e-05: raise learner.learning_rate",
        ),
        (
            {},
            (3, 20),
            0.3,
            "no rollout that was learned from earned more than 0.3 of 1, and what is never sampled is not learned",
        ),
        (
            {},
            None,
            1.0,
            "training rewards did not rise either (0.200, then 0.200), and 2 steps at a learning rate of 1e-05",
        ),
    ],
    ids=["silent", "same answers", "never sampled", "no trend"],
)
def test_the_likely_reason_is_told(
    metrics: dict[str, float], answers: tuple[int, int] | None, earned: float, said: str
) -> None:
    measured = rows(0.2, 0.15, 0.2, **metrics)
    assert last_validation(measured) == 2
    sentence = explain_standstill(measured, RECIPE, answers=answers, earned=earned)
    assert sentence.startswith("validation is no better than before the first step: 0.200 then, 0.200 since; ")
    assert said in sentence


def test_rewards_that_rose_in_training_alone_are_told() -> None:
    measured = rows(0.2, 0.1, 0.1, 0.1)
    measured[-1]["reward"] = 0.9
    assert "training rewards rose from 0.200 to 0.900" in explain_standstill(
        measured, RECIPE, answers=(1, 20), earned=1.0
    )
