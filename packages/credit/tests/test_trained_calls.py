"""Which calls are training data: rules of the recipe, roles, and side calls such as titles and commit messages."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rich.console import Console

from lightningrl.errors import ConfigError
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import CallRule, SamplesConfig
from lightningrl.records import Score
from lightningrl.types import Outcome, Trajectory, Transition
from lightningrl_client.recipe_file import load_recipe
from lightningrl_credit import IdenticalAssignment, TurnReturns
from lightningrl_credit.rewards.value import RewardWeights, WeightedReward
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import (
    LeftOut,
    TrainedCalls,
    calls_left_out,
    explain_left_out,
    explain_read_answers,
    read_answers,
    side_calls,
)
from lightningrl_runs.reader import StoredRun
from lightningrl_runs.text import show_rollout
from lightningrl_runs.why_no_gradient import explain_calls
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.live_gateway import LiveAttempt, live_gateway

OFFERED = json.dumps({"write": None})


def call(name: str, index: int, *, tools: bool = False, **more: Any) -> Transition:
    """Two tokens of its own."""
    made = make_transition(
        name, index=index, completion=(10 * index + 1, 10 * index + 2), prompt=more.pop("prompt", (5, 6))
    )
    return replace(made, offered=OFFERED if tools else "", **more)


def reasons(calls: Sequence[Transition], *rules: CallRule, agents: Sequence[str] | None = None) -> list[str | None]:
    trained = {"policy": TrainedCalls(agents=None if agents is None else frozenset(agents), rules=rules)}
    left_out = calls_left_out(calls, trained)
    return [left_out[one.id].value if one.id in left_out else None for one in calls]


RECIPE: dict[str, Any] = {
    "agent": "a.py:b",
    "tasks": {"train": "a.py:c"},
    "rewards": {"r": {"use": "a.py:d"}},
    "policy": {"model": "m"},
}
TITLE = call("title", 0)
MAIN = call("main", 1, tools=True)
LAST = call("last", 2, tools=True, parent_id="main")
COMMIT = call("commit", 3)


def test_titles_and_commit_messages_are_side_calls_and_left_out() -> None:
    assert reasons([TITLE, MAIN, LAST, COMMIT]) == ["side", None, None, "side"]
    more = call("more", 4, parent_id="title")
    assert reasons([TITLE, MAIN, more]) == ["side", None, "side"], "all of its history"


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([TITLE, COMMIT], "no call of the attempt offers tools"),
        ([replace(TITLE, agent="planner"), MAIN], "it names its role"),
        ([MAIN, call("last", 2, parent_id="main")], "it goes on from one with tools"),
        ([MAIN, call("last", 2, is_break=True)], "the same history, rendered anew without tools"),
        (
            [call("plan", 0), call("act", 1, tools=True, is_break=True, prompt=(7, 5, 1, 9))],
            "one with tools goes on from it",
        ),
        ([call("plan", 0), call("act", 1, tools=True, parent_id="plan")], "its history is offered tools later"),
        ([replace(call("asks", 0), tool_call_ids=("c1",)), MAIN], "more tools than are kept were offered"),
    ],
)
def test_calls_that_are_part_of_the_work_are_no_side_calls(calls: list[Transition], why: str) -> None:
    assert side_calls(calls) == frozenset(), why


# ---------------------------------------------------------------------- answers that the work reads

SUMMARY = tuple(range(100, 124))


def holding(*stretch: int) -> tuple[int, ...]:
    return (5, 6, *stretch, 7)


def summary(name: str = "summary", index: int = 1, *, says: Sequence[int] = SUMMARY, **more: Any) -> Transition:
    """It ends with a token that no prompt repeats."""
    return replace(make_transition(name, index=index, completion=(*says, 2), prompt=more.pop("prompt", (5, 6))), **more)


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([MAIN, summary(), call("next", 2, tools=True, prompt=holding(*SUMMARY))], "as it was said"),
        ([MAIN, summary(), call("next", 2, tools=True, prompt=holding(1, 1, *SUMMARY[3:-3], 1))], "other edges"),
        (
            [MAIN, summary(says=(*range(300, 900), *SUMMARY)), call("next", 2, tools=True, prompt=holding(*SUMMARY))],
            "without what it thought before it",
        ),
        (
            [summary(prompt=(5, *SUMMARY[:14], 9, *SUMMARY[14:])), call("next", 2, tools=True, prompt=SUMMARY)],
            "two quotations side by side",
        ),
        (
            [MAIN, summary(), call("next", 2, tools=True, parent_id="main", prompt=(5, 6, 1, 2, *SUMMARY))],
            "a tool that asks the policy, in the history that goes on",
        ),
        (
            [
                summary("part", 0),
                summary("other", 1, says=range(200, 224)),
                summary("whole", 2, says=range(300, 324), prompt=holding(*SUMMARY, *range(200, 224))),
                call("next", 3, tools=True, prompt=holding(*range(300, 324))),
            ],
            "parts that another summary joins",
        ),
    ],
)
def test_an_answer_in_a_later_prompt_of_the_work_is_no_side_call(calls: list[Transition], why: str) -> None:
    assert side_calls(calls) == frozenset(), why
    assert set(read_answers(calls)) == {call.id for call in calls if not call.offered}, why


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([summary(), call("next", 2, tools=True, prompt=(5, 6))], "nobody reads it"),
        ([call("next", 0, tools=True, prompt=holding(*SUMMARY)), summary()], "the prompt was there before it"),
        ([summary(says=SUMMARY[:12]), call("next", 2, tools=True, prompt=holding(*SUMMARY))], "as short as a title"),
        (
            [summary(prompt=holding(*SUMMARY)), call("next", 2, tools=True, prompt=holding(*SUMMARY))],
            "the title repeats the task, and so does the work",
        ),
        (
            [MAIN, summary(), summary("copy", 2, says=range(300, 324), prompt=holding(*SUMMARY))],
            "only a side call reads it",
        ),
        (
            [MAIN, summary(), summary("more", 2, parent_id="summary", prompt=(5, 6, *SUMMARY, 2, *SUMMARY))],
            "only its own history goes on from it",
        ),
    ],
)
def test_an_answer_that_the_work_never_reads_is_a_side_call(calls: list[Transition], why: str) -> None:
    assert side_calls(calls) == {call.id for call in calls if not call.offered}, why
    assert read_answers(calls) == {}, why


def test_the_first_rule_that_fits_decides_before_roles_and_side_calls() -> None:
    calls = [replace(TITLE, fits=("*title*",)), MAIN, replace(LAST, agent="team/critic"), COMMIT]
    assert reasons(calls, CallRule(train=True)) == [None] * 4, "one line reverses the default"
    assert reasons(calls, CallRule(system="*title*")) == [None, None, None, "side"]
    assert reasons(calls, CallRule(role="team", train=False)) == ["side", None, "rule", "side"]
    assert reasons(calls, CallRule(offers_tools=True, train=False)) == ["side", "rule", "rule", "side"]
    assert reasons(calls, CallRule(offers_tools=True, role="team"), CallRule(offers_tools=True, train=False)) == [
        "side",
        "rule",
        None,
        "side",
    ]
    assert reasons(calls, CallRule(system="*title*", offers_tools=True), agents=["team"]) == [
        "role",
        "role",
        None,
        "role",
    ]
    assert reasons(calls, CallRule(system="*commit*", train=False), CallRule()) == [None] * 4, "another pattern"


# ---------------------------------------------------------------------- credit


def scorer(credit: Any, *rules: CallRule) -> Scorer:
    rewards = RewardWeights([WeightedReward(name="reward")])
    return Scorer(
        rewards=rewards, credit=credit, samples=SamplesConfig(), trained={"policy": TrainedCalls(rules=rules)}
    )


def rollouts(*, side: bool) -> list[Trajectory]:
    """The second has one call more, and a commit message."""
    first = [TITLE] * side + [MAIN, LAST]
    second = [MAIN, LAST, call("third", 4, tools=True, parent_id="last")] + [COMMIT] * side
    made = make_trajectory("a", first, reward=1.0), make_trajectory("b", second, reward=0.0)
    return [replace(one, transitions=tuple(named(one.rollout_id, call) for call in one.transitions)) for one in made]


def named(rollout_id: str, call: Transition) -> Transition:
    """With ids of its rollout's own."""
    parent = None if call.parent_id is None else f"{rollout_id}/{call.parent_id}"
    return replace(call, id=f"{rollout_id}/{call.id}", parent_id=parent)


@pytest.mark.parametrize("credit", [IdenticalAssignment(), TurnReturns(gamma=0.5)], ids=["identical", "turns"])
def test_credit_is_as_if_side_calls_had_not_been_made(credit: Any) -> None:
    with_side, without = (scorer(credit).build(scorer(credit).credit(rollouts(side=side))) for side in (True, False))
    assert [row.token_ids.tolist() for row in with_side.samples] == [row.token_ids.tolist() for row in without.samples]
    for row, other in zip(with_side.samples, without.samples, strict=True):
        assert np.array_equal(row.advantages, other.advantages) and np.array_equal(row.weights, other.weights)
    given = {call_id: advantages for score in with_side.scores for call_id, advantages in score.advantages.items()}
    assert given["a/title"] is None and given["b/commit"] is None and len(given) == 7, "they stay in the record"
    assert with_side.metrics["side_calls"] == 2 and "side_calls" not in without.metrics
    trained = scorer(credit, CallRule()).build(scorer(credit, CallRule()).credit(rollouts(side=True)))
    assert trained.metrics["trained_tokens"] == with_side.metrics["trained_tokens"] + 4


def test_calls_that_a_rule_leaves_out_are_counted_and_get_no_row() -> None:
    rule = CallRule(offers_tools=True, train=False)
    scored = scorer(IdenticalAssignment(), rule).build(scorer(IdenticalAssignment(), rule).credit(rollouts(side=False)))
    assert scored.metrics["calls_left_out"] == 5 and scored.samples == ()


def test_a_sentence_says_how_many_calls_are_left_out_and_why() -> None:
    recipe = Recipe.model_validate(RECIPE)
    assert explain_left_out(rollouts(side=True), recipe) == (
        "left out of training, of 7 calls: 2 as side calls, like titles and commit messages (a history of its own, offered no tools, no "
        "role, an answer that no later call's prompt holds); policy.calls = [{ train = true }] takes side calls in"
    )
    assert explain_left_out(rollouts(side=False), recipe) is None
    ruled = Recipe.model_validate(
        RECIPE | {"policy": {"model": "m", "calls": [{"offers_tools": True, "train": False}, {}]}}
    )
    assert (
        explain_left_out(rollouts(side=True), ruled) == "left out of training, of 7 calls: 5 by a rule of policy.calls"
    )


def test_a_sentence_says_which_calls_are_trained_because_a_later_one_holds_their_answers() -> None:
    recipe = Recipe.model_validate(RECIPE)
    calls = [
        TITLE,
        MAIN,
        summary(index=2),
        call("next", 3, tools=True, prompt=holding(*SUMMARY)),
        replace(COMMIT, index=4),
    ]
    rollout = make_trajectory("a", calls)
    words = "for their answers, which later calls' prompts hold, as they hold a summary's"
    assert explain_read_answers([rollout], recipe) == (
        f"kept in training, of 5 calls: 1 (call 2 is in the prompt of call 3) {words}"
    )
    assert explain_read_answers([rollout, make_trajectory("b", [MAIN])], recipe) == (
        f"kept in training, of 6 calls: 1 {words}"
    )
    assert explain_read_answers([make_trajectory("b", [TITLE, MAIN])], recipe) is None
    left_out = explain_left_out([rollout], recipe)
    assert left_out is not None and left_out.startswith(
        "left out of training, of 5 calls: 2 (calls 0, 4) as side calls"
    )
    ruled = Recipe.model_validate(
        RECIPE | {"policy": {"model": "m", "calls": [{"offers_tools": False, "train": False}]}}
    )
    assert explain_read_answers([rollout], ruled) is None, "a rule goes before"


# ---------------------------------------------------------------------- in a recipe, and at the gateway


def test_a_recipe_has_rules_for_each_policy_and_names_a_wrong_key(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        """
agent = "a.py:b"
tasks.train = "a.py:c"
[rewards.r]
use = "a.py:d"
[policy]
model = "m"
[[policy.calls]]
system = "*title*"
train = false
[[policy.calls]]
offers_tools = true
[policies.critic]
model = "m"
calls = [{ train = true }]
"""
    )
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert recipe.policy.calls == (CallRule(system="*title*", train=False), CallRule(offers_tools=True))
    assert recipe.policies["critic"].calls == (CallRule(),)
    changed = load_recipe(tmp_path / "recipe.toml", {"policy.calls": [{"train": True}], "loop.steps": 3})
    assert changed.policy.calls == (CallRule(),) and changed.policies["critic"].calls == (CallRule(),)
    assert Recipe.model_validate_json(recipe.model_dump_json()).policy.calls == recipe.policy.calls
    with pytest.raises(ConfigError, match=r"unknown key 'policy\.calls\.0\.sytem'.*system"):
        load_recipe(tmp_path / "recipe.toml", {"policy.calls": [{"sytem": "*"}]})


async def ask(attempt: LiveAttempt, system: str, text: str, **more: Any) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"authorization": f"Bearer {attempt.key}"}
        answer = await http.post(
            f"{attempt.base_url}/chat/completions", json={"model": "m", "messages": messages, **more}, headers=headers
        )
    assert answer.status_code == 200, answer.text


async def test_the_patterns_that_a_calls_system_text_fits_are_kept_with_it(tmp_path: Path) -> None:
    patterns = ("*title of this*", "You are*")
    tools = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
    async with live_gateway(tmp_path, settings=GatewaySettings(system_patterns={"policy": patterns})) as gateway:
        attempt = await gateway.attempt()
        await ask(attempt, "You write the title of this conversation.\nNo more.", "hi")
        await ask(attempt, "Work.", "hi", tools=tools)
        await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
        (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
        await gateway.store.set_scores([Score(rollout_id=attempt.rollout_id, attempt=1, reward=1.0)])
        await gateway.store.mark_trained(1, [attempt.rollout_id], {})
        run = StoredRun(gateway.store, {"policy": gateway.engine.tokenizer}.get)
        trace = await run.trace(attempt.rollout_id)
        printed = io.StringIO()
        Console(file=printed, width=120).print(await show_rollout(run, attempt.rollout_id, full=False))
    reasons = explain_calls(trace, [trace.rollout], Recipe.model_validate(RECIPE)).values()
    assert [reason and reason.kind.value for reason in reasons] == ["side", "unscored"], "no credit was assigned here"
    assert "call 0 · side call ·" in printed.getvalue() and "call 1 · no role ·" in printed.getvalue()
    assert [one.fits for one in trajectory.transitions] == [patterns[:1], ()]
    title, _ = trajectory.transitions
    assert side_calls(trajectory.transitions) == {title.id}
    assert LeftOut.SIDE in calls_left_out(trajectory.transitions, {"policy": TrainedCalls()}).values()
