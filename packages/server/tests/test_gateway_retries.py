"""Retries of one logical call, and a server that is restarted in mid-attempt: recorded once, answered alike, history
found again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from sizes import PATIENCE_S
from starlette.applications import Starlette

from lightningrl_server.gateway.app import create_gateway
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway

USER = {"role": "user", "content": "hi"}
BODY = {"model": "m", "messages": [USER]}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as running:
        yield running


async def post(
    attempt: LiveAttempt, body: dict[str, Any], app: Starlette | None = None, **headers: str
) -> httpx.Response:
    transport = httpx.ASGITransport(app=app) if app is not None else None
    async with httpx.AsyncClient(transport=transport, timeout=PATIENCE_S) as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await client.post(
            f"{attempt.base_url}/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {attempt.key}", **named},
        )
        assert answer.status_code == 200, answer.text
        return answer


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def said(answer: httpx.Response, stream: bool) -> str:
    if not stream:
        return str(answer.json()["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def restarted(gateway: LiveGateway) -> Starlette:
    """A gateway that remembers nothing, on the same store."""
    renderers = {"policy": PolicyRenderer(gateway.engine.tokenizer)}
    return Starlette(routes=create_gateway(gateway.store, gateway.engines, renderers).routes)


@pytest.mark.parametrize("again", [False, True], ids=["same process", "after a restart"])
@pytest.mark.parametrize("headers", [{"x_lightningrl_call_id": "c1"}, {}], ids=["call id", "sdk retry"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_is_recorded_once_and_answered_alike(
    gateway: LiveGateway, again: bool, headers: dict[str, str], stream: bool
) -> None:
    gateway.engine.enqueue("first", "second")
    attempt = await gateway.attempt()
    first = await post(attempt, BODY | {"stream": stream}, None, **headers)
    app = restarted(gateway) if again else None
    second = await post(attempt, BODY | {"stream": stream}, app, x_stainless_retry_count="1", **headers)
    assert said(first, stream) == said(second, stream) == "first"
    assert first.text[:60] == second.text[:60], "the same completion id"
    assert len(await attempt.transitions()) == 1


async def test_equal_calls_that_are_no_retries_are_calls_of_their_own(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    await asyncio.gather(*(post(attempt, BODY) for _ in range(4)))
    await post(attempt, BODY, restarted(gateway))
    assert len(await attempt.transitions()) == 5


async def test_a_retry_of_a_call_that_failed_is_a_first_try(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    gateway.engine.enqueue("kept")
    await post(attempt, BODY)
    gateway.engine.pause()
    failing = asyncio.create_task(post(attempt, BODY))
    await until(lambda: len(gateway.engine.requests) == 2)
    failing.cancel()
    await until(lambda: gateway.engine.cancelled)
    gateway.engine.resume()
    gateway.engine.enqueue("fresh")
    answer = await post(attempt, BODY, x_stainless_retry_count="1")
    assert answer.json()["choices"][0]["message"]["content"] == "fresh"
    assert len(await attempt.transitions()) == 2


async def test_the_sdk_retries_by_itself_and_one_call_is_recorded(gateway: LiveGateway) -> None:
    gateway.engine.enqueue("slow", "fast")
    gateway.engine.pause()
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, timeout=1.0, max_retries=5) as client:
        task = asyncio.create_task(client.chat.completions.create(**BODY))  # type: ignore[call-overload]
        await until(lambda: gateway.engine.cancelled or task.done())
        gateway.engine.resume()
        await task
    assert len(await attempt.transitions()) == 1


async def test_a_history_is_found_again_after_a_restart(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    messages: list[dict[str, Any]] = [USER]
    for turn in range(4):
        gateway.engine.enqueue(f"answer {turn}")
        app = restarted(gateway) if turn == 2 else None
        message = (await post(attempt, {"model": "m", "messages": messages}, app)).json()["choices"][0]["message"]
        messages += [message, {"role": "user", "content": f"turn {turn}"}]
    transitions = await attempt.transitions()
    assert [transition.is_break for transition in transitions[:3]] == [False] * 3
    assert transitions[2].parent_id == transitions[1].id
    past = [*transitions[1].prompt_ids.tolist(), *transitions[1].completion_ids.tolist()]
    assert transitions[2].prompt_ids.tolist()[: len(past)] == past
