"""What a call was offered is kept with it, once, and its tools' arguments are held against that: in every dialect, with
official SDKs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from lightningrl.errors import ConfigError
from lightningrl.types import Outcome, ToolCall, ToolStatus, Trajectory
from lightningrl.wire import decode_trajectories, encode_trajectories
from lightningrl_client.control.client import ServerClient
from lightningrl_credit.rewards import ValidArguments
from lightningrl_server.gateway.history import offered_tools
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NUMBER = {"type": "object", "properties": {"city": {"type": "integer"}}, "required": ["city"]}
ASKS = '<tool_call>\n{"name": "search", "arguments": {"city": "Rome"}}\n</tool_call>'
QUESTION: Any = [{"role": "user", "content": "where?"}]
Ask = Callable[[LiveAttempt, Mapping[str, Any]], Awaitable[str]]


async def ask_chat(attempt: LiveAttempt, schema: Mapping[str, Any]) -> str:
    """The id of the tool call that was asked for."""
    tools: Any = [{"type": "function", "function": {"name": "search", "description": "Finds.", "parameters": schema}}]
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        reply = await client.chat.completions.create(model="m", messages=QUESTION, tools=tools)
    (call,) = reply.choices[0].message.tool_calls or []
    return call.id


async def ask_responses(attempt: LiveAttempt, schema: Mapping[str, Any]) -> str:
    tools: Any = [
        {"type": "function", "name": "search", "description": "Finds.", "parameters": schema, "strict": False}
    ]
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        reply = await client.responses.create(model="m", input="where?", tools=tools)
    (call,) = [item for item in reply.output if item.type == "function_call"]
    return call.call_id


async def ask_messages(attempt: LiveAttempt, schema: Mapping[str, Any]) -> str:
    tools: Any = [{"name": "search", "description": "Finds.", "input_schema": schema}]
    async with AsyncAnthropic(base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key) as client:
        reply = await client.messages.create(model="m", max_tokens=64, messages=QUESTION, tools=tools)
    (call,) = [block for block in reply.content if block.type == "tool_use"]
    return call.id


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as gateway:
        yield gateway


async def finished(gateway: LiveGateway, attempt: LiveAttempt, call_ids: list[str]) -> Trajectory:
    """The trainer's view, over HTTP, once the agent has told that its tools worked."""
    told = [
        {"name": "search", "status": "ok", "arguments": {"city": "Rome"}, "tool_call_id": call_id}
        for call_id in call_ids
    ]
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"authorization": f"Bearer {attempt.key}"}
        assert (
            await http.post(f"{attempt.base_url}/tool_calls", json={"tool_calls": told}, headers=headers)
        ).status_code == 204
    async with ServerClient(gateway.url, gateway.run_key) as client:
        await client.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
        (trajectory,) = await client.trajectories([attempt.rollout_id])
    return trajectory


@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
async def test_arguments_are_held_against_the_schema_of_the_calls_own_request(
    gateway: LiveGateway, tmp_path: Path, ask: Ask
) -> None:
    gateway.engine.enqueue(ASKS, ASKS, ASKS)
    attempt = await gateway.attempt()
    trajectory = await finished(gateway, attempt, [await ask(attempt, schema) for schema in (CITY, NUMBER, CITY)])
    assert [json.loads(call.offered) for call in trajectory.transitions] == [
        {"search": CITY},
        {"search": NUMBER},
        {"search": CITY},
    ]
    assert [tool.transition_id for tool in trajectory.tool_calls] == [call.id for call in trajectory.transitions]
    assert ValidArguments(ok=0.2, error=-0.3)(trajectory) == [0.2, -0.3, 0.2]
    assert ValidArguments(ok=0.2, error=-0.3, offered=False)(trajectory) == [0.2] * 3
    assert ValidArguments(ok=0.2, error=-0.3, schemas={"search": NUMBER})(trajectory) == [-0.3] * 3, (
        "the recipe's stands before it"
    )
    with closing(sqlite3.connect(tmp_path / "store.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM toolsets").fetchone() == (2,)


async def test_of_a_call_that_was_offered_no_tools_nothing_is_kept(gateway: LiveGateway) -> None:
    gateway.engine.enqueue("hi")
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        await client.chat.completions.create(model="m", messages=QUESTION)
    assert [call.offered for call in await attempt.transitions()] == [""]


def test_the_same_tools_are_the_same_text_and_too_many_are_not_kept() -> None:
    one, other = ({"function": {"name": name, "parameters": CITY}} for name in ("one", "other"))
    turned = {"function": {"parameters": dict(reversed(CITY.items())), "name": "one", "description": "words"}}
    assert offered_tools([one, other]) == offered_tools([other, turned])
    assert json.loads(offered_tools([one, {"function": {"name": "now"}}])) == {"one": CITY, "now": None}
    assert json.loads(offered_tools([{"function": {"name": "big", "parameters": {"maximum": 2**70}}}])) == {
        "big": {"maximum": 2**70}
    }
    assert (
        offered_tools([{"function": {"name": "long", "description": "x" * 200_000}}])
        == offered_tools([])
        == offered_tools(None)
        == ""
    )


def called(offered: Any, arguments: str = '{"city": "Rome"}', status: ToolStatus = ToolStatus.OK) -> list[float | None]:
    """What a call is paid that was offered this, and whose tool was called so."""
    tool = ToolCall(id="t", name="search", arguments=arguments, status=status, transition_id="r/0")
    call = replace(make_transition("r/0"), offered=offered if isinstance(offered, str) else json.dumps(offered))
    return ValidArguments(ok=1.0, error=-1.0)(make_trajectory("r", [call], tool_calls=[tool], reward=1.0))


def test_what_the_framework_refused_is_not_valid_whatever_was_offered() -> None:
    assert called({"search": CITY}) == [1.0]
    assert called({"search": CITY}, "{}") == called({"search": CITY}, "[7]") == called("", "[7]") == [-1.0]
    assert called({"search": CITY}, status=ToolStatus.INVALID_ARGUMENTS) == [-1.0]


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {"type": "text"},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"properties": {"city": {"pattern": r"^\p{L}+$"}}},
    ],
)
def test_a_schema_that_cannot_be_used_takes_any_object(schema: Any) -> None:
    assert called({"search": schema}) == [1.0]
    assert called({"other": NUMBER}) == [1.0], "a tool that goes by another name than the one offered"


def test_a_schema_that_cannot_be_used_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        called({"search": {"$ref": "#/$defs/named-once"}})
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "valid_arguments: the schema offered for tool 'search' cannot be used"
    ]


def test_without_jsonschema_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r"jsonschema is not installed; pip install 'lightningrl\[server\]'"):
        ValidArguments()
    assert not ValidArguments(offered=False).offered


def test_tools_that_are_offered_again_travel_once() -> None:
    offered = ["", "a", "a", "b", "b", "", "", "b"]
    calls = [replace(make_transition(f"r/{index}", index=index), offered=one) for index, one in enumerate(offered)]
    sent = encode_trajectories([make_trajectory("r", calls)])
    assert [call["offered"] for call in json.loads(sent)[0]["transitions"]] == ["", "a", "=", "b", "=", "", "", "b"]
    (read,) = decode_trajectories(sent)
    assert [call.offered for call in read.transitions] == offered
    assert [call.offered for call in calls] == offered, "what is sent is left as it is"
