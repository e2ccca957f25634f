"""Credit by states: GiGPO and ECPO on numbers worked by hand, and what a state is known by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightningrl.errors import ConfigError, PluginError
from lightningrl.recipe_tables import SamplesConfig
from lightningrl.types import Advantages, ToolCall, Trajectory, TrajectoryGroup
from lightningrl_credit import IdenticalAssignment, StateGroups, assign_credit
from lightningrl_credit.rewards import RewardWeights, WeightedReward
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.states import KEYS, find_key, normalize, state_keys
from lightningrl_credit.trained_calls import TrainedCalls
from lightningrl_testing.groups import make_trajectory, make_transition


def firsts(advantages: Advantages) -> list[list[float]]:
    """Each call's advantage (its first token's)."""
    return [[float(tokens[0]) for tokens in credit if tokens is not None] for credit in advantages]


def walk(
    name: str, states: Sequence[int], reward: float, *, turns: Sequence[float] = (), says: Sequence[int] = ()
) -> Trajectory:
    """An episode through numbered states: the prompt is the state."""
    calls = [
        make_transition(
            f"{name}/{t}",
            prompt=[state],
            completion=[says[t] if says else 100 * ord(name[0]) + t],
            index=t,
            rewards={"turn": turns[t]} if turns else {},
        )
        for t, state in enumerate(states)
    ]
    return make_trajectory(name, calls, reward=reward)


def group_of(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(id="g", trajectories=trajectories)


# ------------------------------------------------------------------ GiGPO


def test_gigpo_worked_by_hand() -> None:
    """γ = 0.5, F = 1. G: a 0.25 0.5 1, b 0 0, c 0.5 1, d 0. State 1 has a₁ b₁ c₁, state 2 a₂ b₂, states 3 to 5 one
    rollout each."""
    group = group_of(walk("a", [1, 2, 3], 1.0), walk("b", [1, 2], 0.0), walk("c", [1, 4], 1.0), walk("d", [5], 0.0))
    found = firsts(StateGroups(gamma=0.5, omega=2.0, baseline="dr_grpo").assign(group))
    first, second, episode = 0.75 / 3, 0.5 / 2, 0.5
    np.testing.assert_allclose(
        found[0], [1 - episode + 2 * (0.25 - first), 1 - episode + 2 * (0.5 - second), 1 - episode], rtol=1e-6
    )
    np.testing.assert_allclose(found[1], [-episode - 2 * first, -episode - 2 * second], rtol=1e-6)
    np.testing.assert_allclose(found[2], [1 - episode + 2 * (0.5 - first), 1 - episode], rtol=1e-6)


def test_a_state_that_all_rollouts_share_is_not_counted_twice() -> None:
    """All begin in state 1. Three wins of 2, 4 and 8 calls and a loss had 1.25, 1.04 and 0.67 for it with γ = 0.95, and
    1.73 for 0.87 elsewhere with γ = 1."""
    lengths = {"a": 2, "b": 4, "c": 8, "d": 3}
    group = group_of(
        *(
            walk(name, [1, *(100 * ord(name) + t for t in range(1, length))], float(name != "d"))
            for name, length in lengths.items()
        )
    )
    for gamma in (0.95, 1.0):
        credit = StateGroups(gamma=gamma)
        advantages = credit.assign(group)
        assert firsts(advantages) == firsts(IdenticalAssignment().assign(group))
        assert credit.finish_step([group], [advantages])["anchor_hit_rate"] == 0.0
    alone = firsts(StateGroups(episode=0.0, gamma=1.0).assign(group))
    assert [calls[0] for calls in alone] == [calls[0] for calls in firsts(IdenticalAssignment().assign(group))]


def test_turn_rewards_count_in_a_state_that_all_share_and_at_their_size() -> None:
    def credit(pay: float) -> np.ndarray:
        group = group_of(
            walk("a", [1, 2], 1.0, turns=[pay, 0.0]), walk("b", [1, 2], 1.0, turns=[0.0, 0.0]), walk("c", [1, 3], 1.0)
        )
        return np.array([calls[:2] for calls in firsts(StateGroups().assign(group))])

    np.testing.assert_allclose(credit(0.1)[:, 0], [0.1 - 0.1 / 3, -0.1 / 3, -0.1 / 3], rtol=1e-5)
    np.testing.assert_allclose(credit(0.001), credit(0.1) / 100, rtol=1e-5)


def by_the_paper(group: TrajectoryGroup, gamma: float, *, has_deviation: bool) -> list[list[float]]:
    """Eq. 3 and 5 to 8, one step after the other; a state of one rollout gives 0, the deviation is the sample's, ε =
    1e-6. On purpose otherwise: turn rewards are compared by themselves and not divided by a deviation, and a state that
    all share compares them alone."""
    returns: dict[tuple[int, int], float] = {}
    turns: dict[tuple[int, int], float] = {}
    for i, trajectory in enumerate(group.trajectories):
        running, earned = (trajectory.reward or 0.0) / gamma, 0.0
        for t in reversed(range(len(trajectory.transitions))):
            returns[i, t] = running = gamma * running
            turns[i, t] = earned = (trajectory.transitions[t].rewards.get("turn") or 0.0) + gamma * earned
    state = {(i, t): int(group.trajectories[i].transitions[t].prompt_ids[0]) for i, t in returns}

    def relative(value: float, values: list[float]) -> float:
        centred = value - statistics.fmean(values)
        return centred / (statistics.stdev(values) + 1e-6) if has_deviation else centred

    outcomes = [trajectory.reward or 0.0 for trajectory in group.trajectories]
    found = []
    for i, trajectory in enumerate(group.trajectories):
        episode = relative(outcomes[i], outcomes)
        steps = []
        for t in range(len(trajectory.transitions)):
            there = [key for key in returns if state[key] == state[i, t]]
            met = len({rollout for rollout, _ in there})
            step = turns[i, t] - statistics.fmean([turns[key] for key in there]) if met > 1 else 0.0
            if 1 < met < len(group.trajectories):
                step += relative(returns[i, t], [returns[key] for key in there])
            steps.append(episode + step)
        found.append(steps)
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("has_turns", [False, True])
def test_gigpo_agrees_with_the_papers_equations(seed: int, has_turns: bool) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 7, size=5)
    group = group_of(
        *(
            walk(
                "abcde"[i],
                random.integers(0, 4, size=length).tolist(),
                float(random.normal()),
                turns=random.normal(size=length).tolist() if has_turns else (),
            )
            for i, length in enumerate(lengths)
        )
    )
    for baseline in ("grpo", "dr_grpo"):
        found = firsts(StateGroups(gamma=0.9, baseline=baseline).assign(group))
        for ours, theirs in zip(found, by_the_paper(group, 0.9, has_deviation=baseline == "grpo"), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=1e-6)


def test_without_repeated_states_it_is_grpo() -> None:
    group = group_of(walk("a", [1, 2], 1.0), walk("b", [3], 0.0), walk("c", [4, 5], 0.5))
    assert firsts(StateGroups().assign(group)) == firsts(IdenticalAssignment().assign(group))


def test_by_role_the_outcome_is_compared_within_each_role() -> None:
    group = group_of(walk("a", [1, 2], 1.0), walk("b", [3], 0.0), walk("c", [4], 1.0))
    roles = [["write", "check"], ["write"], ["write"]]
    named = group_of(
        *(
            replace(
                one,
                transitions=tuple(replace(call, agent=role) for call, role in zip(one.transitions, names, strict=True)),
            )
            for one, names in zip(group.trajectories, roles, strict=True)
        )
    )
    by_role = assign_credit(StateGroups(), named, compare="role")
    assert firsts(by_role) == firsts(assign_credit(IdenticalAssignment(), named, compare="role"))
    assert firsts(by_role)[0][1] == 0.0


# ------------------------------------------------------------------ ECPO, λ


def test_ecpo_worked_by_hand() -> None:
    """State 1, μ = 0.5: action 7 earned 1 1 0 1, action 8 earned 0 0 0 1. B = (0.25² · 4 + 0.25² · 4) / 8, B + W =
    0.25."""
    earned = [(7, 1.0), (7, 1.0), (7, 0.0), (7, 1.0), (8, 0.0), (8, 0.0), (8, 0.0), (8, 1.0)]
    group = group_of(*(walk("abcdefgh"[i], [1], reward, says=[said]) for i, (said, reward) in enumerate(earned)))
    shrunk = firsts(StateGroups(episode=0.0, shrinkage=2.0, baseline="dr_grpo").assign(group))
    np.testing.assert_allclose(shrunk, [[0.25 * 4 / 6]] * 4 + [[-0.25 * 4 / 6]] * 4, rtol=1e-6)
    gated = firsts(StateGroups(episode=0.0, shrinkage=2.0, gate=4.0, baseline="dr_grpo").assign(group))
    np.testing.assert_allclose(gated, np.array(shrunk) * math.tanh(8 / 4) * 0.0625 / 0.25, rtol=1e-6)
    ungrouped = firsts(StateGroups(episode=0.0, gate=4.0, baseline="dr_grpo").assign(group))
    np.testing.assert_allclose(ungrouped, [[(reward - 0.5) * math.tanh(2) / 4] for _, reward in earned], rtol=1e-6)


def test_an_action_is_the_tools_that_were_called_however_it_was_said() -> None:
    def asks(name: str, query: str, reward: float) -> Trajectory:
        tool = ToolCall(id=f"call_{name}", name="sql", arguments=query, transition_id=f"{name}/0")
        return replace(walk(name, [1], reward), tool_calls=(tool,))

    group = group_of(asks("a", "SELECT  1", 1.0), asks("b", "SELECT 1", 0.0), asks("c", "DROP", 0.0))
    found = firsts(StateGroups(episode=0.0, shrinkage=2.0, baseline="dr_grpo").assign(group))
    assert found[0] == found[1] == pytest.approx([(0.5 - 1 / 3) * 2 / 4])


def test_returns_that_bootstrap_from_the_values_of_states() -> None:
    """λ = 0, γ = 1: a's lucky end after state 2 counts by half, since b was in state 2 too and failed; c never was."""
    group = group_of(walk("a", [1, 2], 1.0), walk("b", [1, 2], 0.0), walk("c", [1, 3], 0.0))
    found = firsts(StateGroups(gamma=1.0, lam=0.0, episode=0.0, baseline="dr_grpo").assign(group))
    np.testing.assert_allclose([calls[0] for calls in found], np.array([0.5, 0.5, 0.0]) - 1 / 3, rtol=1e-6)
    assert [calls[1] for calls in found] == [0.5, -0.5, 0.0]
    same = firsts(StateGroups(gamma=1.0, lam=1.0, episode=0.0, baseline="dr_grpo").assign(group))
    np.testing.assert_allclose([calls[0] for calls in same], np.array([1.0, 0.0, 0.0]) - 1 / 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"baseline": "none"}, "states cannot be compared by baseline 'none'; choose grpo, dr_grpo, rloo"),
        ({"gamma": 1.1}, "gamma 1.1 is not between 0 and 1"),
        ({"lam": -0.5}, "lam -0.5 is not between 0 and 1"),
        ({"shrinkage": -1}, "shrinkage is -1"),
        ({"gate": 0.0}, "gate is 0.0; it is a number of calls above 0"),
        (
            {"key": "promt"},
            "no state key named 'promt'; there are: prompt, observation, tool_result, or your own function as 'file.py:name'",
        ),
        ({"key": "nowhere.py:key"}, "no file"),
    ],
)
def test_options_that_make_no_sense_are_one_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StateGroups(**options)


# ------------------------------------------------------------------ keys


def searching(name: str, *results: str | None) -> Trajectory:
    """A call for each result of its tool, None for a call without one, and a last call."""
    calls = [make_transition(f"{name}/{t}", index=t, tool_call_ids=(f"{name}-{t}",)) for t in range(len(results) + 1)]
    tools = [
        ToolCall(id=f"{name}-{t}", name="find", result=result) for t, result in enumerate(results) if result is not None
    ]
    return make_trajectory(name, calls, tool_calls=tools)


def test_the_last_tool_result_is_what_was_seen_before_a_call() -> None:
    one, other = (
        state_keys(searching(name, *results), KEYS["tool_result"])
        for name, results in (("a", ("x", "y")), ("b", ("y", "y")))
    )
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] == other[2] != one[0]


def test_a_call_after_one_without_tools_is_in_a_state_of_its_own() -> None:
    keys = state_keys(searching("a", "x", None, None), KEYS["tool_result"])
    assert len(set(keys)) == len(keys)


def test_the_observation_is_what_a_prompt_adds_to_the_call_that_it_continues() -> None:
    def chat(name: str, said: int, seen: int) -> Trajectory:
        first = make_transition(f"{name}/0", prompt=[1, 2], completion=[said])
        return make_trajectory(
            name, [first, make_transition(f"{name}/1", prompt=[1, 2, said, seen], index=1, parent=first.id)]
        )

    a, b, c = (state_keys(chat(*scene), KEYS["observation"]) for scene in (("a", 8, 5), ("b", 9, 5), ("c", 9, 6)))
    assert a == b
    assert a[1] != c[1]
    prompts = [state_keys(chat(*scene), KEYS["prompt"]) for scene in (("a", 8, 5), ("b", 9, 5))]
    assert prompts[0][0] == prompts[1][0]
    assert prompts[0][1] != prompts[1][1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("done at 2026-11-22T18:04:05.12Z", "done at 2026-11-23 09:00:00+01:00"),
        ("18:04:05 ready", "09:59:00 ready"),
        ("now 1763834645.12", "now 1763900000"),
        ("id 550e8400-e29b-41d4-a716-446655440000", "id 123e4567-e89b-12d3-a456-426614174000"),
        ("call_9sK2mQ4xAb failed", "call_7tTT1aaaZZ failed"),
        ("<object at 0x7f3a10>", "<object at 0x55ff00>"),
        ("commit 9f86d081884c7d65", "commit 2c26b46b68ffc68f"),
        ("Step 3 of 10: open", "Step 4/10: open"),
        ("attempt #2, round: 7", "attempt #13, round: 8"),
        ("3 rows in 12.5 ms", "3 rows in 0.02 s"),
        ("two  words\n", "two words"),
    ],
)
def test_what_changes_from_run_to_run_is_stripped(one: str, other: str) -> None:
    assert normalize(one) == normalize(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3 rows", "4 rows"),
        ("room 101", "room 102"),
        ("cafe", "face"),
        ("price 12", "price 13"),
        ("4 steps left", "5 steps left"),
    ],
)
def test_what_is_the_state_stays(one: str, other: str) -> None:
    assert normalize(one) != normalize(other)


def test_a_users_function_is_a_key_by_file_or_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "board.py").write_text(
        "def board(trajectory):\n    return [len(call.prompt_ids) for call in trajectory.transitions]\n"
    )
    trajectory = walk("a", [1, 2], 1.0)
    assert list(state_keys(trajectory, find_key("board.py:board", tmp_path))) == [1, 1]
    assert list(state_keys(trajectory, find_key(lambda one: [call.index for call in one.transitions]))) == [0, 1]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (
            [[1], [2]],
            "state key 'mine' returned a list for call 0 of rollout 'a', which is not hashable; return a text",
        ),
        (["one"], "state key 'mine' returned 1 keys for rollout 'a' with 2 calls; return one for each"),
        ("ab", "state key 'mine' returned str for rollout 'a'; return a list with one key for each call"),
        (None, "state key 'mine' returned NoneType for rollout 'a'"),
    ],
)
def test_keys_that_cannot_be_used_are_one_sentence(returned: Any, says: str) -> None:
    def mine(trajectory: Trajectory) -> Any:
        return returned

    with pytest.raises(PluginError, match=says):
        StateGroups(key=mine).assign(group_of(walk("a", [1, 2], 1.0), walk("b", [1], 0.0)))


def test_a_run_reports_how_many_calls_have_a_state_to_be_compared_in() -> None:
    scorer = Scorer(
        rewards=RewardWeights([WeightedReward(name="none")]),
        credit=StateGroups(),
        samples=SamplesConfig(),
        trained={"policy": TrainedCalls()},
    )
    rollouts = (walk("a", [0, 1, 2], 1.0), walk("b", [0, 1, 3, 4], 0.0), walk("c", [0], 0.0))
    metrics = scorer.build(scorer.credit(rollouts)).metrics
    assert metrics["credit/anchor_hit_rate"] == pytest.approx(2 / 8), "the first state, which all share, is none"
    assert metrics["credit/zero_step_credit"] == pytest.approx(6 / 8)
