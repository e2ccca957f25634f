"""Tools of agents that say nothing themselves: read from what the gateway answers and from what the next requests bring
back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from starlette.applications import Starlette

from lightningrl.plugins import PluginManager, hookimpl
from lightningrl.types import BranchPoint, Outcome, ToolCall, ToolStatus, Trajectory
from lightningrl_client.control.client import ServerClient
from lightningrl_credit.rewards import ToolStatusReward
from lightningrl_server.gateway.app import create_gateway
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_training.evaluator import classify_tools

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "trains")
]
Complete = Callable[[LiveAttempt, Sequence[Any]], Awaitable[dict[str, Any]]]
"""Asks with these messages; the message that was answered."""


def asks(*calls: tuple[str, dict[str, Any]]) -> str:
    """The policy's answer that asks for these tools."""
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


WEATHER = asks(("weather", {"city": "Rome"}))


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as gateway:
        yield gateway


async def post(
    attempt: LiveAttempt, messages: Sequence[Any], app: Starlette | None = None, status: int = 200, **more: Any
) -> dict[str, Any]:
    """A call by plain HTTP; the first choice's message."""
    transport = httpx.ASGITransport(app=app) if app is not None else None
    headers = {"authorization": f"Bearer {attempt.key}", **more.pop("headers", {})}
    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=60) as http:
        body = {"model": "m", "messages": list(messages), "tools": TOOLS, **more}
        answer = await http.post(f"{attempt.base_url}/chat/completions", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    choices = answer.json().get("choices") or [{"message": {}}]
    return {key: value for key, value in choices[0]["message"].items() if value is not None}


async def report(attempt: LiveAttempt, **told: Any) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"authorization": f"Bearer {attempt.key}"}
        answer = await http.post(f"{attempt.base_url}/tool_calls", json={"tool_calls": [told]}, headers=headers)
    assert answer.status_code == 204, answer.text


def result(call: Any, content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": content, **more}


async def finished(gateway: LiveGateway, attempt: LiveAttempt) -> Trajectory:
    async with ServerClient(gateway.url, gateway.run_key) as client:
        await client.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
        (trajectory,) = await client.trajectories([attempt.rollout_id])
    return trajectory


def facts(tool: ToolCall) -> tuple[Any, ...]:
    return tool.name, json.loads(tool.arguments), tool.result, tool.status.value, tool.transition_id, tool.agent


QUESTION = {"role": "user", "content": "Which weather?"}


# ---------------------------------------------------------------------- in every dialect, by the official SDKs


async def chat(attempt: LiveAttempt) -> list[str]:
    """Ids of the tool calls. The first tool worked, the second failed."""
    messages: list[Any] = [QUESTION]
    ids: list[str] = []
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        for content in ("sun", "it broke", None):
            headers = {"x-lightningrl-agent": "planner"}
            reply = await client.chat.completions.create(
                model="m", messages=messages, tools=TOOLS, extra_headers=headers
            )
            messages.append(reply.choices[0].message)
            for call in reply.choices[0].message.tool_calls or ():
                ids.append(call.id)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return ids


async def responses(attempt: LiveAttempt, *, goes_on: bool = False, stream: bool = False) -> list[str]:
    tools: Any = [{"type": "function", "name": "weather", "parameters": CITY, "strict": False}]
    items: Any = [QUESTION]
    previous: Any = {}
    ids: list[str] = []
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        for content in ("sun", "it broke", None):
            headers = {"x-lightningrl-agent": "planner"}
            if stream:
                async with client.responses.stream(
                    model="m", input=items, tools=tools, extra_headers=headers, **previous
                ) as events:
                    reply: Any = await events.get_final_response()
            else:
                reply = await client.responses.create(
                    model="m", input=items, tools=tools, extra_headers=headers, **previous
                )
            calls = [item for item in reply.output if item.type == "function_call"]
            ids += [call.call_id for call in calls]
            outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": content} for call in calls]
            said = [
                {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
                for call in calls
            ]
            previous = {"previous_response_id": reply.id} if goes_on else {}
            items = outputs if goes_on else [*items, *said, *outputs]
    return ids


async def responses_that_go_on(attempt: LiveAttempt) -> list[str]:
    return await responses(attempt, goes_on=True)


async def streamed_responses(attempt: LiveAttempt) -> list[str]:
    return await responses(attempt, stream=True)


async def messages(attempt: LiveAttempt) -> list[str]:
    tools: Any = [{"name": "weather", "input_schema": CITY}]
    said: list[Any] = [QUESTION]
    ids: list[str] = []
    async with AsyncAnthropic(base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key) as client:
        for content in ("sun", "it broke", None):
            headers = {"x-lightningrl-agent": "planner"}
            reply = await client.messages.create(
                model="m", max_tokens=64, messages=said, tools=tools, extra_headers=headers
            )
            said.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            ids += [call.id for call in calls]
            blocks: list[Any] = [{"type": "tool_result", "tool_use_id": call.id, "content": content} for call in calls]
            for block in blocks:
                block["is_error"] = content == "it broke"
            said.append({"role": "user", "content": blocks or "go on"})
    return ids


@pytest.mark.parametrize("agent", [chat, responses, responses_that_go_on, streamed_responses, messages])
async def test_tools_of_an_agent_that_says_nothing_are_read_from_its_dialogue(gateway: LiveGateway, agent: Any) -> None:
    gateway.engine.enqueue(WEATHER, asks(("weather", {"city": "Oslo"})), "fine")
    attempt = await gateway.attempt()
    ids = await agent(attempt)
    trajectory = await finished(gateway, attempt)
    first, second, _ = trajectory.transitions
    failed = "error" if agent is messages else "unknown"
    assert [tool.id for tool in trajectory.tool_calls] == ids
    assert [facts(tool) for tool in trajectory.tool_calls] == [
        ("weather", {"city": "Rome"}, "sun", "unknown", first.id, "planner"),
        ("weather", {"city": "Oslo"}, "it broke", failed, second.id, "planner"),
    ]
    assert all(tool.duration_s == 0.0 and tool.error_type is None for tool in trajectory.tool_calls), (
        "nobody measured them"
    )
    assert ToolStatusReward(ok=0.1, error=-0.1)(trajectory) == [None, -0.1 if agent is messages else None, None]


# ---------------------------------------------------------------------- each result once


async def test_a_history_that_is_sent_again_and_again_tells_each_tool_once(gateway: LiveGateway) -> None:
    both = asks(("weather", {"city": "Rome"}), ("trains", {"city": "Rome"}))
    gateway.engine.enqueue(both, "hm", WEATHER, "fine")
    attempt = await gateway.attempt()
    said = await post(attempt, [QUESTION])
    weather, trains = said["tool_calls"]
    history: list[Any] = [QUESTION, said, result(weather, "sun")]
    history.append(await post(attempt, history))  # the other one is still under way
    history += [QUESTION, await post(attempt, [*history, QUESTION, result(trains, "late")])]
    (again,) = history[-1]["tool_calls"]
    history = [
        QUESTION,
        said,
        result(weather, "[old result cleared]"),
        result(trains, "late"),
        *history[3:],
        result(again, "rain"),
    ]
    body_twice = {"x-lightningrl-call-id": "last"}
    await post(attempt, history, headers=body_twice)
    await post(attempt, history, headers=body_twice)
    trajectory = await finished(gateway, attempt)
    first, _, third, _ = trajectory.transitions
    assert [(tool.name, tool.result, tool.transition_id) for tool in trajectory.tool_calls] == [
        ("weather", "sun", first.id),
        ("trains", "late", first.id),
        ("weather", "rain", third.id),
    ]


async def test_a_result_after_a_restart_of_the_server_finds_the_call_that_asked(gateway: LiveGateway) -> None:
    """As one that another server of the store gave the answer to."""

    def restarted() -> Starlette:
        renderers = {"policy": PolicyRenderer(gateway.engine.tokenizer)}
        return Starlette(routes=create_gateway(gateway.store, gateway.engines, renderers).routes)

    gateway.engine.enqueue(WEATHER, asks(("trains", {"city": "Oslo"})), "fine", "fine")
    attempt = await gateway.attempt()
    history: list[Any] = [QUESTION]
    for content in ("sun", "on time"):
        said = await post(attempt, history, restarted())
        history += [said, result(said["tool_calls"][0], content)]
    await post(attempt, history, restarted())
    await post(attempt, [*history, QUESTION], restarted())
    trajectory = await finished(gateway, attempt)
    first, second, *_ = trajectory.transitions
    assert [facts(tool) for tool in trajectory.tool_calls] == [
        ("weather", {"city": "Rome"}, "sun", "unknown", first.id, None),
        ("trains", {"city": "Oslo"}, "on time", "unknown", second.id, None),
    ]


async def test_of_several_choices_the_one_that_is_gone_on_from_has_its_tool(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(WEATHER, WEATHER, "fine")
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        reply = await client.chat.completions.create(model="m", messages=[QUESTION], tools=TOOLS, n=2)  # type: ignore[list-item]
        said: Any = reply.choices[1].message
        told = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sun"}
        await client.chat.completions.create(model="m", messages=[QUESTION, said, told], tools=TOOLS)  # type: ignore[list-item]
    trajectory = await finished(gateway, attempt)
    (tool,) = trajectory.tool_calls
    assert (tool.id, tool.transition_id) == (said.tool_calls[0].id, trajectory.transitions[1].id)


async def test_a_branch_has_the_tools_that_it_repeats(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(WEATHER, "fine", "better")
    recorded, history = await gateway.attempt(), list[Any]([QUESTION])
    said = await post(recorded, history)
    await post(recorded, [*history, said, result(said["tool_calls"][0], "sun")])
    await finished(gateway, recorded)
    branch = await gateway.attempt(branch=BranchPoint(rollout_id=recorded.rollout_id, attempt=1, calls=1))
    said = await post(branch, history)
    await post(branch, [*history, said, result(said["tool_calls"][0], "sun")])
    trajectory = await finished(gateway, branch)
    assert [facts(tool) for tool in trajectory.tool_calls] == [
        ("weather", {"city": "Rome"}, "sun", "unknown", trajectory.transitions[0].id, None)
    ]


async def test_a_result_that_is_too_long_to_go_on_from_is_kept(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer(), context_length=600)
    async with live_gateway(tmp_path, engine=engine) as gateway:
        engine.enqueue(WEATHER)
        attempt = await gateway.attempt()
        said = await post(attempt, [QUESTION])
        await post(attempt, [QUESTION, said, result(said["tool_calls"][0], "sun " * 600)], status=400)
        (tool,) = (await finished(gateway, attempt)).tool_calls
    assert (tool.name, tool.result) == ("weather", "sun " * 600)


# ---------------------------------------------------------------------- ids that a client drops or makes itself


@pytest.mark.parametrize("own_ids", [False, True])
async def test_results_without_our_ids_are_joined_by_name_and_arguments(gateway: LiveGateway, own_ids: bool) -> None:
    cities = ("Rome", "Oslo")
    gateway.engine.enqueue(asks(*(("weather", {"city": city}) for city in cities)), WEATHER, "fine")
    attempt = await gateway.attempt()
    history: list[Any] = [QUESTION]
    for place, contents in enumerate((("sun", "rain"), ("fog",), ())):
        said = await post(attempt, history)
        calls = [dict(call) for call in said.get("tool_calls", ())]
        for number, call in enumerate(calls):
            call.pop("id")
            call |= {"id": f"own-{place}-{number}"} if own_ids else {}
        history.append({**said, "tool_calls": calls} if calls else said)
        results = [{"role": "tool", "content": content} for content in contents]
        for number, one in enumerate(results):
            one |= {"tool_call_id": f"own-{place}-{number}"} if own_ids else {"name": "weather"}
        history += reversed(results) if own_ids else results
    trajectory = await finished(gateway, attempt)
    assert [(json.loads(tool.arguments)["city"], tool.result) for tool in trajectory.tool_calls] == [
        ("Rome", "sun"),
        ("Oslo", "rain"),
        ("Rome", "fog"),
    ]
    ids = [call_id for call in trajectory.transitions for call_id in call.tool_call_ids]
    assert [tool.id for tool in trajectory.tool_calls] == ids


async def test_results_that_no_answer_of_the_attempt_asked_for_are_no_tool_calls(gateway: LiveGateway) -> None:
    """Examples in the prompt, and histories of elsewhere."""
    call = {"id": "x1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    example = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "x1", "content": "sun"}]
    gateway.engine.enqueue("fine", WEATHER, "fine")
    attempt = await gateway.attempt()
    await post(attempt, [QUESTION, *example])
    await post(attempt, [QUESTION, *example, QUESTION])
    await post(attempt, [{"role": "user", "content": "Otherwise?"}])
    assert (await finished(gateway, attempt)).tool_calls == ()


def with_id(answer: dict[str, Any], call_id: str) -> dict[str, Any]:
    """The answer as a client with ids of its own sends it again."""
    return {**answer, "tool_calls": [{**answer["tool_calls"][0], "id": call_id}]}


async def test_an_example_of_the_call_that_the_policy_asked_for_is_not_its_result(gateway: LiveGateway) -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    example = [QUESTION, {"role": "assistant", "tool_calls": [call]}, result(call, "of the example")]
    gateway.engine.enqueue(WEATHER, "fine", "fine")
    attempt = await gateway.attempt()
    answer = await post(attempt, [*example, {"role": "user", "content": "And now?"}])
    await post(attempt, [*example, {"role": "user", "content": "Another task"}])
    await post(
        attempt, [*example, {"role": "user", "content": "And now?"}, with_id(answer, "call_0"), result(call, "rain")]
    )
    assert [tool.result for tool in (await finished(gateway, attempt)).tool_calls] == ["rain"]


async def test_two_agents_that_ask_for_the_same_by_the_same_id_have_each_its_result(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(WEATHER, WEATHER, "fine", "fine")
    attempt = await gateway.attempt()
    tasks: list[Any] = [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
    answers = [with_id(await post(attempt, [task]), "call_0") for task in tasks]
    for task, own, content in reversed(list(zip(tasks, answers, ("for A", "for B"), strict=True))):
        await post(attempt, [task, own, {"role": "tool", "tool_call_id": "call_0", "content": content}])
    trajectory = await finished(gateway, attempt)
    asked = [call.tool_call_ids[0] for call in trajectory.transitions if call.tool_call_ids]
    assert {tool.id: tool.result for tool in trajectory.tool_calls} == dict(zip(asked, ("for A", "for B"), strict=True))


# ---------------------------------------------------------------------- how it went


@pytest.mark.parametrize(
    ("asked", "said", "status"),
    [
        (("weather", {"city": "Rome"}), "Error: no such city", "unknown"),
        (("weather", {"town": "Rome"}), "1 validation error for weather: city: Field required", "invalid_arguments"),
        (("weather", {"city": ["Rome"]}), '{"error": "TypeError: unhashable type"}', "invalid_arguments"),
        (("weather", {"city": "Rome", "unit": "C"}), "21 degrees", "unknown"),
        (("wether", {"city": "Rome"}), "no tool of that name", "unknown_tool"),
    ],
)
async def test_a_failure_is_what_the_dialogue_states_and_no_guess(
    gateway: LiveGateway, asked: tuple[str, dict[str, Any]], said: str, status: str
) -> None:
    gateway.engine.enqueue(asks(asked), "fine")
    attempt = await gateway.attempt()
    answer = await post(attempt, [QUESTION])
    await post(attempt, [QUESTION, answer, result(answer["tool_calls"][0], said)])
    (tool,) = (await finished(gateway, attempt)).tool_calls
    assert (tool.status.value, tool.result) == (status, said)
    assert tool.error_type == (None if status == "unknown" else status)


class _Verdicts:
    @hookimpl
    def lightningrl_classify_tool_result(self, tool_call: ToolCall) -> ToolStatus | None:
        return ToolStatus.ERROR if tool_call.result.startswith("Error") else None


async def test_a_plugin_has_its_say_of_what_the_dialogue_shows(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(WEATHER, "fine")
    attempt = await gateway.attempt()
    said = await post(attempt, [QUESTION])
    await post(attempt, [QUESTION, said, result(said["tool_calls"][0], "Error: no such city")])
    plugins = PluginManager()
    plugins.register(_Verdicts())
    trajectory = classify_tools(await finished(gateway, attempt), plugins)
    assert ToolStatusReward(ok=0.1, error=-0.1)(trajectory) == [-0.1, None]


# ---------------------------------------------------------------------- who tells, wins


TELLS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "its id": lambda call_id, answer: {"tool_call_id": call_id},
    "its arguments": lambda call_id, answer: {"arguments": {"city": "Rome"}},
    "an id of its own": lambda call_id, answer: {"tool_call_id": "tool-7", "arguments": {"city": "Rome"}},
    "the answer": lambda call_id, answer: {"call": answer},
}


@pytest.mark.parametrize("comes", ["before", "after"])
@pytest.mark.parametrize("says", TELLS)
async def test_what_somebody_tells_of_a_tool_stands_whichever_comes_first(
    gateway: LiveGateway, comes: str, says: str
) -> None:
    gateway.engine.enqueue(WEATHER, asks(("weather", {"city": "Oslo"})), "fine")
    attempt = await gateway.attempt()
    said = await post(attempt, [QUESTION])
    (first,) = await attempt.transitions()
    (rome,) = said["tool_calls"]
    told = {
        "name": "weather",
        "status": "timeout",
        "duration_s": 1.5,
        **TELLS[says](rome["id"], f"chatcmpl-{first.id}"),
    }
    if comes == "before":
        await report(attempt, **told)
    history = [QUESTION, said, result(rome, "nothing")]
    said = await post(attempt, history)
    (oslo,) = said["tool_calls"]
    if comes == "after":
        await report(attempt, **told)
    await post(attempt, [*history, said, result(oslo, "rain")])
    trajectory = await finished(gateway, attempt)
    tools = {tool.id: tool for tool in trajectory.tool_calls}
    assert {call_id: (tool.status.value, tool.transition_id) for call_id, tool in tools.items()} == {
        rome["id"]: ("timeout", first.id),
        oslo["id"]: ("unknown", trajectory.transitions[1].id),
    }
    assert ToolStatusReward(ok=0.1, error=-0.1)(trajectory) == [-0.1, None, None]


@pytest.mark.parametrize("comes", ["before", "after"])
async def test_a_failure_that_the_dialogue_states_is_not_told_away(gateway: LiveGateway, comes: str) -> None:
    """Where a tool posts `ok` of a call that its framework calls an error, the error stands and the contradiction is
    counted."""
    gateway.engine.enqueue(WEATHER, "sorry")
    attempt = await gateway.attempt()
    headers = {"x-api-key": attempt.key}
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 64,
        "tools": tools,
        "messages": [{"role": "user", "content": "Rome?"}],
    }
    async with httpx.AsyncClient(headers=headers) as http:
        said = (await http.post(f"{attempt.base_url}/messages", json=body)).json()
        (asked,) = [block for block in said["content"] if block["type"] == "tool_use"]
        if comes == "before":
            await report(attempt, name="weather", status="ok", tool_call_id=asked["id"])
        failed = {"type": "tool_result", "tool_use_id": asked["id"], "content": "it broke", "is_error": True}
        more = [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": [failed]}]
        assert (
            await http.post(f"{attempt.base_url}/messages", json={**body, "messages": body["messages"] + more})
        ).status_code == 200
        if comes == "after":
            await report(attempt, name="weather", status="ok", tool_call_id=asked["id"])
    (tool,) = (await finished(gateway, attempt)).tool_calls
    assert (tool.status, tool.contradicted) == (ToolStatus.ERROR, 1)
