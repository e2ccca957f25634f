"""Rewards written for another trainer: refused with what their arguments are called here, never called with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightningrl.errors import ConfigError
from lightningrl_training.part_checks import check_reward


def verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
    return 1.0


def verl_short(solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
    return 1.0


def trl(completions: Any, **kwargs: Any) -> list[float]:
    return [1.0]


def trl_with_prompts(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    return [1.0]


def verifiers(prompt: Any, completion: Any, answer: Any) -> float:
    return 1.0


def verifiers_state(completion: Any, answer: Any, state: Any) -> float:
    return 1.0


def open_rlhf(queries: Any, prompts: Any, labels: Any) -> float:
    return 1.0


def swapped(output: Any, task: Any, trajectory: Any) -> float:
    return 1.0


def verl_batch(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any = None) -> list[float]:
    return [1.0]


def langsmith(outputs: Any, reference_outputs: Any, inputs: Any) -> float:
    return 1.0


def scored(y_pred: Any, y_true: Any, weight: Any = None) -> float:
    return 1.0


def judged(question: Any, response: Any, label: Any) -> float:
    return 1.0


def graded(generated: Any, expected_answer: Any, meta: Any = None) -> float:
    return 1.0


class Method:
    def __call__(self, solution_str: Any, ground_truth: Any, extra_info: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (verl, "'data_source' is task.metadata, 'solution_str' is output, 'ground_truth' is task.answer"),
        (verl_short, "'solution_str' is output, 'ground_truth' is task.answer"),
        (Method(), "'solution_str' is output"),
        (trl, "'completions' is output, of one rollout"),
        (trl_with_prompts, "'prompts' is task.input, 'completions' is output"),
        (verifiers, "'prompt' is task.input, 'completion' is output, 'answer' is task.answer"),
        (verifiers_state, "'completion' is output"),
        (open_rlhf, "'queries' is task.input"),
        (verl_batch, "'data_sources' is task.metadata, 'solution_strs' is output, 'ground_truths' is task.answer"),
        (langsmith, "'outputs' is output, 'reference_outputs' is task.answer"),
        (scored, "'y_pred' is output, 'y_true' is task.answer"),
        (judged, "'question' is task.input, 'response' is output, 'label' is task.answer"),
        (graded, "'generated' is output, 'expected_answer' is task.answer"),
        (swapped, r"called with \(task, output, trajectory\): in this order"),
    ],
)
def test_arguments_of_another_trainer_are_refused_with_the_mapping(reward: Callable[..., Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_reward("right", "reward.py:compute_score", reward)


def test_arguments_of_ones_own_are_taken() -> None:
    def keywords(task: Any, output: Any, trajectory: Any, *, answer: str = "", extra_info: Any = None) -> float:
        return 1.0

    rewards: list[Callable[..., Any]] = [
        keywords,
        lambda task, output, trajectory: 1.0,
        lambda t, o, tr: 1.0,
        lambda task, answer, _trajectory: 1.0,
        lambda task, completion, trajectory: 1.0,
        lambda example, pred, trace=None: 1.0,
        lambda task, output, trajectory, expected=None: 1.0,
        lambda *args: 1.0,
    ]
    for reward in rewards:
        check_reward("right", "reward.py:right", reward)
