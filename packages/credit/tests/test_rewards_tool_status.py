"""Automatic intermediate rewards from what became of a call's tools."""

from __future__ import annotations

from typing import Any

import pytest

from lightningrl.protocols import IntermediateReward
from lightningrl.types import ToolCall, ToolStatus, Trajectory
from lightningrl_credit.metrics import describe_rollouts
from lightningrl_credit.plugin import lightningrl_intermediate_rewards, lightningrl_reward_functions
from lightningrl_credit.rewards import (
    ExecutionErrors,
    MalformedCalls,
    RepeatedCalls,
    ToolStatusReward,
    TurnReward,
    ValidArguments,
)
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.reward_conformance import IntermediateRewardConformance

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


def test_call_gets_the_mean_of_its_tools_and_none_without_any_known() -> None:
    assert ToolStatusReward(ok=1.0, error=-2.0)(EPISODES[0]) == [1.0, None, -0.5, None]


@pytest.mark.parametrize(
    "status", [ToolStatus.ERROR, ToolStatus.UNKNOWN_TOOL, ToolStatus.INVALID_ARGUMENTS, ToolStatus.TIMEOUT]
)
def test_every_kind_of_failure_counts_as_one(status: ToolStatus) -> None:
    assert ToolStatusReward(error=-0.3)(episode((status,))) == [-0.3]


def test_malformed_calls_are_charged_and_are_a_share_of_the_answers_that_were_offered_tools() -> None:
    bad = make_transition("r/0", offered="{}", malformed=("'<tool_call>' is no tool call",))
    calls = [bad, make_transition("r/1", offered="{}"), make_transition("r/2")]
    assert MalformedCalls(charge=0.3)(make_trajectory("r", calls)) == [-0.3, 0.0, None]
    assert describe_rollouts([make_trajectory("r", calls)])["malformed_tool_calls"] == 0.5
    assert "malformed_tool_calls" not in describe_rollouts([make_trajectory("r", calls[2:])])


def test_tool_of_nobody_changes_nothing() -> None:
    stray = make_trajectory("r", [make_transition("r/0")], tool_calls=[ToolCall(id="x", name="f", status=ERROR)])
    assert ToolStatusReward()(stray) == [None]


def test_shaping_pays_the_change_of_the_last_share_of_successes() -> None:
    values = TurnReward(name="air", function=ToolStatusReward(ok=1.0, error=-1.0), form="potential")(
        episode((ERROR,), (), (OK,), ())
    )
    assert values == [-1.0, 0.0, 2.0, -1.0]


def test_plugin_records_make_rewards() -> None:
    options: dict[str, dict[str, Any]] = {"latency_budget": {"seconds": 1.0}, "token_budget": {"tokens": 1}}
    assert all(
        len(plugin.factory(**options.get(plugin.name, {}))(EPISODES[0])) == 4
        for plugin in lightningrl_intermediate_rewards()
    )
    assert {plugin.name: plugin for plugin in lightningrl_reward_functions()}["reported"].factory(
        name="success"
    ).name == "success"


# ---------------------------------------------------------------------- what an agent tells of itself


def told(call: str, count: int, status: ToolStatus, *, ids: str = "extra") -> list[ToolCall]:
    return [ToolCall(id=f"{ids}-{number}", name="f", status=status, transition_id=call) for number in range(count)]


@pytest.mark.parametrize("reward", [ToolStatusReward(), ExecutionErrors(), RepeatedCalls(), ValidArguments()])
@pytest.mark.parametrize("is_asked", [True, False], ids=["asked for by id", "in the answer's text"])
def test_many_reports_of_tools_that_worked_do_not_outweigh_one_that_failed(
    reward: IntermediateReward, *, is_asked: bool
) -> None:
    failed = ToolCall(id="honest", name="f", arguments="{", status=ERROR, transition_id="r/0")
    call = make_transition("r/0", tool_call_ids=("honest",) if is_asked else ())
    honest = list(reward(make_trajectory("r", [call], tool_calls=[failed, failed])))
    padded = list(
        reward(
            make_trajectory(
                "r", [call], tool_calls=[*told("r/0", 49, OK), failed, failed, *told("r/0", 50, OK, ids="more")]
            )
        )
    )
    assert padded == honest


def test_a_tool_that_nobody_asked_for_by_id_may_lower_what_a_call_is_paid_once() -> None:
    call = make_transition("r/0", tool_call_ids=("a", "b"))
    asked = [ToolCall(id=name, name="f", status=OK) for name in "ab"]
    assert ToolStatusReward(ok=1.0, error=-1.0)(
        make_trajectory("r", [call], tool_calls=[*asked, *told("r/0", 9, ERROR)])
    ) == [1 / 3]


def test_a_failure_cannot_be_told_to_be_of_another_call_than_its_id_says() -> None:
    calls = [make_transition("r/0", tool_call_ids=("a",)), make_transition("r/1", index=1)]
    moved = ToolCall(id="a", name="f", status=ERROR, transition_id="r/1")
    assert ToolStatusReward()(make_trajectory("r", calls, tool_calls=[moved])) == [-0.1, None]
