"""Forecasts of what a policy will learn: evidence of groups, the forecast made from it, its account afterwards."""

from __future__ import annotations

import json
import shutil
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from warm import WarmCommand

from lightningrl.backends import Continuation
from lightningrl.recipe import Recipe
from lightningrl.types import Array, TrajectoryGroup
from lightningrl_credit.scoring import CreditedGroup
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_training.forecast.changes import possible_changes
from lightningrl_training.forecast.evidence import Evidence, GreedyAnswers, best_at_k, gather
from lightningrl_training.forecast.history import make_account, read_runs, spearman
from lightningrl_training.forecast.movement import Movement, measure_movement
from lightningrl_training.forecast.noise import signal_to_noise
from lightningrl_training.forecast.prediction import GainForecast, features, predict
from lightningrl_training.forecast.record import Outcome, RunForecast, measure_outcome

RECIPE = Recipe.model_validate(
    {
        "agent": "agent.py:answer",
        "tasks": {"train": "tasks.jsonl"},
        "policy": {"model": "none"},
        "rewards": {"right": {"use": "agent.py:right"}},
        "loop": {"group_size": 2, "steps": 10},
    }
)


def credited(name: str, rewards: tuple[float, ...], words: tuple[int, ...]) -> CreditedGroup:
    """A group whose members say one word each, with reward less the group's mean as advantage."""
    rollouts = tuple(
        make_trajectory(
            f"{name}-{i}", [make_transition(f"{name}-{i}", completion=[word])], reward=reward, group_id=name
        )
        for i, (reward, word) in enumerate(zip(rewards, words, strict=True))
    )
    mean = fmean(rewards)
    advantages = tuple((np.array([reward - mean], dtype=np.float32),) for reward in rewards)
    group = TrajectoryGroup(id=name, trajectories=rollouts)
    return CreditedGroup(group=group, advantages=advantages, has_signal=len(set(rewards)) > 1)


def snr(*groups: CreditedGroup) -> float | None:
    return signal_to_noise([(one.group, one.advantages) for one in groups])


def test_best_at_k_is_the_mean_of_the_highest_of_every_choice_of_k() -> None:
    rewards = [0.3, 0.0, 1.0, 0.7, 0.3]
    for k in range(1, 6):
        assert best_at_k(rewards, k) == pytest.approx(fmean(map(max, combinations(rewards, k))))


def test_groups_that_want_the_same_word_have_more_signal_than_noise_and_those_that_differ_have_none() -> None:
    agreed = snr(*(credited(str(i), (1.0, 0.0), (7, 8)) for i in range(4)))
    apart = snr(*(credited(str(i), (1.0, 0.0), (10 + i, 20 + i)) for i in range(4)))
    half = snr(*(credited(str(i), (1.0, 0.0), (7, 20 + i)) for i in range(4)))

    assert agreed is not None and apart == 0.0 and half is not None
    assert agreed > half > 0.0
    assert snr(credited("a", (1.0, 0.0), (7, 8)), credited("b", (0.0, 0.0), (7, 8))) is None


def test_evidence_counts_passes_signal_and_the_agents_own_failures() -> None:
    groups = [credited("a", (1.0, 0.0), (7, 8)), credited("b", (0.0, 0.0), (7, 8))]
    seen = gather(RECIPE, groups)

    assert seen is not None
    assert (seen.reward, seen.signal, seen.rollouts) == (0.25, 0.5, 4)
    assert seen.pass_at == {1: 0.25, 2: 0.5} == seen.best_at
    assert seen.signal_doubled > 0.5
    assert gather(RECIPE, []) is None


def test_a_policy_that_never_earns_is_forecast_no_gain_and_a_warm_start() -> None:
    silent = gather(RECIPE, [credited(str(i), (0.0, 0.0), (7, 8)) for i in range(8)])
    lively = gather(RECIPE, [credited(str(i), (1.0, 0.0), (7, 8)) for i in range(8)])

    assert silent is not None and lively is not None
    assert predict(silent).gain < predict(lively).gain
    assert "warm start" in possible_changes(silent)[0].what
    for evidence in (silent, lively):
        made = predict(evidence)
        assert -evidence.reward <= made.low <= made.gain <= made.high <= 1.0 - evidence.reward


def learning(
    *, moved: float = 0.1, earned: float = 0.1, greedy: GreedyAnswers | None = None, steps: int = 10
) -> Evidence:
    movement = Movement(asked=moved, earned=earned)
    groups = [credited(str(i), (1.0, 0.0), (7, 8)) for i in range(4)]
    seen = gather(RECIPE, groups, movement=movement, greedy=greedy)
    assert seen is not None
    return seen.model_copy(update={"steps": steps})


def test_a_policy_that_does_not_move_gains_nothing_and_one_that_moves_far_no_more_than_there_is() -> None:
    still, little, far = (predict(learning(moved=moved, steps=1000)).gain for moved in (0.0, 1e-4, 1e4))
    assert still == 0.0 < little < far < 1.0 - learning().reward


def test_a_learning_rate_that_moves_nothing_should_be_higher_and_one_that_harms_lower() -> None:
    def changes(moved: float, earned: float) -> list[str]:
        return [change.what for change in possible_changes(learning(moved=moved, earned=earned))]

    assert "a higher learning rate" in changes(1e-3, 1e-3)
    assert "a lower learning rate" in changes(0.5, -0.5)
    assert not any("learning rate" in what for what in changes(0.5, 0.3))
    assert changes(0.5, 0.3)[-1] == "loop.steps = 20"


def test_a_step_that_makes_likelier_what_earned_promises_more_and_more_steps_do() -> None:
    harmful, none, helpful = (predict(learning(earned=earned)).gain for earned in (-0.5, 0.0, 0.5))
    assert harmful < none < helpful < predict(learning(earned=0.5, steps=100)).gain
    assert predict(learning(earned=9e9)).gain == predict(learning(earned=2.0)).gain, "no run tells of more"


def test_greedy_answers_count_as_likeliest_rollouts_do_and_whether_they_are_surer_where_right() -> None:
    knowing = GreedyAnswers.measure([(1.0, -0.1), (0.0, -2.0)])
    guessing = GreedyAnswers.measure([(1.0, -2.0), (0.0, -2.0)])
    assert knowing is not None and guessing is not None and GreedyAnswers.measure([]) is None
    assert (knowing.reward, guessing.knows) == (0.5, 0.0)
    assert knowing.knows == pytest.approx(0.5)
    assert knowing.assured == pytest.approx(np.exp(-0.1) / 2)

    without, guessed, known = (learning(greedy=greedy) for greedy in (None, guessing, knowing))
    surer = [features(each)["surer"] for each in (without, guessed, known)]
    assert surer[1] == pytest.approx(surer[0] / 2.0) == surer[2], "likeliest 1.0, reward 0.5"
    assert known.knows > guessed.knows == without.knows == 0.0
    assert predict(known).gain > predict(guessed).gain


def test_without_greedy_answers_the_likeliest_of_each_group_stand_for_them() -> None:
    seen = learning()
    assert seen.greedy is None
    assert seen.assured == pytest.approx(np.exp(-0.007)), "word 7 is the likelier one, and right"


def test_a_policy_whose_likeliest_answers_are_its_worst_is_not_forecast_a_loss() -> None:
    habit = GreedyAnswers(tasks=64, reward=0.0, knows=0.0, assured=0.0)
    worst = learning(greedy=habit).model_copy(update={"likeliest": 0.0})
    assert (worst.reward, features(worst)["surer"]) == (0.5, 0.0)
    assert predict(worst).gain > 0.0


def test_a_policy_that_knows_what_its_greedy_answers_do_not_say_is_forecast_to_say_it() -> None:
    """As pretrained policies do that answer in a form that nobody asked for: sampled answers earn at times."""
    silent = GreedyAnswers(tasks=64, reward=0.0, knows=0.0, assured=0.0)
    hiding = learning(greedy=silent).model_copy(update={"likeliest": 0.0, "reward": 0.2})
    guessing = hiding.model_copy(update={"reward": 0.01})
    assert features(hiding)["hidden"] == pytest.approx(0.2) and features(hiding)["surer"] == 0.0
    assert features(learning())["hidden"] == 0.0
    assert predict(hiding).gain > 5 * predict(guessing).gain


class Raised:
    """A backend whose step made word 7 likelier by 0.5 nats, and each other one less so."""

    def logprobs(self, continuations: list[Continuation], *, reference: bool = False) -> list[Array]:
        return [
            np.array([-one.tokens[0] / 1000 + (0.5 if one.tokens[0] == 7 else -0.5)], dtype=np.float32)
            for one in continuations
        ]


def test_a_step_that_moves_words_by_half_a_nat_is_measured_so() -> None:
    groups = [credited("a", (1.0, 0.0), (7, 8)), credited("b", (0.0, 0.0), (7, 8)), credited("c", (1.0, 1.0), (8, 8))]
    backends: dict[str, Any] = {"policy": Raised()}
    seen = measure_movement(backends, groups, RECIPE)
    assert seen is not None
    assert seen.asked == pytest.approx(0.5)
    assert seen.earned == pytest.approx((0.5 - 0.5 - 0.5) / 3), "right without an advantage counts too"
    assert measure_movement(backends, groups[1:], RECIPE) is None
    backends["policy"] = object()
    assert measure_movement(backends, groups, RECIPE) is None, "a backend that does not say"


def test_what_a_step_within_the_warm_up_moved_is_scaled_to_the_full_rate() -> None:
    slow = Recipe.model_validate({**RECIPE.model_dump(), "learner": {"warmup_steps": 4}})
    backends: dict[str, Any] = {"policy": Raised()}
    seen = measure_movement(backends, [credited("a", (1.0, 0.0), (7, 8))], slow)
    assert seen is not None
    assert (seen.asked, seen.earned) == pytest.approx((2.0, 2.0))


def test_the_reward_of_the_likeliest_rollout_is_counted_by_group() -> None:
    """make_transition gives word n a log-probability of -n / 1000: the lower word is the likelier one."""
    seen = gather(RECIPE, [credited("a", (1.0, 0.0), (7, 8)), credited("b", (1.0, 0.0), (9, 8))])
    alike = gather(RECIPE, [credited("a", (1.0, 0.0), (7, 7))])

    assert seen is not None and alike is not None
    assert seen.likeliest == 0.5
    assert alike.likeliest == 0.5


def test_the_outcome_is_of_the_last_quarter_of_the_steps_and_scaled() -> None:
    rows = [{"step": float(step), "reward": float(step)} for step in range(1, 9)]
    assert measure_outcome(rows, 0.1, (0.0, 10.0)) == Outcome(steps=8, before=0.1, after=0.75)
    assert measure_outcome([{"step": 0.0, "validation/reward": 1.0}], 0.1, (0.0, 1.0)) is None


def test_ranks_of_equal_values_are_shared() -> None:
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert spearman([1.0, 1.0, 2.0], [3.0, 1.0, 2.0]) == pytest.approx(0.0)
    assert spearman([1.0, 1.0, 1.0], [3.0, 1.0, 2.0]) is None


def test_forecasts_are_held_against_outcomes(tmp_path: Path) -> None:
    seen = gather(RECIPE, [credited("a", (1.0, 0.0), (7, 8)), credited("b", (1.0, 0.0), (7, 8))])
    assert isinstance(seen, Evidence)
    for number, gain in enumerate((0.1, 0.2, 0.4)):
        forecast = GainForecast(gain=0.1 * number, low=0.0, high=0.3)
        outcome = Outcome(steps=10, before=0.25, after=0.25 + gain)
        (run := tmp_path / f"run-{number}").mkdir()
        RunForecast(after_step=1, evidence=seen, forecast=forecast, outcome=outcome).write(run)

    account = make_account(read_runs([tmp_path, tmp_path / "run-0"]))

    assert account.runs == 3
    assert account.spearman == pytest.approx(1.0)
    assert account.coverage == pytest.approx(2 / 3)


def test_a_run_writes_its_forecast_and_its_outcome(recorded_run: Path, warm: WarmCommand, tmp_path: Path) -> None:
    made = RunForecast.read(recorded_run)
    assert made is not None and made.outcome is not None
    assert made.outcome.steps == 3
    assert made.evidence.rollouts > 0
    assert made.evidence.likeliest is not None
    before = json.loads((recorded_run / "metrics.jsonl").read_text().splitlines()[0])
    assert made.evidence.greedy is not None
    assert made.evidence.greedy.reward == pytest.approx(before["validation/reward"])
    assert made.evidence.greedy.tasks == before["validation/rollouts"]

    told = warm.run("lightningrl", "forecasts", str(recorded_run.parent), cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "1 runs have ended" in told.stdout
    refused = warm.run("lightningrl", "forecasts", ".", cwd=tmp_path)
    assert refused.returncode == 2 and "each run writes one" in refused.stderr


def test_a_recipe_is_forecast_before_any_run(first_agent: Path, warm: WarmCommand, tmp_path: Path) -> None:
    shutil.copytree(first_agent, tmp_path / "first")
    said = warm.run("lightningrl", "forecast", "first", "--rollouts", "16", "--json", cwd=tmp_path)

    assert said.returncode == 0, said.stderr
    told = json.loads(said.stdout)
    assert told["evidence"]["rollouts"] >= 16
    assert isinstance(told["evidence"]["moved"], float)
    assert 0.0 <= told["evidence"]["greedy"]["reward"] <= 1.0
    assert told["forecast"]["low"] <= told["forecast"]["gain"] <= told["forecast"]["high"]
    assert not (tmp_path / "runs").exists()
