"""A rehearsal: rows of an earlier policy become rows of today's, and a copy of the weights learns from them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm import WarmCommand

from lightningrl.backends import Continuation
from lightningrl.errors import ConfigError
from lightningrl.types import Array, Sample, TrajectoryGroup
from lightningrl_credit.scoring import CreditedGroup
from lightningrl_testing.groups import make_trajectory
from lightningrl_training.forecast.evidence import Evidence, Rehearsal
from lightningrl_training.forecast.prediction import features
from lightningrl_training.forecast.rehearsal import rehearse, reweigh


def row(rollout: str, advantage: float, *, policy: str = "policy") -> Sample:
    """A prompt of two tokens and an answer of two, of log-probability -1 each."""
    mask = np.array([False, False, True, True])
    return Sample(
        rollout_id=rollout,
        policy=policy,
        token_ids=np.array([1, 2, 3, 4], dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        weights=mask.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        calls=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(4, dtype=np.float32),
    )


def test_a_rollout_that_grew_three_times_as_likely_weighs_as_three() -> None:
    """As if of four fresh rollouts three were the right one: their mean reward is 0.75, and advantages are less it."""
    rows = [row("right", 0.5), row("wrong", -0.5)]
    grown = np.log(3.0) / 2.0
    now = [np.array([9.0, 9.0, -1.0 + grown, -1.0 + grown]), np.array([9.0, 9.0, -1.0, -1.0])]
    right, wrong = reweigh(rows, {"right": "g", "wrong": "g"}, now)
    assert right.advantages == pytest.approx([0, 0, 1.5 * 0.25, 1.5 * 0.25])
    assert wrong.advantages == pytest.approx([0, 0, -0.5 * 0.75, -0.5 * 0.75])
    assert right.logprobs == pytest.approx([0, 0, -1.0 + grown, -1.0 + grown]), "a step then begins on policy"


def test_weights_that_have_not_moved_change_no_advantage_and_groups_and_policies_are_by_themselves() -> None:
    rows = [row("a", 0.5), row("b", -0.5), row("c", 0.25), row("d", -0.25), row("a", 1.0, policy="critic")]
    groups = {"a": "g", "b": "g", "c": "h", "d": "h"}
    made = reweigh(rows, groups, [one.logprobs for one in rows])
    for one, again in zip(rows[:4], made[:4], strict=True):
        assert again.advantages == pytest.approx(one.advantages)
    assert not made[4].advantages.any(), "alone in its group, it is the baseline"


def test_a_rollout_that_no_longer_comes_teaches_nothing() -> None:
    rows = [row("stays", 0.5), row("gone", -0.5)]
    now = [rows[0].logprobs, np.array([0.0, 0.0, -200.0, -200.0])]
    stays, gone = reweigh(rows, {"stays": "g", "gone": "g"}, now)
    assert abs(stays.advantages).max() < 1e-3 and abs(gone.advantages).max() < 1e-3
    assert np.isfinite(gone.advantages).all()


class Scorer:
    """A backend that tells log-probabilities, always the same."""

    def logprobs(self, continuations: Sequence[Continuation], *, reference: bool = False) -> Sequence[Array]:
        return [np.full(len(one.tokens), -1.0, np.float32) for one in continuations]


def rehearsed(backend: Any, rows: Sequence[Sample], most: int) -> tuple[Rehearsal | None, list[int], int]:
    """The rehearsal, the steps it looked after, and how often it learned."""
    looks: list[int] = []
    learned: list[int] = []

    async def look(number: int) -> tuple[float, float]:
        looks.append(number)
        return 1.0 / number, number / 16

    async def learn(rows: Sequence[Sample]) -> None:
        learned.append(len(rows))

    group = TrajectoryGroup(id="g", trajectories=tuple(make_trajectory(name, []) for name in "ab"))
    credited = [CreditedGroup(group=group, advantages=(), has_signal=True)]
    made = asyncio.run(rehearse([rows], credited, {"policy": backend}, most=most, learn=learn, look=look))
    return made, looks, len(learned)


def test_it_looks_after_four_and_the_last_step_and_the_first_is_learned_already() -> None:
    rows = [row("a", 0.5), row("b", -0.5)]
    made, looks, learned = rehearsed(Scorer(), rows, 160)
    assert (looks, learned) == ([4, 16], 15)
    assert made == Rehearsal(steps=16, greedy=0.25, sampled=1.0)
    assert rehearsed(Scorer(), rows, 10)[1:] == ([4, 10], 9)
    assert rehearsed(Scorer(), rows, 2)[1:] == ([2], 1)


def test_nothing_to_learn_is_no_rehearsal_and_a_backend_without_log_probabilities_is_refused() -> None:
    assert rehearsed(object(), [row("a", 0.0), row("b", 0.0)], 16) == (None, [], 0)
    with pytest.raises(ConfigError, match="'policy' tells no log-probabilities"):
        rehearsed(object(), [row("a", 0.5), row("b", -0.5)], 16)


def test_a_rehearsal_that_lifts_the_reward_promises_more(first_agent: Path, warm: WarmCommand, tmp_path: Path) -> None:
    """The whole command, on the starter of `init`, which learns: agent, engine, learner, validation."""
    shutil.copytree(first_agent, tmp_path / "first")
    said = warm.run("lightningrl", "forecast", "first", "--rehearse", "--json", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    told = json.loads(said.stdout)
    evidence = Evidence.model_validate(told["evidence"])
    shown = evidence.rehearsed
    assert shown is not None and shown.steps == 15, "a run has no more"
    assert evidence.rollouts >= 4 * 8 * 4
    assert shown.sampled > evidence.reward + 0.05, "fifteen steps on the rollouts of four have taught it something"
    assert features(evidence)["rehearsed"] > 0.1
    assert told["forecast"]["gain"] > 0.1
    assert not (tmp_path / "runs").exists()


def test_a_rehearsal_wants_validation_tasks(first_agent: Path, warm: WarmCommand, tmp_path: Path) -> None:
    shutil.copytree(first_agent, tmp_path / "first")
    recipe = tmp_path / "first" / "recipe.toml"
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace('validation = "tasks.py:validation"\n', ""), encoding="utf-8")
    said = warm.run("lightningrl", "forecast", "first", "--rehearse", cwd=tmp_path)
    assert said.returncode == 2
    assert "a rehearsal is measured on validation tasks" in said.stderr
