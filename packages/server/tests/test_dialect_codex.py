"""Requests of Codex CLI beside plain functions: namespaces, custom and hosted tools, items that set something, a
WebSocket."""

from __future__ import annotations

import asyncio
import http.client
import logging
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest
from openai import AsyncOpenAI

from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway

PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}
USER: Any = {"role": "user", "content": "hi"}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": f"says {name}", "parameters": PARAMETERS, "strict": False}


TEAM = {"type": "namespace", "name": "team", "description": "agents", "tools": [function("ask"), function("look")]}
EXEC = {
    "type": "custom",
    "name": "exec",
    "description": "Runs.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}
SEARCH = {"type": "web_search", "external_web_access": False}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as running:
        yield running


def client_of(attempt: LiveAttempt) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0)


async def ask(client: AsyncOpenAI, stream: bool, **request: Any) -> Any:
    if not stream:
        return await client.responses.create(model="m", **request)
    events = [event async for event in await client.responses.create(model="m", stream=True, **request)]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    return events[-1].response


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def prompts(gateway: LiveGateway, attempt: LiveAttempt) -> list[str]:
    transitions = await attempt.transitions()
    for parent, child in pairwise(transitions):
        assert child.parent_id == parent.id and not child.is_break
    return [gateway.engine.tokenizer.decode(transition.prompt_ids.tolist()) for transition in transitions]


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_a_namespace_are_offered_as_functions_and_called_in_it(
    gateway: LiveGateway, stream: bool
) -> None:
    gateway.engine.enqueue("\n".join(call(name, '{"q": "ü"}') for name in ("ask", "team.look", "look")), "done")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        asked: dict[str, Any] = {"tools": [function("look"), TEAM]}
        answer = await ask(client, stream, input=[USER], **asked)
        assert [(item.name, item.namespace) for item in answer.output] == [
            ("ask", "team"),
            ("look", "team"),
            ("look", None),
        ]
        results = [{"type": "function_call_output", "call_id": item.call_id, "output": "r"} for item in answer.output]
        sent = [item.model_dump(exclude_none=True, exclude={"id"}) for item in answer.output]
        await ask(client, stream, input=[USER, *sent, *results], **asked)
    first, _ = await prompts(gateway, attempt)
    assert [
        name in first for name in ('"name": "look"', '"name": "team.look"', '"name": "ask"', '"name": "team.ask"')
    ] == [
        True,
        True,
        True,
        False,
    ]


async def test_functions_of_namespaces_are_allowed_by_their_names_in_them(gateway: LiveGateway) -> None:
    def look(space: str) -> dict[str, Any]:
        return {"type": "namespace", "name": space, "tools": [{"type": "function", "name": "look", "parameters": None}]}

    named = [{"type": "function", "name": "look", "namespace": space} for space in ("a", "b")]
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        tools: Any = [look("a"), look("b"), {"type": "namespace", "name": "c", "tools": None}]
        for mode, allowed in (("auto", named), ("required", named[1:])):
            await ask(
                client,
                False,
                input="hi",
                tools=tools,
                tool_choice={"type": "allowed_tools", "mode": mode, "tools": allowed},
            )
    assert gateway.engine.tokenizer.decode(gateway.engine.requests[-1].prompt_ids).endswith(
        '{"name": "b.look", "arguments":'
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_is_called_with_text(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue(call("exec", '{"input": "say(\\"hi\\")\\n"}'), "done")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await ask(client, stream, input=[USER], tools=[EXEC])
        (item,) = answer.output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "exec", 'say("hi")\n')
        result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "hi"}
        await ask(client, stream, input=[USER, {"type": "item_reference", "id": item.id}, result], tools=[EXEC])
        await ask(
            client,
            stream,
            input=[USER, item.model_dump(exclude_none=True), result, {"role": "user", "content": "more"}],
            tools=[EXEC],
        )
    prompt = gateway.engine.tokenizer.decode((await attempt.transitions())[0].prompt_ids.tolist())
    assert "Runs." in prompt and "follows this lark grammar:\\nstart: /x+/" in prompt
    assert [(one.parent_id is None, one.is_break) for one in await attempt.transitions()] == [
        (True, False),
        (False, False),
        (False, False),
    ]


async def test_items_of_the_input_offer_tools_and_set_the_format(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(call("look", "{}"))
    attempt = await gateway.attempt()
    schema = {
        "type": "json_schema",
        "name": "s",
        "schema": {"type": "object", "properties": {"fits": {"type": "string"}}},
    }
    items: Any = [
        {"type": "additional_tools", "role": "developer", "tools": [{**TEAM, "tools": [function("old")]}]},
        USER,
        {"type": "additional_tools", "role": "developer", "tools": [TEAM]},
        {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": schema}},
    ]
    async with client_of(attempt) as client:
        (item,) = (await ask(client, False, input=items)).output
    assert (item.name, item.namespace) == ("look", "team")
    (prompt,) = await prompts(gateway, attempt)
    assert "says ask" in prompt and "says old" not in prompt and "fits" in prompt


async def test_tools_that_cannot_be_offered_are_named_by_their_place(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    refused: list[tuple[Any, str]] = [
        (
            [function("look"), SEARCH],
            r"tools\[1\] is of type 'web_search'; .* set policy.hosted_tools = .drop., where others are offered",
        ),
        ([{**TEAM, "tools": [TEAM]}], r"tools\[0\].tools\[0\] is no namespace with a name and a list of functions"),
        ([{**TEAM, "tools": 5}], r"tools\[0\] is no namespace"),
        ([TEAM, TEAM], r"tools\[1\].tools\[0\] has the name 'team.ask' of an earlier tool"),
        (
            [{"type": "local_shell"}],
            r"tools\[0\] is of type 'local_shell'; only functions are supported: give the agent a function tool for it$",
        ),
    ]
    async with client_of(attempt) as client:
        for tools, sentence in refused:
            with pytest.raises(openai.BadRequestError, match=sentence):
                await ask(client, False, input="hi", tools=tools)


async def test_the_providers_tools_are_left_out_beside_others_where_the_recipe_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    own: Any = {"name": "look", "input_schema": PARAMETERS}
    chat: Any = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
    async with live_gateway(tmp_path, settings=GatewaySettings(drops_hosted=True)) as gateway:
        attempt = await gateway.attempt()
        claude = anthropic.AsyncAnthropic(
            base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key, max_retries=0
        )
        async with client_of(attempt) as client, claude:
            with caplog.at_level(logging.WARNING):
                for _ in range(2):
                    await ask(client, False, input="hi", tools=[SEARCH, function("look")])
            assert caplog.text.count("offer the provider's tool 'web_search'") == 1
            assert gateway.engines.status()[0].ignored["tool web_search"] == 2
            await client.chat.completions.create(model="m", messages=[USER], tools=[chat, SEARCH])  # type: ignore[list-item]
            await claude.messages.create(model="m", max_tokens=9, messages=[USER], tools=[hosted, own])
            assert all(
                "look" in transition.offered and "web" not in transition.offered
                for transition in await attempt.transitions()
            )
            with pytest.raises(openai.BadRequestError, match="'web_search'"):
                await ask(client, False, input="hi", tools=[SEARCH])
            with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
                await claude.messages.create(model="m", max_tokens=9, messages=[USER], tools=[hosted])


async def test_a_websocket_is_answered_at_once_with_the_status_that_sends_codex_to_http(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    place = urlsplit(attempt.base_url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=10)
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "x3JJHMbDL1EzLkh9GBhXDw==",
    }

    def upgrade() -> tuple[int, str]:
        connection.request("GET", f"{place.path}/responses", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    status, text = await asyncio.to_thread(upgrade)
    connection.close()
    assert status == 426 and "send each as a POST" in text
