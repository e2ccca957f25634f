"""GAE with a critic: verl's numbers where verl has them, cases by hand where it does not, and a test for each trap."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightningrl.errors import ConfigError, PluginError
from lightningrl.plugins import load_plugins
from lightningrl.protocols import CreditAssigner, Services
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import SamplesConfig
from lightningrl.types import Outcome, Trajectory, TrajectoryGroup
from lightningrl_credit.rewards import RewardWeights, WeightedReward
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls
from lightningrl_credit.turn_gae import Level, TurnGae
from lightningrl_testing.credit_conformance import CreditConformance
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.scripted_services import ScriptedServices
from lightningrl_training.build import Parts

Value = Callable[[list[int]], float]


def by_length(context: list[int]) -> float:
    """A value for each state, known by how much has been read."""
    return float(np.sin(3.0 * len(context) + context[0]))


def chain(
    *lengths: int,
    rewards: Sequence[float | None] = (),
    reward: float | None = 1.0,
    outcome: Outcome = Outcome.SUCCEEDED,
) -> Trajectory:
    """Calls of one growing history, of so many tokens each, a tool's three tokens between them."""
    history, calls = [7], []
    for t, length in enumerate(lengths):
        turn = {} if not rewards else {"turn": rewards[t]}
        completion = list(range(10, 10 + length))
        parent = f"r/{t - 1}" if t else None
        calls.append(
            make_transition(f"r/{t}", prompt=history, completion=completion, index=t, parent=parent, rewards=turn)
        )
        history = [*history, *completion, 500, 501, 502]
    return make_trajectory("r", calls, reward=reward, outcome=outcome)


def heard(assigner: TurnGae, trajectory: Trajectory, value: Value = by_length) -> TrajectoryGroup:
    evidence = asyncio.run(assigner.score(trajectory, ScriptedServices(values=value)))
    return TrajectoryGroup(id="g", trajectories=(replace(trajectory, evidence=evidence),))


def advantages(assigner: TurnGae, trajectory: Trajectory, value: Value = by_length) -> list[list[float]]:
    (calls,) = assigner.assign(heard(assigner, trajectory, value))
    return [[] if one is None else one.tolist() for one in calls]


def targets(assigner: TurnGae, trajectory: Trajectory, value: Value = by_length) -> list[list[float]]:
    (calls,) = assigner.value_targets(heard(assigner, trajectory, value))
    return [[] if one is None else one.tolist() for one in calls]


# ------------------------------------------------------------------ agreement


def of_verl(
    core_algos: Any, rewards: Sequence[float], values: Sequence[float], mask: Sequence[int], gamma: float, lam: float
) -> Any:
    """Advantages before verl whitens them, and returns."""
    import torch

    rows = [torch.tensor([row], dtype=torch.float64) for row in (rewards, values, mask)]
    _, returns = core_algos.compute_gae_advantage_return(*rows, gamma, lam)
    return (returns - rows[1])[0].numpy(), returns[0].numpy()


@pytest.mark.parametrize("seed", range(8))
def test_over_tokens_it_is_verls_and_observation_tokens_are_no_steps(core_algos: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    gamma, lam = random.uniform(0.5, 1.0, 2)
    lengths = [int(n) for n in random.integers(2, 6, int(random.integers(1, 5)))]
    turn_rewards = random.normal(size=len(lengths)).tolist()
    trajectory = chain(*lengths, rewards=turn_rewards, reward=float(random.normal()))
    last = trajectory.transitions[-1]
    row = [*last.prompt_ids.tolist(), *last.completion_ids.tolist()]
    mask, rewards = np.zeros(len(row), int), np.zeros(len(row))
    for call in trajectory.transitions:
        start = len(call.prompt_ids)
        end = start + len(call.completion_ids)
        mask[start:end] = 1
        rewards[end - 1] = call.rewards["turn"] or 0.0
    rewards[-1] += trajectory.reward or 0.0
    values = [by_length(row[:position]) if position else 9.9 for position in range(len(row))]
    theirs, returns = of_verl(core_algos, rewards.tolist(), values, mask.tolist(), gamma, lam)
    assigner = TurnGae(level="token", gamma=gamma, lam=lam)
    np.testing.assert_allclose(
        np.concatenate(advantages(assigner, trajectory)), theirs[mask == 1], atol=1e-6, rtol=1e-6
    )
    np.testing.assert_allclose(np.concatenate(targets(assigner, trajectory)), returns[mask == 1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_over_turns_it_is_verls_with_a_turn_for_a_token(core_algos: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    gamma, lam = random.uniform(0.5, 1.0, 2)
    lengths = [int(n) for n in random.integers(1, 6, 5)]
    turn_rewards = random.normal(size=5).tolist()
    trajectory = chain(*lengths, rewards=turn_rewards, reward=0.5)
    values = [by_length(call.prompt_ids.tolist()) for call in trajectory.transitions]
    theirs, returns = of_verl(core_algos, [*turn_rewards[:-1], turn_rewards[-1] + 0.5], values, [1] * 5, gamma, lam)
    assigner = TurnGae(gamma=gamma, lam=lam)
    for ours, wanted, length in zip(advantages(assigner, trajectory), theirs, lengths, strict=True):
        np.testing.assert_allclose(ours, [wanted] * length, atol=1e-6)
    for ours, wanted in zip(targets(assigner, trajectory), returns, strict=True):
        np.testing.assert_allclose(ours[0], wanted, atol=1e-6)
        assert np.isnan(ours[1:]).all(), "a turn's value is that of its start"


def test_both_levels_of_one_turn_are_ppos(core_algos: Any) -> None:
    trajectory = chain(6, reward=0.3)
    values = [by_length([7, *range(10, 10 + n)]) for n in range(6)]
    theirs, returns = of_verl(core_algos, [0.0] * 5 + [0.3], values, [1] * 6, 1.0, 0.8)
    assigner = TurnGae(level="both", gamma=0.5, lam=0.5, token_lam=0.8)
    np.testing.assert_allclose(advantages(assigner, trajectory)[0], theirs, atol=1e-6)
    np.testing.assert_allclose(targets(assigner, trajectory)[0], returns, atol=1e-6)


def test_both_levels_give_each_token_its_turns_return_less_its_own_value() -> None:
    """By hand: V = 1, 2 | 4, 8; r = 0, then R = 10; γ = 1/2, λ = 1.
    A_2 = 10 - 4 = 6, A_1 = 0 + 4/2 - 1 + 6/2 = 4; turns' returns 10 and 5."""
    value = {1: 1.0, 2: 2.0, 6: 4.0, 7: 8.0}
    trajectory = chain(2, 2, reward=10.0)
    assigner = TurnGae(level="both", gamma=0.5, lam=1.0)
    assert advantages(assigner, trajectory, lambda context: value.get(len(context), 99.0)) == [[4.0, 3.0], [6.0, 2.0]]
    assert advantages(TurnGae(gamma=0.5, lam=1.0), trajectory, lambda context: value[len(context)]) == [
        [4.0, 4.0],
        [6.0, 6.0],
    ]


# ------------------------------------------------------------------ traps


def test_verbosity_changes_no_turns_advantage() -> None:
    """Trap 5: γλ per turn. A λ per token would decay with the length of the turns that follow."""
    lengths_of = ((1, 1, 1), (1, 40, 9))
    short, long = (
        [calls[0] for calls in advantages(TurnGae(), chain(*lengths, reward=1.0), lambda context: 0.0)]
        for lengths in lengths_of
    )
    assert short == long == pytest.approx([(0.99 * 0.9) ** 2, 0.99 * 0.9, 1.0])


@pytest.mark.parametrize("level", ["turn", "token", "both"])
def test_a_rollout_that_was_cut_off_costs_what_a_failure_costs_and_the_critic_is_asked_where_it_learns(
    level: Level,
) -> None:
    """It was credited with the value after its last call, so that an endless loop cost nothing; and no critic is ever
    taught that place."""
    taught = {(7,), (7, 10, 500, 501, 502)}

    def value(context: list[int]) -> float:
        assert level != "turn" or tuple(context) in taught
        return 4.0

    assigner = TurnGae(gamma=0.5, lam=1.0, level=level)
    ended = advantages(assigner, chain(1, 1, reward=0.0), value)
    assert ended == [[0.5 * 4.0 - 4.0 - 0.5 * 4.0], [-4.0]]
    for outcome in (Outcome.TIMEOUT, Outcome.CONTEXT_OVERFLOW, Outcome.AGENT_ERROR):
        assert advantages(assigner, chain(1, 1, reward=0.0, outcome=outcome), value) == ended


def test_a_discount_never_crosses_branches() -> None:
    """main ─► left ─► more, main ─► right: `right` is followed by nothing, and `main` by the mean of both."""
    ids = {"main": None, "left": "main", "right": "main", "more": "left"}
    prompts = {"main": [1], "left": [1, 4, 5], "right": [1, 4, 5, 6], "more": [1, 4, 5, 4, 5]}
    calls = [
        make_transition(
            name, prompt=prompts[name], index=n, parent=parent, rewards={"turn": 100.0 if name == "more" else 0.0}
        )
        for n, (name, parent) in enumerate(ids.items())
    ]
    trajectory = make_trajectory("r", calls, reward=1.0)
    main, left, right, more = (
        one[0] for one in advantages(TurnGae(gamma=0.5, lam=1.0), trajectory, lambda context: 0.0)
    )
    assert (main, left, right, more) == (0.5 * (50.5 + 1.0) / 2, 0.5 * 101.0, 1.0, 101.0)


def test_calls_of_others_are_passed_over_as_tool_results_are() -> None:
    whole = chain(1, 1, 1, rewards=(0.0, 2.0, 0.0), reward=1.0)
    middle = replace(whole.transitions[1], trainable=False)
    trajectory = replace(whole, transitions=(whole.transitions[0], middle, whole.transitions[2]))

    def value(context: list[int]) -> float:
        assert len(context) != len(middle.prompt_ids), "nobody asks for the value of a call that no critic learns from"
        return 0.0

    assert advantages(TurnGae(gamma=0.5, lam=1.0), trajectory, value) == [[2.0 + 0.5 * 1.0], [], [1.0]]
    assert targets(TurnGae(gamma=0.5, lam=1.0), trajectory, value)[1] == []


@pytest.mark.parametrize("level", ["turn", "token", "both"])
def test_what_a_call_of_others_earned_is_not_discounted(level: Level) -> None:
    """V = 0.2, 0.4, γ = 0.99, and the last call, which earns the 1, is another policy's: its step is 1 - 0.4, where
    0.99 - 0.4 was given. The first two are followed by two that are passed over in turn."""
    values = {1: 0.2, 5: 0.4}  # by what was read
    whole = chain(1, 1, 1, 1, reward=1.0)
    last = (replace(call, trainable=False) for call in whole.transitions[2:])
    trajectory = replace(whole, transitions=(*whole.transitions[:2], *last))
    found = advantages(
        TurnGae(gamma=0.99, lam=0.0, level=level), trajectory, lambda context: values.get(len(context), 9.9)
    )
    assert found[1] == pytest.approx([1.0 - 0.4])
    assert found[0] == pytest.approx([0.99 * 0.4 - 0.2])
    assert found[2:] == [[], []]


def test_a_critic_that_is_right_leaves_exactly_nothing_of_equal_rewards() -> None:
    found = advantages(TurnGae(gamma=1.0, lam=0.9), chain(2, 3, 1, reward=0.75), lambda context: 0.75)
    assert {value for calls in found for value in calls} == {0.0}


def make_scorer(assigner: TurnGae, *, whitened: bool, rows: Any = "merged") -> Scorer:
    return Scorer(
        rewards=RewardWeights([WeightedReward(name="reward")]),
        credit=assigner,
        whitened=whitened,
        samples=SamplesConfig(rows=rows),
        trained={"policy": TrainedCalls()},
    )


@pytest.mark.parametrize("rows", ["call", "merged"])
def test_targets_stand_at_their_tokens_and_are_never_whitened(rows: Any) -> None:
    assigner = TurnGae()
    (trajectory,) = heard(assigner, chain(2, 3, reward=5.0)).trajectories
    wanted = [call[0] for call in targets(assigner, trajectory)]
    for whitened in (False, True):
        scorer = make_scorer(assigner, whitened=whitened, rows=rows)
        samples = scorer.build(scorer.credit([trajectory])).samples
        found = {}
        for sample in samples:
            assert sample.value_targets is not None
            for position in np.flatnonzero(np.isfinite(sample.value_targets)):
                assert sample.mask[position]
                found[sample.token_ids[:position].tobytes()] = float(sample.value_targets[position])
        assert found == {call.prompt_ids.tobytes(): wanted[t] for t, call in enumerate(trajectory.transitions)}
    tokens = np.concatenate([sample.advantages[sample.mask] for sample in samples])
    assert (tokens.mean(), tokens.std()) == pytest.approx((0.0, 1.0), abs=1e-5), "the last were whitened"
    assert len(samples) == (1 if rows == "merged" else 2)


def test_targets_that_are_infinite_are_the_assigners_defect() -> None:
    class Broken(TurnGae):
        def value_targets(self, group: TrajectoryGroup) -> Any:
            return tuple(
                tuple(np.full(len(call.completion_ids), np.inf) for call in one.transitions)
                for one in group.trajectories
            )

    assigner = Broken()
    scorer = make_scorer(assigner, whitened=False)
    with pytest.raises(PluginError, match="value targets are one finite number per completion token"):
        scorer.build(scorer.credit(heard(assigner, chain(2)).trajectories))


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(("option", "value"), [("gamma", 1.5), ("lam", -0.1), ("token_lam", 2.0)])
def test_an_option_out_of_range_is_named(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"'turn_gae': {option} {value} is not between 0 and 1"):
        TurnGae(**{option: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="level 'word' is none of"):
        TurnGae(level="word")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            {"credit": {"use": "turn_gae"}},
            r"'turn_gae' needs 'values'; use a trainer backend with a critic .* a table \[learner\.critic\]",
        ),
        (
            {"credit": {"use": "grpo"}, "learner": {"critic": {}}},
            r"\[learner\.critic\] is set, and credit\.use 'grpo' teaches it nothing",
        ),
        (
            {
                "credit": {"use": "turn_gae", "options": {"level": "token"}},
                "learner": {"critic": {}},
                "roles": {"a": {"system": "x"}},
                "rewards": {"right": {"use": "a.py:right", "agents": ["a"]}},
            },
            "'turn_gae' teaches a critic the rollout's return, and rewards with `agents` pay each role another",
        ),
    ],
)
def test_a_critic_without_a_teacher_and_a_teacher_without_a_critic_are_refused_at_the_start(
    parts: Any, says: str, tmp_path: Any
) -> None:
    (tmp_path / "a.py").write_text("def right(task, output, trajectory): ...\ndef t(): ...\n", encoding="utf-8")
    base: dict[str, Any] = {
        "agent": "a.py:a",
        "tasks": {"train": "a.py:t"},
        "policy": {"model": "org/m"},
        "folder": tmp_path,
    }
    recipe = Recipe.model_validate({**base, "rewards": {"right": {"use": "a.py:right"}}, **parts})
    with pytest.raises(ConfigError, match=says):
        Parts.build(recipe, load_plugins())


# ------------------------------------------------------------------ conformance


class TestTurnGae(CreditConformance):
    """Where the critic knows nothing and nothing is discounted, it is REINFORCE; its baseline is the critic, not the
    group."""

    is_group_relative = False
    level: Level = "turn"

    def make_assigner(self) -> CreditAssigner:
        return TurnGae(gamma=1.0, lam=1.0, level=self.level)

    def services(self) -> Services:
        return ScriptedServices(values=lambda context: 0.5)

    def expected(self, rewards: Sequence[float]) -> list[float]:
        return [reward - 0.5 for reward in rewards]


class TestGae(TestTurnGae):
    level = "token"


class TestBiLevelGae(TestTurnGae):
    level = "both"
