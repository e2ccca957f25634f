"""Automatic intermediate rewards from what became of a call's tools."""

from __future__ import annotations

from typing import Any

import pytest

from lightningrl.rewards import ToolStatusReward, ToolStatusShaping, TurnReward
from lightningrl.rewards.plugins import INTERMEDIATE_PLUGINS, PLUGINS
from lightningrl.testing.groups import make_trajectory, make_transition
from lightningrl.testing.reward_conformance import IntermediateRewardConformance
from lightningrl.types import ToolCall, ToolStatus, Trajectory

OK, ERROR, UNKNOWN = ToolStatus.OK, ToolStatus.ERROR, ToolStatus.UNKNOWN


def episode(*statuses: tuple[ToolStatus, ...]) -> Trajectory:
    """One call per argument, each with tools of these statuses; every other tool is linked by its id alone."""
    transitions, tools = [], []
    for t, of_call in enumerate(statuses):
        ids = tuple(f"tool-{t}-{k}" for k in range(len(of_call)))
        transitions.append(make_transition(f"r/{t}", index=t, tool_call_ids=ids))
        tools += [
            ToolCall(id=id_, name="run_sql", status=status, transition_id=None if k % 2 else f"r/{t}")
            for k, (id_, status) in enumerate(zip(ids, of_call, strict=True))
        ]
    return make_trajectory("r", transitions, tool_calls=tools, reward=1.0)


EPISODES = [episode((OK,), (), (ERROR, OK), (UNKNOWN,)), episode(()), episode((ToolStatus.TIMEOUT,), (OK,))]


class TestToolStatusReward(IntermediateRewardConformance):
    def make_reward(self) -> ToolStatusReward:
        return ToolStatusReward()

    def trajectories(self) -> list[Trajectory]:
        return EPISODES


class TestToolStatusShaping(IntermediateRewardConformance):
    def make_reward(self) -> ToolStatusShaping:
        return ToolStatusShaping()

    def trajectories(self) -> list[Trajectory]:
        return EPISODES


def test_call_gets_the_mean_of_its_tools_and_none_without_any_known() -> None:
    assert ToolStatusReward(ok=1.0, error=-2.0)(EPISODES[0]) == [1.0, None, -0.5, None]


@pytest.mark.parametrize("status", [ToolStatus.ERROR, ToolStatus.UNKNOWN_TOOL, ToolStatus.INVALID_ARGUMENTS, ToolStatus.TIMEOUT])
def test_every_kind_of_failure_counts_as_one(status: ToolStatus) -> None:
    assert ToolStatusReward(error=-0.3)(episode((status,))) == [-0.3]


def test_tool_of_nobody_changes_nothing() -> None:
    stray = make_trajectory("r", [make_transition("r/0")], tool_calls=[ToolCall(id="x", name="f", status=ERROR)])
    assert ToolStatusReward()(stray) == [None]


def test_shaping_pays_the_change_of_the_last_share_of_successes() -> None:
    values = TurnReward(name="air", function=ToolStatusShaping(scale=1.0))(episode((ERROR,), (), (OK,), ()))
    assert values == [-1.0, 0.0, 2.0, -1.0]


def test_plugin_records_make_rewards() -> None:
    options: dict[str, dict[str, Any]] = {"latency_budget": {"seconds": 1.0}, "token_budget": {"tokens": 1}}
    assert all(len(plugin.factory(**options.get(plugin.name, {}))(EPISODES[0])) == 4 for plugin in INTERMEDIATE_PLUGINS)
    assert {plugin.name: plugin for plugin in PLUGINS}["reported"].factory(name="success").name == "success"
