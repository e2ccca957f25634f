"""Automatic intermediate rewards: what each pays, how it finds its call, and the potential form, by which nobody
gains."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError, RewardError
from lightningrl.plugins import load_plugins
from lightningrl.protocols import CreditAssigner, IntermediateReward
from lightningrl.recipe import Recipe
from lightningrl.types import Task, ToolCall, ToolStatus, Trajectory, TrajectoryGroup
from lightningrl_credit import IdenticalAssignment, Part, StateGroups, Sum, TurnReturns
from lightningrl_credit.judge_assigner import TurnJudge
from lightningrl_credit.rewards import (
    ExecutionErrors,
    LatencyBudget,
    RepeatedCalls,
    TokenBudget,
    ToolStatusReward,
    TurnReward,
    ValidArguments,
)
from lightningrl_credit.rewards.lineages import discount_of
from lightningrl_credit.turn_gae import TurnGae
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.reward_conformance import IntermediateRewardConformance
from lightningrl_testing.scripted_services import ScriptedServices
from lightningrl_training import evaluator as evaluator_module
from lightningrl_training.build import build_credit
from lightningrl_training.evaluator import Evaluator

NAP_S = 0.05
OK, ERROR, TIMEOUT, UNKNOWN = ToolStatus.OK, ToolStatus.ERROR, ToolStatus.TIMEOUT, ToolStatus.UNKNOWN
PAGES = Path(__file__).parents[3] / "docs" / "reference"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def episode(*tools_of_calls: Sequence[tuple[str, str, ToolStatus]]) -> Trajectory:
    """One call per argument, which asks for these tools: name, arguments, status."""
    transitions, tools = [], []
    for t, asked in enumerate(tools_of_calls):
        ids = tuple(f"{t}-{k}" for k in range(len(asked)))
        transitions.append(make_transition(f"r/{t}", index=t, completion=range(1, t + 2), tool_call_ids=ids))
        for k, (name, arguments, status) in enumerate(asked):
            tools.append(
                ToolCall(
                    id=f"{t}-{k}", name=name, arguments=arguments, status=status, transition_id=f"r/{t}", duration_s=0.5
                )
            )
    return make_trajectory("r", transitions, tool_calls=tools, reward=1.0)


def tree(parents: Sequence[int | None], statuses: Sequence[ToolStatus | None]) -> Trajectory:
    """Calls in order of arrival, each with the call whose tokens it grew from; one tool for each status."""
    calls = [
        make_transition(f"r/{t}", index=t, prompt=(100 + t,), parent=None if parent is None else f"r/{parent}")
        for t, parent in enumerate(parents)
    ]
    tools = [
        ToolCall(id=f"tool-{t}", name="sql", status=status, transition_id=f"r/{t}")
        for t, status in enumerate(statuses)
        if status is not None
    ]
    return make_trajectory("r", calls, tool_calls=tools, reward=1.0)


def with_rewards(trajectory: Trajectory, values: Sequence[float | None]) -> Trajectory:
    calls = [replace(call, rewards={"air": value}) for call, value in zip(trajectory.transitions, values, strict=True)]
    return replace(trajectory, transitions=tuple(calls))


# ---------------------------------------------------------------------- what each pays


SEARCHES = episode(
    [("search", '{"city": "Rome", "n": 1}', OK)],
    [("search", '{"n":1,"city":"Rome"}', OK), ("search", '{"city": "Oslo"}', ERROR)],
    [],
    [("search", "", UNKNOWN)],
)


class Suite(IntermediateRewardConformance):
    def trajectories(self) -> list[Trajectory]:
        return [SEARCHES, episode(), tree((None, 0, 0), (OK, ERROR, TIMEOUT))]


class TestRepeatedCalls(Suite):
    def make_reward(self) -> IntermediateReward:
        return RepeatedCalls()


class TestValidArguments(Suite):
    def make_reward(self) -> IntermediateReward:
        return ValidArguments(schemas={"search": CITY})


class TestExecutionErrors(Suite):
    def make_reward(self) -> IntermediateReward:
        return ExecutionErrors()


class TestLatencyBudget(Suite):
    def make_reward(self) -> IntermediateReward:
        return LatencyBudget(seconds=1.0)


class TestTokenBudget(Suite):
    def make_reward(self) -> IntermediateReward:
        return TokenBudget(tokens=2, per="rollout")


class TestAPotential(Suite):
    def make_reward(self) -> IntermediateReward:
        return TurnReward(name="repeats", function=RepeatedCalls(), weight=0.5, form="potential", gamma=0.9)


def test_a_tool_called_again_with_the_same_arguments_is_charged_however_they_are_written() -> None:
    assert RepeatedCalls(charge=1.0)(SEARCHES) == [0.0, -0.5, None, None]


def test_arguments_that_nobody_told_are_no_repetition() -> None:
    assert RepeatedCalls()(episode([("now", "", OK)], [("now", "", OK)], [("now", "{}", OK)], [("now", "{}", OK)])) == [
        None,
        None,
        0.0,
        -0.1,
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "value"),
    [
        ('{"city": "Rome"}', OK, 0.2),
        ('{"city": 7}', OK, -0.3),
        ("{}", ERROR, -0.3),
        ('["Rome"]', OK, -0.3),
        ('{"city": ', OK, -0.3),
        ("[" * 100_000, OK, -0.3),
        ('{"city": "Rome"}', ToolStatus.INVALID_ARGUMENTS, -0.3),
        ("", ToolStatus.UNKNOWN_TOOL, -0.3),
        ("", OK, 0.2),
        ("", UNKNOWN, None),
        ('{"city": "Rome"}', UNKNOWN, 0.2),
    ],
)
def test_arguments_are_valid_or_not(arguments: str, status: ToolStatus, value: float | None) -> None:
    reward = ValidArguments(ok=0.2, error=-0.3, schemas={"search": CITY})
    assert reward(episode([("search", arguments, status)])) == [value]


def test_a_tool_without_a_schema_takes_any_object() -> None:
    assert ValidArguments()(episode([("search", '{"any": 1}', OK)], [("search", "7", OK)])) == [0.0, -0.1]


def test_what_is_no_schema_is_refused_with_a_sentence() -> None:
    with pytest.raises(
        ConfigError, match=r"the schema of tool 'search' is no JSON schema: 'text' is not valid.*; mend it"
    ):
        ValidArguments(schemas={"search": {"type": "text"}})


def test_errors_of_execution_are_those_of_tools_that_ran() -> None:
    ran = [ERROR, TIMEOUT, OK, ToolStatus.INVALID_ARGUMENTS, UNKNOWN]
    assert ExecutionErrors(charge=1.0)(episode(*([("sql", "{}", status)] for status in ran))) == [
        -1.0,
        -1.0,
        0.0,
        0.0,
        None,
    ]


def test_budgets_are_of_each_call_or_of_the_rollout() -> None:
    assert TokenBudget(tokens=2)(SEARCHES) == [0.0, 0.0, -0.1, -0.1]  # 1, 2, 3, 4 tokens
    assert TokenBudget(tokens=3, per="rollout")(SEARCHES) == [0.0, 0.0, -0.1, -0.1]
    assert LatencyBudget(seconds=0.7)(SEARCHES) == [
        0.0,
        -0.1,
        0.0,
        0.0,
    ]  # a tool takes half a second, the second call has two
    assert LatencyBudget(seconds=1.5, per="rollout")(SEARCHES) == [0.0, 0.0, -0.1, -0.1]  # a call starts each second


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: TokenBudget(tokens=0), "tokens 0 is not positive"),
        (lambda: LatencyBudget(seconds=math.nan), "seconds nan is not positive"),
        (lambda: TokenBudget(tokens=1, per="turn"), "per 'turn' is none of 'call', 'rollout'"),  # type: ignore[arg-type]
        (lambda: TurnReward(name="a", function=RepeatedCalls(), weight=math.inf), "weight inf is not a finite number"),
        (
            lambda: TurnReward(name="a", function=RepeatedCalls(), range=(1, 0)),
            r"range \[1, 0\] is none; write the least value",
        ),
        (lambda: TurnReward(name="a", function=RepeatedCalls(), range=(math.nan, 0)), r"range \[nan, 0\] is none"),
        (lambda: TurnReward(name="a", function=RepeatedCalls(), joins="all"), "joins 'all' is none of 'sum', 'mean'"),  # type: ignore[arg-type]
        (lambda: TurnReward(name="a", function=7), "is a int, not callable"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_refused_with_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


# ---------------------------------------------------------------------- the potential form


TREES = {
    "a line": tree((None, 0, 1, 2), (ERROR, None, OK, OK)),
    "two branches of one call": tree((None, 0, 0), (OK, ERROR, OK)),
    "branches that grow in turn": tree((None, 0, 0, 1, 2, 1), (OK, ERROR, OK, OK, None, TIMEOUT)),
    "two agents in turn": tree((None, None, 0, 1), (OK, ERROR, None, OK)),
    "no tool": tree((None, 0), (None, None)),
}


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.3, 0.0])
@pytest.mark.parametrize("which", TREES)
def test_what_a_call_is_paid_from_now_on_does_not_depend_on_what_it_does(which: str, gamma: float) -> None:
    """Trap 10: the return to go of shaping is -Φ(s_t) in each lineage: nothing that the call can change. By order of
    arrival, a branch was paid for what its neighbour's tools did."""
    plain = TREES[which]
    shaping = TurnReward(name="air", function=ToolStatusReward(ok=1, error=-1), form="potential", gamma=gamma)
    to_go = TurnReturns(gamma=gamma).returns(with_rewards(plain, shaping(plain))) - TurnReturns(gamma=gamma).returns(
        plain
    )
    np.testing.assert_allclose(to_go, [-potential for potential in before(plain)], atol=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.3, 0.0])
@pytest.mark.parametrize("which", TREES)
def test_nor_does_it_under_a_critic_which_joins_branches_by_their_mean(which: str, gamma: float) -> None:
    """Trap 10: paid for each branch, a root with γ = λ = 1 and V = 0 had 2.0 with a tool that works and 1.0 without."""
    plain = TREES[which]
    for critic in (
        TurnGae(gamma=gamma, lam=1.0),
        TurnGae(gamma=gamma, lam=1.0, level="both"),
        TurnGae(gamma=1.0, lam=1.0, level="token"),
    ):
        shaped = shaping_of(critic)(plain)
        paid, unpaid = (firsts(critic, with_rewards(plain, values)) for values in (shaped, [None] * len(shaped)))
        np.testing.assert_allclose(np.subtract(paid, unpaid), [-potential for potential in before(plain)], atol=1e-6)


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_nor_does_it_between_states_which_bootstrap_from_the_next_call_alone(lam: float) -> None:
    credit = StateGroups(gamma=0.9, lam=lam, episode=0.0, baseline="dr_grpo")
    plain, other = TREES["two branches of one call"], replace(tree((None,), (None,)), reward=0.0)
    paid, unpaid = (
        credit.assign(TrajectoryGroup(id="g", trajectories=(with_rewards(plain, values), other)))[0][0]
        for values in (shaping_of(credit)(plain), [None] * 3)
    )
    assert paid is not None and unpaid is not None
    np.testing.assert_allclose(paid, unpaid, atol=1e-6)


def shaping_of(credit: CreditAssigner) -> TurnReward:
    """±1 for a tool, as a potential, discounted as that credit discounts."""
    discount = discount_of(credit)
    assert discount is not None
    return TurnReward(
        name="air", function=ToolStatusReward(ok=1, error=-1), form="potential", gamma=discount[0], joins=discount[1]
    )


def firsts(critic: TurnGae, trajectory: Trajectory) -> list[float]:
    """Each call's advantage, by a critic that has learned nothing."""
    evidence = asyncio.run(critic.score(trajectory, ScriptedServices(values=lambda context: 0.0)))
    (calls,) = critic.assign(TrajectoryGroup(id="g", trajectories=(replace(trajectory, evidence=evidence),)))
    return [float(tokens[0]) for tokens in calls if tokens is not None]


def before(trajectory: Trajectory) -> list[float]:
    """Φ(s_t), written down by hand from the trees above: ±1 for the last tool in the call's own past."""
    found: list[float] = []
    values = ToolStatusReward(ok=1, error=-1)(trajectory)
    for t, call in enumerate(trajectory.transitions):
        past = [k for k in range(t) if is_before(trajectory, k, t) and values[k] is not None]
        found.append(float(values[past[-1]] or 0.0) if past else 0.0)
        assert call.index == t
    return found


def is_before(trajectory: Trajectory, early: int, late: int) -> bool:
    """Of another root, or an ancestor."""

    def line(t: int) -> list[str]:
        by_id = {call.id: call for call in trajectory.transitions}
        call = trajectory.transitions[t]
        found = [call.id]
        while call.parent_id is not None:
            call = by_id[call.parent_id]
            found.append(call.id)
        return found

    return line(early)[-1] != line(late)[-1] or trajectory.transitions[early].id in line(late)


def test_two_lineages_each_give_back_what_their_root_was_paid() -> None:
    """main asks for a tool that works, left for one that fails, right for none: left owes for main alone, and right
    does, too."""
    shaped = TurnReward(name="air", function=ToolStatusReward(ok=1.0, error=-1.0), form="potential")(
        TREES["two branches of one call"]
    )
    assert shaped == [2.0, -1.0, -1.0]


def test_summed_over_an_episode_without_discount_it_is_exactly_nothing() -> None:
    """Trap 10: so it does nothing for credit that knows the episode's reward alone."""
    awkward = TurnReward(name="air", function=ToolStatusReward(ok=0.1, error=-0.3), form="potential")
    for trajectory in TREES.values():
        assert sum(value or 0.0 for value in awkward(trajectory)) == 0.0


def test_a_weight_weighs_either_form() -> None:
    assert TurnReward(name="air", function=RepeatedCalls(charge=1.0), weight=0.25)(SEARCHES) == [
        0.0,
        -0.125,
        None,
        None,
    ]
    assert TurnReward(name="air", function=RepeatedCalls(charge=1.0), weight=0.25, form="potential")(SEARCHES) == [
        0.0,
        -0.125,
        0.0,
        0.125,
    ]
    assert TurnReward(name="air", function=RepeatedCalls(charge=1.0), weight=0.0)(SEARCHES) == [0.0, 0.0, None, None]


# ---------------------------------------------------------------------- in a run


def make_evaluator(
    folder: Path,
    *,
    credit: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] = {},
    learner: Mapping[str, Any] = {},
    **air: Any,
) -> Evaluator:
    (folder / "turns.py").write_text(
        "import pathlib, time\n"
        "from lightningrl import CreditAssigner\n"
        "here = pathlib.Path(__file__).parent\n"
        "def waits(trajectory):\n"
        "    (here / 'begun').touch()\n"
        "    while not (here / 'goes_on').exists():\n"
        "        time.sleep(0.01)\n"
        "    return [0.5 for _ in trajectory.transitions]\n"
        "def naps(trajectory):\n"
        f"    time.sleep({NAP_S})\n"
        "    return [0.5 for _ in trajectory.transitions]\n"
        "def turns(trajectory, *, values):\n"
        "    return [eval(value, {}, {}) for value in values]\n"
        "def tasks():\n    return [{'id': 't', 'input': 1}]\n"
        "def right(task, output, trajectory):\n    return 1.0\n"
        "class Mean(CreditAssigner):\n    gamma = 0.5\n    lam = 0.5\n    joins = 'mean'\n    def assign(self, group):\n        return ()\n",
        encoding="utf-8",
    )
    recipe = {
        "agent": "turns.py:right",
        "tasks": {"train": "turns.py:tasks"},
        "policy": {"model": "org/model", **policy},
        "learner": learner,
        "adapters": ["openai"],
        "rewards": {"right": {"use": "turns.py:right"}},
        "intermediate_rewards": {"air": air},
        "credit": credit or {"use": "turns"},
        "folder": folder,
    }
    return build_credit(Recipe.model_validate(recipe), load_plugins())[0]


async def test_a_recipe_names_weighs_and_shapes_with_the_credits_own_discount(tmp_path: Path) -> None:
    evaluator = make_evaluator(
        tmp_path, credit=AHEAD, use="tool_status", options={"ok": 1.0}, weight=2.0, form="potential"
    )
    (rewarded,) = await evaluator.evaluate([tree((None, 0, 1), (OK, None, None))])
    assert [call.rewards for call in rewarded.transitions] == [
        {"air": 1.0},
        {"air": -1.0},
        {"air": -2.0},
    ]  # γΦ - 0, γΦ - Φ, 0 - Φ


AHEAD = {"use": "states", "options": {"gamma": 0.5, "lam": 0.9}}
"""Credit that goes by a value ahead."""
POTENTIAL: dict[str, Any] = {"use": "tool_status", "options": {"ok": 1.0, "error": -1.0}, "form": "potential"}


async def test_a_tool_that_works_pays_nothing_by_its_potential(tmp_path: Path) -> None:
    """A potential with a γ of its own, 1, paid under 0.5 a tool that works in the first call 0.75, in the next 0.25."""
    evaluator = make_evaluator(tmp_path, credit=AHEAD, **POTENTIAL)
    for statuses in ((OK, None, None), (None, OK, None), (None, None, None)):
        (rewarded,) = await evaluator.evaluate([tree((None, 0, 1), statuses)])
        assert TurnReturns(gamma=0.5).returns(rewarded)[0] == 0.25, "of the outcome alone"


async def test_credit_of_the_users_own_says_how_it_discounts_and_joins_branches(tmp_path: Path) -> None:
    (rewarded,) = await make_evaluator(tmp_path, credit={"use": "turns.py:Mean"}, **POTENTIAL).evaluate(
        [TREES["two branches of one call"]]
    )
    assert [call.rewards["air"] for call in rewarded.transitions] == [
        0.5,
        -1.0,
        -1.0,
    ]  # γ·(1 + 1) / 2 - 0, then 0 - Φ twice


@pytest.mark.parametrize(
    ("use", "options"),
    [
        ("clip", {"of": AHEAD, "at": 5.0}),
        ("sum", {"parts": [{**AHEAD, "whiten": True}]}),
        ("sum", {"parts": [{**AHEAD, "compare": "role"}]}),
        ("sum", {"parts": ["grpo", AHEAD, {"use": "clip", "options": {"of": AHEAD, "at": 1.0}}]}),
    ],
)
async def test_a_potential_is_discounted_as_the_parts_of_the_credit_discount(
    use: str, options: dict[str, Any], tmp_path: Path
) -> None:
    evaluator = make_evaluator(tmp_path, credit={"use": use, "options": options}, **POTENTIAL)
    (rewarded,) = await evaluator.evaluate([tree((None, 0, 1), (OK, None, None))])
    assert [call.rewards["air"] for call in rewarded.transitions] == [0.5, -0.5, -1.0]


def test_parts_that_add_up_what_calls_are_paid_each_in_its_way_have_no_one_discount() -> None:
    turns = TurnReturns(gamma=0.9)
    others: list[CreditAssigner] = [
        TurnReturns(gamma=0.5),
        TurnGae(gamma=0.9),
        TurnGae(gamma=0.9, level="token"),
        TurnJudge(),
        Sum((TurnReturns(gamma=0.9), 1.0), (TurnReturns(gamma=0.5), 1.0)),
    ]
    assert [discount_of(Sum((turns, 1.0), Part(other, whiten=True))) for other in others] == [None] * len(others)
    assert discount_of(Sum((turns, 1.0), Part(IdenticalAssignment(), whiten=True))) == (0.9, "sum")


CRITIC = {"critic": {"model": "trunk"}}


@pytest.mark.parametrize(
    ("credit", "policy"),
    [
        ({"use": "grpo"}, {}),
        ({"use": "turn_gae", "options": {"level": "token", "gamma": 0.9}}, {}),
        ({"use": "sum", "options": {"parts": [AHEAD, {"use": "turns", "options": {"gamma": 0.9}}]}}, {}),
        ({"use": "turn_gae"}, {"trained_agents": ["write"]}),
    ],
    ids=["without gamma", "per token", "two gammas", "calls that are passed over"],
)
def test_a_potential_that_would_pay_is_refused_with_a_sentence(
    credit: dict[str, Any], policy: dict[str, Any], tmp_path: Path
) -> None:
    what = (
        "discounts nothing at calls that are not trained; set its gamma to 1"
        if policy
        else "has no `gamma` per call; take 'turn_gae'"
    )
    sentence = f"intermediate reward 'air' is a potential, which is discounted call by call as returns are, and credit.use '{credit['use']}'"
    with pytest.raises(ConfigError, match=re.escape(f"{sentence} {what}")):
        make_evaluator(
            tmp_path, credit=credit, policy=policy, learner=CRITIC if "gae" in credit["use"] else {}, **POTENTIAL
        )


@pytest.mark.parametrize(
    "credit",
    [
        {"use": "turns"},
        {"use": "turns", "options": {"gamma": 0.5}},
        {"use": "states"},
        {"use": "turn_gae", "options": {"lam": 1.0}},
        {"use": "clip", "options": {"of": {"use": "turns"}, "at": 5.0}},
        {"use": "sum", "options": {"parts": [AHEAD, {"use": "states", "options": {"gamma": 0.5}}]}},
    ],
    ids=["turns", "discounted", "states", "critic", "clip", "sum"],
)
def test_a_potential_that_is_noise_is_refused_with_a_sentence(credit: dict[str, Any], tmp_path: Path) -> None:
    """Of what calls earn to the end a potential leaves -Φ(s_t): nothing that the call can change. With `turns` it took
    signal ÷ noise from 1.36 to 0.72."""
    sentence = (
        f"intermediate reward 'air' is a potential, which is noise where credit.use '{credit['use']}' adds up what "
        "calls earn to the end: no call changes its sum; pay it plainly (form = 'plain', 'tool_status'), or take credit "
        "that goes by a value ahead: 'turn_gae' or 'states' with `lam` below 1"
    )
    if credit["use"] == "sum":  # states join branches otherwise with λ = 1
        sentence = "has no `gamma` per call"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make_evaluator(tmp_path, credit=credit, learner=CRITIC if "gae" in credit["use"] else {}, **POTENTIAL)


@pytest.mark.parametrize(
    ("credit", "policy"),
    [
        ({"use": "turn_gae", "options": {"level": "token", "lam": 0.95}}, {}),
        ({"use": "turn_gae"}, {}),
        ({"use": "turn_gae", "options": {"gamma": 1.0}}, {"trained_agents": ["write"]}),
    ],
)
def test_a_potential_that_pays_nothing_is_taken_beside_a_critic(
    credit: dict[str, Any], policy: dict[str, Any], tmp_path: Path
) -> None:
    make_evaluator(tmp_path, credit=credit, policy=policy, learner=CRITIC, **POTENTIAL)


def test_a_potential_is_computed_anew_where_the_credit_discounts_otherwise(tmp_path: Path) -> None:
    def digest(gamma: float) -> str:
        credit = {"use": "states", "options": {"gamma": gamma, "lam": 0.9}}
        return make_evaluator(tmp_path, credit=credit, **POTENTIAL).digests["intermediate_rewards.air"]

    assert digest(0.5) == digest(0.5) != digest(0.9)


@pytest.mark.parametrize(
    ("air", "sizes"),
    [
        ({"use": "tool_status", "weight": 0.5}, "the weight of 'air'"),
        ({"use": "tool_status", "options": {"ok": 0.01, "error": -0.01}}, "'ok' of 'air' and 'error' of 'air'"),
        ({"use": "repeated_calls", "options": {"charge": 0.5}}, "'charge' of 'air'"),
        ({"use": "repeated_calls", "options": {"charge": 0.5}, "weight": 2.0}, "the weight of 'air' and 'charge' of"),
    ],
)
def test_a_size_that_the_turns_own_baseline_cancels_is_refused(air: dict[str, Any], sizes: str, tmp_path: Path) -> None:
    divided = {"use": "turns", "options": {"turn_baseline": "grpo"}}
    for credit in (divided, {"use": "sum", "options": {"parts": ["grpo", divided]}}):
        sentence = f"turn_baseline 'grpo' divides turn rewards by their own size, and {sizes}"
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            make_evaluator(tmp_path, credit=credit, **air)
    make_evaluator(tmp_path, credit={"use": "turns", "options": {"baseline": "maxrl"}}, **air)


@pytest.mark.parametrize(
    "air",
    [
        {"use": "tool_status"},
        {"use": "tool_status", "options": {"ok": 0.0, "error": -0.5}},
        {"use": "tool_status", "options": {"ok": 0.2}},
        {"use": "turns.py:turns", "options": {"values": []}},
        {"use": "tool_status", "weight": 0.0},
    ],
)
def test_a_size_that_still_counts_under_a_baseline_that_divides_is_taken(air: dict[str, Any], tmp_path: Path) -> None:
    make_evaluator(tmp_path, credit={"use": "turns", "options": {"turn_baseline": "grpo"}}, **air)


@pytest.mark.parametrize(
    ("values", "air", "sentence"),
    [
        (["float('nan')", "0"], {}, "air: returned nan; return a finite float, or None where it has nothing to say"),
        (["1e400", "0"], {}, "air: returned inf; return a finite float"),
        (
            ["0", "1.5"],
            {"range": [0, 1]},
            r"air: returned 1.5, outside of its range \[0, 1\]; mend the reward, or the range",
        ),
        (["1 / 0", "0"], {}, "air: ZeroDivisionError: division by zero"),
    ],
)
async def test_a_turn_reward_that_fails_leaves_its_rollout_out_and_says_why(
    tmp_path: Path, values: list[str], air: dict[str, Any], sentence: str
) -> None:
    """NaN went to the store, which refused the whole step; an exception ended the run."""
    evaluator = make_evaluator(tmp_path, use="turns.py:turns", options={"values": values}, **air)
    (rewarded,) = await evaluator.evaluate([tree((None, 0), (OK, OK))])
    assert (rewarded.reward, rewarded.rewards) == (None, {"right": 1.0}), "what was made is kept"
    assert rewarded.unrewarded is not None
    assert re.match(sentence, rewarded.unrewarded)
    assert [call.rewards for call in rewarded.transitions] == [{}, {}]
    with pytest.raises(RewardError, match="a reward or evidence failed on 1 of 1 rollouts"):
        evaluator.check_failures([rewarded])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (["'1'", "0"], "intermediate reward 'air' returned '1' of type str on rollout 'r'"),
        (["0"], "intermediate reward 'air' returned 1 values for rollout 'r' with 2 calls; return one per call"),
    ],
)
async def test_a_turn_reward_of_another_type_is_a_defect_and_stops_the_run(
    tmp_path: Path, values: list[str], sentence: str
) -> None:
    evaluator = make_evaluator(tmp_path, use="turns.py:turns", options={"values": values})
    with pytest.raises(RewardError, match=sentence):
        await evaluator.evaluate([tree((None, 0), (OK, OK))])


async def test_a_turn_reward_that_takes_its_time_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """Engines and workers of a run are talked to on that loop."""
    evaluator = make_evaluator(tmp_path, use="turns.py:waits")
    begun, goes_on = tmp_path / "begun", tmp_path / "goes_on"
    evaluating = asyncio.create_task(evaluator.evaluate([tree((None, 0), (OK, OK))]))
    async with asyncio.timeout(PATIENCE_S):
        while not begun.exists():
            await asyncio.sleep(0.01)
    goes_on.touch()
    (rewarded,) = await evaluating
    assert [call.rewards["air"] for call in rewarded.transitions] == [0.5, 0.5]


async def test_turn_rewards_that_never_end_stop_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = make_evaluator(tmp_path, use="turns.py:waits")
    monkeypatch.setattr(evaluator_module, "LONGEST_SCORE_S", 0.1)
    with pytest.raises(RewardError, match=r"intermediate rewards \('air'\) of 1 rollouts took more than 0\.1 s"):
        await evaluator.evaluate([tree((None, 0), (OK, OK))])
    (tmp_path / "goes_on").touch()


async def test_turn_rewards_have_all_their_time_however_long_they_waited_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one group after the other."""
    evaluator = make_evaluator(tmp_path, use="turns.py:naps")
    monkeypatch.setattr(evaluator_module, "LONGEST_SCORE_S", 40 * NAP_S)
    groups = [evaluator.evaluate([tree((None, 0), (OK, OK))]) for _ in range(45)]
    assert len(await asyncio.gather(*groups)) == 45


def test_every_reward_of_ours_is_in_the_list_that_says_what_it_pays() -> None:
    page = (PAGES / "intermediate-rewards.md").read_text(encoding="utf-8")
    heads = [line.partition(":")[0] for line in page.splitlines() if line.startswith("- `")]
    named = {name for head in heads for name in load_plugins().intermediate_rewards if f"`{name}`" in head}
    assert named == set(load_plugins().intermediate_rewards)


def test_json_is_compared_by_what_it_says() -> None:
    from lightningrl.tool_schemas import canonical

    assert canonical('{"b": 1, "a": [1, 2]}') == canonical('{ "a":[1,2],"b":1}')
    assert canonical("not json") == "not json"
    assert json.loads(canonical('"ü"')) == "ü"


@pytest.mark.parametrize("page", ["intermediate-rewards.md", "rewards.md"])
async def test_the_parts_of_recipes_on_the_pages_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # where `python` is
    text = (PAGES / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml title=part_of_a_recipe.toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    (tmp_path / "mine.py").write_text("def tasks():\n    return [{'id': 't', 'input': 1}]\n", encoding="utf-8")
    for block in blocks:
        whole = {
            "agent": "mine.py:tasks",
            "tasks": {"train": "mine.py:tasks"},
            "policy": {"model": "org/model"},
            "folder": tmp_path,
        }
        recipe = Recipe.model_validate({"rewards": {"right": {"use": "exact"}}, **whole, **tomllib.loads(block)})
        rewarded = await build_credit(recipe, load_plugins())[0].evaluate(
            [replace(SEARCHES, task=Task(id="t", input=1, answer="4"), output="4")]
        )
        assert [one.unrewarded for one in rewarded] == [None]
        assert all(call.rewards.keys() == recipe.intermediate_rewards.keys() for call in rewarded[0].transitions)
