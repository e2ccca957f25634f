"""What the gateway refuses: each in OpenAI's error format, with a sentence, and nothing recorded."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from starlette.applications import Starlette

from lightningrl.types import Outcome
from lightningrl_server.gateway.app import create_gateway
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    engine = ScriptedEngine(tiny_tokenizer(), context_length=200)
    async with live_gateway(tmp_path, engine=engine, settings=GatewaySettings(max_body_bytes=10_000)) as running:
        yield running


async def post(
    attempt: LiveAttempt, body: Any, *, key: str | None = None, path: str = "", raw: bytes | None = None
) -> tuple[int, dict[str, Any]]:
    async with httpx.AsyncClient() as client:
        headers = {"authorization": f"Bearer {key or attempt.key}"}
        url = f"{attempt.base_url}/chat/completions{path}"
        answer = await client.post(url, headers=headers, **({"content": raw} if raw is not None else {"json": body}))
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return answer.status_code, error


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def asked(call_id: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


def told(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "x"}


TOOL = tool()


def image() -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": "hi"}, "Expected `array`, got `str`"),
        ({"messages": [image()]}, "part of type 'image_url'; the policy reads text only"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'; known are"),
        ({"n": 0}, "n is 0; it must be at least 1"),
        ({"n": 1000}, "n is 1000; it must be at least 1 and at most 64"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"tool_choice": "required"}, "tool_choice asks for a tool call, but no tools are offered"),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "f"}}},
            "is not supported; use 'auto', 'none', 'required' or a function",
        ),
        (
            {"response_format": {"type": "grammar"}},
            "the format 'grammar' is not supported; use 'text', 'json_object' or 'json_schema'",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format has no schema"),
        ({"logit_bias": {"5": 10}}, "logit_bias is not supported: the recorded logprobs"),
        ({"functions": [{"name": "f"}]}, "use tools"),
        ({"modalities": ["text", "audio"]}, "text only"),
        ({"tools": [{"type": "code_interpreter"}]}, r"tools[0] is no function"),
        ({"tools": [TOOL, TOOL]}, "tools[1] has the name 'f' of an earlier tool"),
        ({"tools": [tool(name="not a name!")]}, "tools[0] has the name 'not a name!'; use"),
        ({"tools": [tool(parameters=[])]}, "tools[0] ('f'): its parameters are no JSON schema but a list"),
        (
            {"tools": [tool(parameters={"type": "string"})]},
            "its parameters have the type 'string'; a tool takes an 'object'",
        ),
        (
            {"tools": [tool(parameters={"properties": {"q": {"type": "strnig"}}})]},
            "has the type 'strnig'; known are array",
        ),
        ({"tools": [tool(parameters={"properties": {"q": 5}})]}, "has 5 where a schema belongs"),
        ({"tools": [tool(parameters={"required": "q"})]}, "has 'required' that is no list of names"),
        (
            {"messages": [USER, asked("c"), asked("c"), told("c"), told("c")]},
            "the tool-call id 'c' is used by two calls",
        ),
        ({"messages": [USER, asked("c"), told("c"), told("c")]}, "the tool call 'c' has two results; send one"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_with_a_sentence(
    gateway: LiveGateway, change: dict[str, Any], message: str
) -> None:
    attempt = await gateway.attempt()
    status, error = await post(attempt, {"model": "m", "messages": [USER], **change})
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert await attempt.transitions() == ()


async def test_neutral_settings_are_no_reason_to_refuse(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        await client.chat.completions.create(
            model="m",
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "a"}]},
                {"role": "user", "content": "b", "name": "n"},
            ],
            frequency_penalty=0,
            presence_penalty=0.0,
            logit_bias={},
            response_format={"type": "text"},
            tool_choice="none",
            metadata={"a": "b"},
            reasoning_effort="low",
            extra_body={"repetition_penalty": 1.0, "chat_template_kwargs": {}},
        )
    assert len(await attempt.transitions()) == 1


async def test_keys_and_places(gateway: LiveGateway) -> None:
    attempt, other = await gateway.attempt(), await gateway.attempt()
    body = {"model": "m", "messages": [USER]}
    assert (await post(attempt, body, key=other.key))[0] == 401
    assert (await post(attempt, body, key="nonsense"))[1]["code"] == "invalid_api_key"
    async with httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {attempt.key}"}) as client:
        unknown = await client.post("/rollouts/nobody/attempts/1/v1/chat/completions", json=body)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (401, "invalid_api_key")
        no_attempt = await client.post(f"/rollouts/{attempt.rollout_id}/attempts/9/v1/chat/completions", json=body)
        assert no_attempt.status_code == 401
        for path in ("/v1/chat/completions", "/v1/models", "/v1/embeddings"):
            closed = await client.post(path, json=body)
            assert closed.status_code == 403
            assert "belongs to no rollout" in closed.json()["error"]["message"]
        odd = await client.post(f"/rollouts/{attempt.rollout_id}/attempts/1/v1/embeddings", json={})
        assert odd.status_code == 404
        assert "no policy answers /embeddings, and no upstream is configured" in odd.json()["error"]["message"]
        odd = await client.post(f"/rollouts/{attempt.rollout_id}/attempts/1/v1/images/generations", json={})
        assert (odd.status_code, odd.json()["error"]["code"]) == (404, "unknown_path")
    async with httpx.AsyncClient() as client:
        assert (await client.post(f"{attempt.base_url}/chat/completions", json=body)).status_code == 401


async def test_an_attempt_that_is_over_takes_no_more_calls(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
    gateway.gateway.forget(attempt.rollout_id, attempt.attempt)
    status, error = await post(attempt, {"model": "m", "messages": [USER]})
    assert (status, error["code"]) == (410, "attempt_over")


async def test_an_attempt_that_ends_in_mid_call_records_nothing_more(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    gateway.engine.pause()
    call = asyncio.create_task(post(attempt, {"model": "m", "messages": [USER]}))
    while not gateway.engine.requests:
        await asyncio.sleep(0.01)
    await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.TIMEOUT)
    gateway.engine.resume()
    assert (await call)[0] == 410
    assert await attempt.transitions() == ()


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"\xff\xfe",
        b"",
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_to\x90ens": 2}',
    ],
)
async def test_a_body_that_is_no_json_is_told(gateway: LiveGateway, raw: bytes) -> None:
    status, error = await post(await gateway.attempt(), None, raw=raw)
    assert status == 400
    assert error["code"] in ("invalid_json", "invalid_request")


async def test_a_body_beyond_the_bound_is_told(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    status, error = await post(attempt, {"model": "m", "messages": [{"role": "user", "content": "x" * 20_000}]})
    assert status == 413
    assert "larger than 10000 bytes" in error["message"]

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 1000

    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{attempt.base_url}/chat/completions", headers={"authorization": f"Bearer {attempt.key}"}, content=chunks()
        )
        assert answer.status_code == 413


BODY = json.dumps({"model": "m", "messages": [USER]}).encode()
PACKED: list[tuple[bytes, str | None]] = [
    (b"\xef\xbb\xbf" + BODY, None),
    (gzip.compress(BODY), "gzip"),
    (gzip.compress(BODY), "x-gzip"),
    (gzip.compress(BODY), None),
    (gzip.compress(BODY[:20]) + gzip.compress(BODY[20:]), "gzip"),
    (gzip.compress(b"\xef\xbb\xbf" + BODY), "GZIP"),
    (zlib.compress(BODY), "deflate"),
    (BODY, "identity"),
]


async def send(attempt: LiveAttempt, raw: bytes, coding: str | None) -> httpx.Response:
    headers = {"authorization": f"Bearer {attempt.key}", **({} if coding is None else {"content-encoding": coding})}
    async with httpx.AsyncClient() as client:
        return await client.post(f"{attempt.base_url}/chat/completions", headers=headers, content=raw)


@pytest.mark.parametrize(("raw", "coding"), PACKED, ids=range(len(PACKED)))
async def test_a_compressed_body_and_one_with_a_byte_order_mark_are_read(
    gateway: LiveGateway, raw: bytes, coding: str | None
) -> None:
    attempt = await gateway.attempt()
    answer = await send(attempt, raw, coding)
    assert answer.status_code == 200, answer.text
    assert len(await attempt.transitions()) == 1


@pytest.mark.parametrize(
    ("raw", "coding", "status", "says"),
    [
        (gzip.compress(b" " * 2**22), "gzip", 413, "larger than 10000 bytes when unpacked"),
        (b"".join(gzip.compress(b" " * 9000) for _ in range(40)), "gzip", 413, "larger than 10000 bytes when unpacked"),
        (BODY, "gzip", 400, "not compressed as it says"),
        (gzip.compress(BODY)[:-10], "gzip", 400, "ends too early"),
        (BODY, "br", 415, "compressed as 'br'; send it plain, or as gzip"),
    ],
    ids=["bomb", "many", "plain", "cut", "brotli"],
)
async def test_a_body_that_cannot_be_unpacked_is_refused_by_name(
    gateway: LiveGateway, raw: bytes, coding: str, status: int, says: str
) -> None:
    answer = await send(await gateway.attempt(), raw, coding)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_is_told_and_remembered(gateway: LiveGateway, stream: bool) -> None:
    attempt = await gateway.attempt()
    assert not await gateway.gateway.is_overflowed(attempt.rollout_id, attempt.attempt)
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        with pytest.raises(BadRequestError, match="maximum context length is 200 tokens") as caught:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * 300}], stream=stream
            )
    assert caught.value.code == "context_length_exceeded"
    assert await gateway.gateway.is_overflowed(attempt.rollout_id, attempt.attempt)


async def test_completions_are_bounded_by_the_room_that_is_left(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    gateway.engine.enqueue("y" * 500)
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 100}])
    (transition,) = await attempt.transitions()
    assert answer.choices[0].finish_reason == "length"
    assert len(transition.prompt_ids) + len(transition.completion_ids) == 200


async def test_an_unknown_model_without_a_default_policy_is_told(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())

    async with live_gateway(tmp_path, engine=engine) as gateway:
        two = {name: PolicyRenderer(engine.tokenizer) for name in ("writer", "checker")}
        strict = create_gateway(gateway.store, gateway.engines, two)
        attempt = await gateway.attempt()
        transport = httpx.ASGITransport(app=Starlette(routes=strict.routes))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            path = attempt.base_url.removeprefix(gateway.url)
            answer = await client.post(
                f"{path}/chat/completions",
                json={"model": "gpt", "messages": [USER]},
                headers={"authorization": f"Bearer {attempt.key}"},
            )
        assert answer.status_code == 404
        assert (
            "no policy 'gpt' in this run, and no default policy; it serves checker, writer"
            in answer.json()["error"]["message"]
        )
