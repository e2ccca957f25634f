"""A branch: the first calls of a recorded rollout answered word for word to an agent that runs anew, then sampled."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from sizes import PATIENCE_S
from starlette.applications import Starlette

from lightningrl.types import BranchPoint, Outcome, Trajectory, Transition
from lightningrl_server.gateway.app import create_gateway
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.store.errors import Conflict, UnknownRecord
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
Agent = Callable[[LiveAttempt], Any]
CLOCK = {"system": lambda: f"It is {time.time_ns()}."}
SESSION = {"system": lambda: f"Session {uuid.uuid4()}."}
DICE = {"weather": lambda: f"rain {random.random()}"}
OPEN: list[Any] = []
"""Clients to be closed."""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as running:
        yield running
        while OPEN:
            await OPEN.pop().close()


def openai_client(attempt: LiveAttempt) -> openai.AsyncOpenAI:
    OPEN.append(openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0))
    client: openai.AsyncOpenAI = OPEN[-1]
    return client


async def chat(
    attempt: LiveAttempt,
    *,
    stream: bool = False,
    weather: Callable[[], str] = lambda: "rain",
    system: Callable[[], str] = lambda: "Be short.",
    turns: int = 4,
) -> list[str]:
    """Asks, is told the weather by a tool, and asks on."""
    client = openai_client(attempt)
    messages: list[Any] = [{"role": "system", "content": system()}, {"role": "user", "content": "What now?"}]
    said = []
    for turn in range(turns):
        answer = await (_streamed(client, messages) if stream else _whole(client, messages))
        messages.append(answer)
        said.append(answer.get("content") or json.dumps(answer["tool_calls"][0]["function"]))
        for call in answer.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": weather()})
        if not answer.get("tool_calls"):
            messages.append({"role": "user", "content": f"And then {turn}?"})
    return said


async def _whole(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    answer = await client.chat.completions.create(model="m", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    return answer.choices[0].message.model_dump(exclude_none=True)


async def _streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    async with client.chat.completions.stream(model="m", messages=messages, tools=[WEATHER]) as events:  # type: ignore[list-item]
        async for _ in events:
            pass
        answer = (await events.get_final_completion()).choices[0].message.model_dump(exclude_none=True)
    for call in answer.get("tool_calls") or ():
        call["function"].pop("parsed_arguments", None)
    return answer


async def messages_api(attempt: LiveAttempt) -> list[str]:
    client = anthropic.AsyncAnthropic(base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key, max_retries=0)
    OPEN.append(client)
    messages: list[Any] = [{"role": "user", "content": "What now?"}]
    for turn in range(4):
        answer = await client.messages.create(model="m", max_tokens=50, messages=messages)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": f"And then {turn}?"}]
    return [message["content"][0].text for message in messages[1::2]]


async def responses_api(attempt: LiveAttempt) -> list[str]:
    """Goes on by the id of the earlier answer, which is another in every rollout."""
    client = openai_client(attempt)
    answer = await client.responses.create(model="m", input="What now?")
    said = [answer.output_text]
    for turn in range(3):
        answer = await client.responses.create(model="m", input=f"And then {turn}?", previous_response_id=answer.id)
        said.append(answer.output_text)
    return said


async def run(
    gateway: LiveGateway, agent: Agent, *texts: str, branch: BranchPoint | None = None
) -> tuple[Any, Trajectory]:
    """What the agent returned, or raised, and its rollout."""
    gateway.engine.enqueue(*texts)
    attempt = await gateway.attempt(branch=branch)
    output: Any = None
    try:
        output = await agent(attempt)
        outcome = Outcome.SUCCEEDED
    except Exception as error:
        output, outcome = error, Outcome.AGENT_ERROR
    await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, outcome, error=str(output))
    gateway.gateway.forget(attempt.rollout_id, attempt.attempt)
    (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    return output, trajectory


def after(trajectory: Trajectory, calls: int) -> BranchPoint:
    return BranchPoint(rollout_id=trajectory.rollout_id, attempt=trajectory.attempt, calls=calls)


def same_tokens(one: Transition, other: Transition) -> bool:
    return (
        np.array_equal(one.prompt_ids, other.prompt_ids)
        and np.array_equal(one.completion_ids, other.completion_ids)
        and np.array_equal(one.logprobs, other.logprobs)
        and (one.policy_version, one.sampling, one.finish_reason)
        == (other.policy_version, other.sampling, other.finish_reason)
    )


async def streamed_chat(attempt: LiveAttempt) -> list[str]:
    return await chat(attempt, stream=True)


@pytest.mark.parametrize("calls", range(5))
@pytest.mark.parametrize(
    "agent", [chat, streamed_chat, messages_api, responses_api], ids=["chat", "stream", "messages", "responses"]
)
async def test_the_first_calls_are_answered_as_they_were_and_the_rest_is_sampled(
    gateway: LiveGateway, agent: Agent, calls: int
) -> None:
    first = CALL if "chat" in agent.__name__ else "one"
    said, recorded = await run(gateway, agent, first, "two", "three", "four")
    gateway.engine.version = 7
    fresh = [f"other {number}" for number in range(4 - calls)]
    said_again, branch = await run(gateway, agent, *fresh, branch=after(recorded, calls))
    assert said_again == [*said[:calls], *fresh]
    assert branch.outcome is Outcome.SUCCEEDED and branch.branch == after(recorded, calls)
    assert len(recorded.transitions) == len(branch.transitions) == 4
    for position, (one, other) in enumerate(zip(recorded.transitions, branch.transitions, strict=True)):
        is_repeated = position < calls
        assert other.replayed_from == (one.id if is_repeated else None)
        assert other.trainable is not is_repeated
        assert other.id != one.id
        assert same_tokens(one, other) is is_repeated
        assert other.policy_version == (0 if is_repeated else 7)
    assert [call.parent_id for call in branch.transitions] == [None, *(call.id for call in branch.transitions[:3])]


async def test_calls_at_once_may_come_in_another_order(gateway: LiveGateway) -> None:
    """Three questions at once, two of them before the branch point; then one that all of them lead to."""

    async def several(attempt: LiveAttempt, order: tuple[int, ...]) -> list[str]:
        client = openai_client(attempt)
        said = {}
        for number in order:
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": f"question {number}"}]
            )
            said[number] = answer.choices[0].message.content or ""
        return [said[number] for number in sorted(said)]

    said, recorded = await run(gateway, lambda attempt: several(attempt, (0, 1, 2)), "a", "b", "c")
    again, branch = await run(gateway, lambda attempt: several(attempt, (2, 1, 0)), "new", branch=after(recorded, 2))
    assert (said, again, branch.outcome) == (["a", "b", "c"], ["a", "b", "new"], Outcome.SUCCEEDED)


async def test_equal_calls_are_each_answered_once(gateway: LiveGateway) -> None:
    async def ask(attempt: LiveAttempt) -> list[str | None]:
        client = openai_client(attempt)
        answers = [
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a word"}])
            for _ in range(3)
        ]
        return [answer.choices[0].message.content for answer in answers]

    _, recorded = await run(gateway, ask, "a", "b", "c")
    again, _ = await run(gateway, ask, "new", branch=after(recorded, 2))
    assert again == ["a", "b", "new"]


async def test_the_choices_of_one_call_are_one(gateway: LiveGateway) -> None:
    async def choose(attempt: LiveAttempt) -> list[str | None]:
        client = openai_client(attempt)
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "choose"}], n=2)
        texts = [choice.message.content for choice in answer.choices]
        last = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": str(texts)}])
        return [*texts, last.choices[0].message.content]

    said, recorded = await run(gateway, choose, "left", "right", "end")
    again, branch = await run(gateway, choose, "new", branch=after(recorded, 2))
    assert again == [*said[:2], "new"] and branch.outcome is Outcome.SUCCEEDED
    with pytest.raises(Conflict, match="between the choices of one call"):
        await gateway.attempt(branch=after(recorded, 1))


async def test_a_seed_of_the_agents_own_makes_no_two_branches_alike(gateway: LiveGateway) -> None:
    async def ask(attempt: LiveAttempt) -> None:
        client = openai_client(attempt)
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a word"}], seed=3)

    _, recorded = await run(gateway, ask, "a")
    _, branch = await run(gateway, ask, "b", branch=after(recorded, 0))
    assert (recorded.transitions[0].sampling.seed, branch.transitions[0].sampling.seed) == (3, None)


async def test_a_restarted_server_goes_on_where_the_branch_was(gateway: LiveGateway) -> None:
    async def ask(attempt: LiveAttempt, *, restart_before: int | None = None) -> list[str]:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        said = []
        for turn in range(4):
            renderers = {"policy": PolicyRenderer(gateway.engine.tokenizer)}
            app = None
            if turn == restart_before:
                app = Starlette(routes=create_gateway(gateway.store, gateway.engines, renderers).routes)
            async with httpx.AsyncClient(
                transport=None if app is None else httpx.ASGITransport(app=app), timeout=PATIENCE_S
            ) as client:
                body = {"model": "m", "messages": messages}
                answer = await client.post(
                    f"{attempt.base_url}/chat/completions",
                    json=body,
                    headers={"authorization": f"Bearer {attempt.key}"},
                )
            message = answer.json()["choices"][0]["message"]
            said.append(message["content"])
            messages += [message, {"role": "user", "content": f"turn {turn}"}]
        return said

    said, recorded = await run(gateway, ask, "a", "b", "c", "d")
    for turn in range(4):
        restart = partial(ask, restart_before=turn)
        again, branch = await run(gateway, restart, "new", branch=after(recorded, 3))
        assert again == [*said[:3], "new"] and branch.outcome is Outcome.SUCCEEDED


async def test_a_stream_that_was_left_is_asked_again_and_repeated_once(gateway: LiveGateway) -> None:
    async def leave_and_ask_again(attempt: LiveAttempt, *, leave: bool) -> str | None:
        client = openai_client(attempt)
        if leave:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    break
            await stream.close()
            while not await attempt.transitions():
                await asyncio.sleep(0.01)
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return answer.choices[0].message.content

    gateway.engine.token_delay_s = 0.01
    _, recorded = await run(
        gateway, lambda attempt: leave_and_ask_again(attempt, leave=True), "a long text that nobody reads", "whole"
    )
    assert [call.finish_reason for call in recorded.transitions] == ["broken_off", "stop"]
    said, branch = await run(
        gateway, lambda attempt: leave_and_ask_again(attempt, leave=False), branch=after(recorded, 2)
    )
    assert (said, branch.outcome) == ("whole", Outcome.SUCCEEDED)


@pytest.mark.parametrize(
    ("then", "now", "why"),
    [
        ({"weather": lambda: "rain"}, {"weather": lambda: "sun"}, "tool 'weather' answered otherwise from token"),
        ({"turns": 4}, {"turns": 1}, "ended 2 calls before the branch point"),
        (
            {"system": lambda: f"It is {time.time_ns()}."},
            {"system": lambda: f"It is {time.time_ns()}."},
            "call 0: its prompt differs from",
        ),
        (
            {"system": lambda: f"Session {uuid.uuid4()}."},
            {"system": lambda: f"Session {uuid.uuid4()}."},
            "call 0: its prompt differs from",
        ),
        (
            {"weather": lambda: f"rain {random.random()}"},
            {"weather": lambda: f"rain {random.random()}"},
            "tool 'weather' answered otherwise",
        ),
    ],
    ids=["a tool that changed", "an agent that ends early", "a clock", "a random id", "a random tool"],
)
async def test_a_branch_that_diverges_says_why(
    gateway: LiveGateway, then: dict[str, Any], now: dict[str, Any], why: str
) -> None:
    _, recorded = await run(gateway, lambda attempt: chat(attempt, **then), CALL, "two", "three", "four")
    _, branch = await run(gateway, lambda attempt: chat(attempt, **now), branch=after(recorded, 3))
    assert branch.outcome is Outcome.DIVERGED and why in str(branch.error)


async def test_sdks_do_not_repeat_a_call_that_diverged(gateway: LiveGateway) -> None:
    async def ask(attempt: LiveAttempt) -> str:
        async with openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
            with pytest.raises(openai.ConflictError):
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "something else"}]
                )
        return str(len(await attempt.store.other_calls(attempt.rollout_id, attempt.attempt)))

    _, recorded = await run(gateway, chat, "a")
    refused, _ = await run(gateway, ask, branch=after(recorded, 1))
    assert refused == "1"


async def test_an_agent_that_swallows_the_refusal_has_diverged_all_the_same(gateway: LiveGateway) -> None:
    numbers = iter(range(100))

    async def ask(attempt: LiveAttempt) -> str:
        client = openai_client(attempt)
        for _ in range(3):
            try:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": f"It is {next(numbers)} o'clock."}]
                )
            except openai.ConflictError as error:
                assert "diverged at call 0" in str(error)
        return "fine"

    _, recorded = await run(gateway, ask, "a", "b", "c")
    said, branch = await run(gateway, ask, branch=after(recorded, 1))
    assert (said, branch.outcome, branch.transitions) == ("fine", Outcome.DIVERGED, ())
    assert "'" in str(branch.error) and "now" in str(branch.error) and "then; fix clocks" in str(branch.error)
    assert (
        await gateway.store.finish_attempt(branch.rollout_id, 1, Outcome.SUCCEEDED) == "failed"
    )  # the worker says it again


async def test_a_branch_point_is_refused_in_one_sentence_where_there_is_none(gateway: LiveGateway) -> None:
    _, recorded = await run(gateway, chat, CALL, "two", "three", "four")
    with pytest.raises(Conflict, match=r"after 5 calls, and attempt 1 of that has 4; branch after 0 to 4"):
        await gateway.attempt(branch=after(recorded, 5))
    with pytest.raises(UnknownRecord, match="'nobody' has no attempt 1"):
        await gateway.attempt(branch=BranchPoint(rollout_id="nobody", attempt=1, calls=0))
    running = await gateway.attempt()
    with pytest.raises(Conflict, match="still runs; wait for its end"):
        await gateway.attempt(branch=replace(after(recorded, 0), rollout_id=running.rollout_id))
