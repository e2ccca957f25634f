"""What each credit assigner computes, on numbers one can follow."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from lightningrl.errors import ConfigError
from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, TrajectoryGroup
from lightningrl_credit import IdenticalAssignment, TurnReturns, assign_credit
from lightningrl_credit.comparison import check_comparison
from lightningrl_credit.needs import NEEDS
from lightningrl_credit.plugin import lightningrl_credit_assigners
from lightningrl_testing.groups import make_group, make_trajectory, make_transition


def firsts(advantages: Advantages) -> list[list[float | None]]:
    """Each call's advantage (its first token's)."""
    return [[None if tokens is None else float(tokens[0]) for tokens in credit] for credit in advantages]


def test_every_call_of_an_episode_gets_its_return() -> None:
    assert firsts(IdenticalAssignment(baseline="dr_grpo").assign(make_group((0.0, 0.0), (1.0,)))) == [
        [-0.5, -0.5],
        [0.5],
    ]


def test_long_episodes_weigh_no_more_in_the_mean_than_short_ones() -> None:
    advantages = IdenticalAssignment(baseline="dr_grpo").assign(make_group((1.0,) * 9, (0.0,)))
    assert firsts(advantages) == [[0.5] * 9, [-0.5]]


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    credit = firsts(IdenticalAssignment(epsilon=0.0).assign(make_group((0.0,), (1.0,))))
    np.testing.assert_allclose(
        np.array(credit, float), np.array([[-(2**-0.5)], [2**-0.5]]), rtol=1e-6
    )  # ddof = 1: σ = 1/√2


def test_discounted_returns_to_go() -> None:
    group = make_group((1.0, 2.0, 4.0), rewards=(8.0,))
    returns = TurnReturns(gamma=0.5).returns(group.trajectories[0])
    np.testing.assert_allclose(returns, [1 + 0.5 * (2 + 0.5 * 12), 2 + 0.5 * 12, 12])


def test_discount_weighs_turn_rewards_by_name_and_skips_none() -> None:
    calls = [
        make_transition("r/0", rewards={"a": 1.0, "b": 10.0, "c": None}),
        make_transition("r/1", index=1, rewards={"a": None}),
    ]
    returns = TurnReturns(weights={"b": 0.1}).returns(make_trajectory("r", calls, reward=0.5))
    np.testing.assert_allclose(returns, [2.5, 0.5])


def test_discount_never_crosses_branches_of_one_history() -> None:
    calls = [
        make_transition("root", index=0, rewards={"turn": 1.0}),
        make_transition("left", index=1, parent="root", rewards={"turn": 10.0}),
        make_transition("right", index=2, parent="root", rewards={"turn": 100.0}),
    ]
    returns = TurnReturns(gamma=1.0).returns(make_trajectory("r", calls, reward=0.0))
    np.testing.assert_allclose(returns, [111.0, 10.0, 100.0])


def test_discount_passes_between_roles_with_histories_of_their_own() -> None:
    calls = [
        make_transition("write", agent="write"),
        make_transition("rewrite", index=1, agent="rewrite", rewards={"turn": 1.0}),
    ]
    np.testing.assert_allclose(TurnReturns(gamma=0.5).returns(make_trajectory("r", calls, reward=1.0)), [1.0, 2.0])


def test_a_rewrite_is_compared_with_other_rewrites_only() -> None:
    """Rewrites happen after a failure, so against the whole group even a good one looks bad."""

    def episode(name: str, agents: tuple[str, ...], reward: float) -> object:
        return make_trajectory(
            name, [make_transition(f"{name}/{agent}", agent=agent) for agent in agents], reward=reward
        )

    trajectories = (
        episode("a", ("write",), 1.0),
        episode("b", ("write",), 1.0),
        episode("c", ("write", "rewrite"), 0.8),
        episode("d", ("write", "rewrite"), 0.0),
    )
    group = TrajectoryGroup(id="g", trajectories=trajectories)  # type: ignore[arg-type]
    assert firsts(IdenticalAssignment(baseline="dr_grpo").assign(group))[2][1] == pytest.approx(0.1)
    assert firsts(assign_credit(IdenticalAssignment(baseline="dr_grpo"), group, compare="role"))[2][1] == pytest.approx(
        0.4
    )


def test_agent_seen_in_one_trajectory_only_gets_no_gradient() -> None:
    group = TrajectoryGroup(
        id="g",
        trajectories=(
            make_trajectory(
                "a", [make_transition("a/0", agent="solver"), make_transition("a/1", agent="judge")], reward=1.0
            ),
            make_trajectory("b", [make_transition("b/0", agent="solver")], reward=0.0),
        ),
    )
    assert firsts(assign_credit(IdenticalAssignment(), group, compare="role"))[0][1] == 0.0


def test_comparing_by_role_without_returns_says_what_to_add() -> None:
    class Mine(CreditAssigner):
        def assign(self, group: TrajectoryGroup) -> Advantages:
            return ()

    with pytest.raises(
        ConfigError, match=r"'Mine' cannot compare by role: it has no `returns.*set credit.compare = 'group'"
    ):
        check_comparison(Mine(), "role")
    check_comparison(Mine(), "group")


def test_unknown_baseline_and_bad_gamma_are_named() -> None:
    with pytest.raises(ConfigError, match="no baseline named 'gae'; there are: grpo, dr_grpo, rloo, maxrl, opo, none"):
        IdenticalAssignment(baseline="gae")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"gamma 1\.5"):
        TurnReturns(gamma=1.5)


def test_ours_need_what_runs_can_provide() -> None:
    plugins = list(lightningrl_credit_assigners())
    for plugin in plugins:
        if plugin.name not in ("sum", "clip"):
            assert plugin.factory().requires <= NEEDS.keys(), plugin.name
    assert {
        "grpo",
        "dr_grpo",
        "rloo",
        "maxrl",
        "opo",
        "reinforce",
        "turns",
        "states",
        "sum",
        "clip",
        "branches",
        "turn_gae",
        "judge",
        "teacher",
    } == {plugin.name for plugin in plugins}


def test_listing_the_plugins_imports_no_method_of_credit_and_no_reward() -> None:
    code = (
        "import sys; from lightningrl.plugins import load_plugins; plugins = load_plugins(); "
        "assert plugins.credit_assigners and plugins.rewards and plugins.intermediate_rewards; "
        "print(*sorted(name for name in sys.modules if name.startswith('lightningrl_credit')))"
    )
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == ["lightningrl_credit", "lightningrl_credit.plugin"]
