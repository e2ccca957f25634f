"""Calls that no policy answers: passed to the user's own provider with the user's key, recorded, never trained."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai import AsyncOpenAI
from sizes import PATIENCE_S
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightningrl.errors import ConfigError
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import UpstreamConfig
from lightningrl.types import OtherCall, OtherCallKind, Outcome
from lightningrl_client.recipe_file import load_recipe
from lightningrl_server.gateway.settings import GatewaySettings, Upstream
from lightningrl_server.settings import read_upstream
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.loopback import serving

USER: Any = {"role": "user", "content": "hi"}


class Provider:
    """A provider that remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.queries: list[str] = []

    async def answer(self, request: Request) -> Response:
        self.queries.append(request.url.query)
        body = json.loads(await request.body())
        self.requests.append((request.url.path, dict(request.headers), body))
        if body.get("model") == "busy":
            return JSONResponse(
                {"error": {"message": "slow down", "type": "rate_limit_error"}},
                429,
                {"retry-after": "7", "x-secret": "s"},
            )
        if request.url.path.endswith("/embeddings"):
            vectors = [
                {"object": "embedding", "index": i, "embedding": [0.1, 0.2]} for i, _ in enumerate(body["input"])
            ]
            return JSONResponse(
                {
                    "object": "list",
                    "model": body["model"],
                    "data": vectors,
                    "usage": {"prompt_tokens": 3, "total_tokens": 3},
                }
            )
        if request.url.path.endswith("/messages"):
            content = [{"type": "text", "text": "from the provider"}]
            usage = {"input_tokens": 1, "output_tokens": 1}
            return JSONResponse(
                {
                    "id": "msg_1",
                    "type": "message",
                    "role": "assistant",
                    "model": body["model"],
                    "content": content,
                    "usage": usage,
                }
            )
        if body.get("stream"):
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        message = {"role": "assistant", "content": "from the provider"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return JSONResponse(
            {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": choices}
        )

    async def _stream(self) -> AsyncIterator[bytes]:
        for word in ("from ", "the ", "provider"):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "judge", "choices": [choice]}
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            await asyncio.sleep(0.05)
        yield b"data: [DONE]\n\n"


@asynccontextmanager
async def serving_provider(provider: Provider) -> AsyncIterator[str]:
    async with serving(Starlette(routes=[Route("/{rest:path}", provider.answer, methods=["POST"])])) as url:
        yield f"{url}/v9"


@pytest.fixture
async def provider() -> Provider:
    return Provider()


@pytest.fixture
async def gateway(tmp_path: Path, provider: Provider) -> AsyncIterator[LiveGateway]:
    async with serving_provider(provider) as url:
        upstream = Upstream(base_url=url, api_key="users-key")
        settings = GatewaySettings(
            upstream=upstream, upstream_models={"judge*": upstream, "busy": upstream, "claude-*": upstream}
        )
        async with live_gateway(tmp_path, settings=settings) as running:
            yield running
            await running.gateway.close()


async def recorded(attempt: LiveAttempt) -> tuple[OtherCall, ...]:
    await attempt.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
    (trajectory,) = await attempt.store.trajectories([attempt.rollout_id])
    assert trajectory.tool_calls == (), "no reward of tools sees them"
    return trajectory.other_calls


async def test_embeddings_are_answered_by_the_upstream_and_recorded(gateway: LiveGateway, provider: Provider) -> None:
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        answer = await client.embeddings.create(
            model="text-embedding-3-small", input=["a", "b"], extra_headers={"x-lightningrl-agent": "retriever"}
        )
    assert [one.embedding for one in answer.data] == [[0.1, 0.2], [0.1, 0.2]]
    ((path, headers, body),) = provider.requests
    assert (path, body["input"]) == ("/v9/embeddings", ["a", "b"])
    assert headers["authorization"] == "Bearer users-key"
    assert attempt.key not in json.dumps(headers) and not any(name.startswith("x-lightningrl") for name in headers)
    assert await attempt.transitions() == ()
    (call,) = await recorded(attempt)
    assert (call.kind, call.model, call.path) == (OtherCallKind.FORWARDED, "text-embedding-3-small", "embeddings")
    assert (call.status, call.code, call.agent) == (200, None, "retriever")
    assert call.request["input"] == ["a", "b"]
    assert call.answer["data"] == {"vectors": 2} and call.answer["usage"]["total_tokens"] == 3


async def test_a_listed_model_goes_to_the_upstream_and_every_other_name_to_the_policy(
    gateway: LiveGateway, provider: Provider
) -> None:
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        judged = await client.chat.completions.create(model="judge-large", messages=[USER])
        trained = await client.chat.completions.create(model="gpt-4o", messages=[USER])
    assert judged.choices[0].message.content == "from the provider"
    assert trained.choices[0].message.content == "ok"
    assert len(await attempt.transitions()) == 1
    assert [body["model"] for _, _, body in provider.requests] == ["judge-large"]
    assert [call.model for call in await recorded(attempt)] == ["judge-large"]


@pytest.mark.parametrize(("letters", "is_kept"), [(300_000, True), (1_100_000, False)])
async def test_a_long_history_is_recorded_whole_as_a_teachers_rows_are_made_of_it(
    gateway: LiveGateway, letters: int, is_kept: bool
) -> None:
    attempt = await gateway.attempt()
    asked: Any = {"role": "user", "content": "x" * letters}
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        await client.chat.completions.create(model="judge-large", messages=[asked])
    (call,) = await recorded(attempt)
    if is_kept:
        assert call.request["messages"] == [asked]
    else:
        assert call.request["model"] == "judge-large" and call.request["bytes"] > letters


async def test_streams_pass_through_as_they_come(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    loop = asyncio.get_running_loop()
    times: list[float] = []
    text = ""
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        async for chunk in await client.chat.completions.create(model="judge", messages=[USER], stream=True):
            text += chunk.choices[0].delta.content or ""
            times.append(loop.time())
    assert text == "from the provider"
    assert times[-1] - times[0] > 0.05
    (call,) = await recorded(attempt)
    assert "[DONE]" in call.answer


async def test_anthropics_calls_carry_the_users_key_its_way(gateway: LiveGateway, provider: Provider) -> None:
    attempt = await gateway.attempt()
    async with anthropic.AsyncAnthropic(base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key) as client:
        answer: Any = await client.messages.create(model="claude-x", max_tokens=5, messages=[USER])
    assert answer.content[0].text == "from the provider"
    ((path, headers, _),) = provider.requests
    assert path == "/v9/messages"
    assert headers["x-api-key"] == "users-key" and "authorization" not in headers
    assert headers["anthropic-version"]


async def test_what_stands_behind_a_question_mark_goes_to_the_upstream_with_the_addresss_own(
    tmp_path: Path, provider: Provider
) -> None:
    async with serving_provider(provider) as url:
        versioned = Upstream(base_url=f"{url}/?api-version=2026-01-01", api_key="users-key")
        settings = GatewaySettings(upstream_models={"judge": versioned, "claude-*": Upstream(base_url=url)})
        async with live_gateway(tmp_path, settings=settings) as gateway:
            attempt = await gateway.attempt()
            async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
                await client.chat.completions.create(model="judge", messages=[USER])
                await client.chat.completions.create(model="judge", messages=[USER], extra_query={"seen": "a b&c"})
            async with anthropic.AsyncAnthropic(
                base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key
            ) as client:
                await client.messages.create(
                    model="claude-x", max_tokens=9, messages=[USER], extra_query={"beta": "true"}
                )
            await gateway.gateway.close()
    assert [path for path, _, _ in provider.requests] == ["/v9/chat/completions"] * 2 + ["/v9/messages"]
    assert provider.queries == ["api-version=2026-01-01", "api-version=2026-01-01&seen=a+b%26c", "beta=true"]


async def test_a_policys_reasoning_is_left_out_of_what_a_provider_reads(
    gateway: LiveGateway, provider: Provider
) -> None:
    """OpenAI refuses items of ids that it never gave, Anthropic thoughts without its signature."""
    attempt = await gateway.attempt()
    gateway.engine.enqueue(*["<think>\nhm\n</think>\n\nyes"] * 2)
    async with openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        first = await client.responses.create(model="m", input="hi")
        items: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
        assert [item["type"] for item in items] == ["reasoning", "message"]
        foreign: Any = {"type": "reasoning", "id": "rs_68af", "summary": []}
        await client.responses.create(model="judge", input=[USER, *items, foreign, USER])
    url = attempt.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=attempt.key) as claude:
        asked: Any = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        async with claude.messages.stream(model="m", messages=[USER], **asked) as events:
            said = await events.get_final_message()
        blocks = [block.model_dump(exclude_none=True) for block in said.content]
        assert [block["type"] for block in blocks] == ["thinking", "text"]
        theirs = {"type": "thinking", "thinking": "ours", "signature": "Eo8B"}
        turns = [USER, {"role": "assistant", "content": [*blocks, theirs]}, USER]
        await claude.messages.create(model="claude-judge", messages=turns, **asked)
    (_, _, to_openai), (_, _, to_anthropic) = provider.requests
    assert to_openai["input"] == [USER, items[1], foreign, USER]
    assert to_anthropic["messages"] == [USER, {"role": "assistant", "content": [blocks[1], theirs]}, USER]


async def test_the_upstreams_errors_are_the_agents_and_recorded(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="slow down") as caught:
            await client.responses.create(model="busy", input="hi")
    assert caught.value.response.headers["retry-after"] == "7"
    assert "x-secret" not in caught.value.response.headers
    (call,) = await recorded(attempt)
    assert (call.status, call.code) == (429, "http_429")


async def test_an_upstream_that_is_not_there_is_told_in_the_dialects_format(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    async with live_gateway(
        tmp_path, settings=GatewaySettings(upstream_models={"judge": Upstream(base_url=url)})
    ) as gateway:
        attempt = await gateway.attempt()
        async with anthropic.AsyncAnthropic(
            base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key, max_retries=0
        ) as client:
            refused = rf"{url}.* does not answer \(ConnectionRefusedError: .*\); check its address"
            with pytest.raises(anthropic.InternalServerError, match=refused) as caught:
                await client.messages.create(model="judge", max_tokens=5, messages=[USER])
        assert caught.value.status_code == 502
        (call,) = await recorded(attempt)
        assert (call.status, call.code) == (None, "ConnectError")
        await gateway.gateway.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_breaks_off_is_no_whole_one(tmp_path: Path, stream: bool) -> None:
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "judge"}
    chunk["choices"] = [{"index": 0, "delta": {"content": "half"}, "finish_reason": None}]

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    async with server:
        upstream = Upstream(base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        async with live_gateway(tmp_path, settings=GatewaySettings(upstream_models={"judge": upstream})) as gateway:
            attempt = await gateway.attempt()
            async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0) as client:
                with pytest.raises(openai.APIConnectionError):  # as from the provider itself
                    if not stream:
                        await client.chat.completions.create(model="judge", messages=[USER])
                    async for _ in await client.chat.completions.create(model="judge", messages=[USER], stream=True):
                        pass
            (call,) = await recorded(attempt)
            assert (call.status, call.code) == (200, "RemoteProtocolError")
            await gateway.gateway.close()


async def test_as_many_calls_are_forwarded_at_once_as_agents_make(tmp_path: Path) -> None:
    count, arrived, everybody = 120, 0, asyncio.Event()

    async def answer(request: Request) -> Response:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            everybody.set()
        await everybody.wait()
        return JSONResponse({})

    async with (
        serving(Starlette(routes=[Route("/{rest:path}", answer, methods=["POST"])])) as url,
        live_gateway(tmp_path, settings=GatewaySettings(upstream=Upstream(base_url=url))) as gateway,
        httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as client,
    ):
        attempt = await gateway.attempt()
        headers = {"authorization": f"Bearer {attempt.key}"}
        async with asyncio.timeout(PATIENCE_S):
            calls = (
                client.post(f"{attempt.base_url}/embeddings", json={"model": "e", "input": "a"}, headers=headers)
                for _ in range(count)
            )
            answers = await asyncio.gather(*calls)
        assert {one.status_code for one in answers} == {200}
        await gateway.gateway.close()


async def test_a_client_that_goes_away_is_recorded(gateway: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, kept, keep = await gateway.attempt(), asyncio.Event(), gateway.store.append_other_calls

    async def keep_and_tell(*arguments: Any) -> None:
        await keep(*arguments)
        kept.set()

    monkeypatch.setattr(gateway.store, "append_other_calls", keep_and_tell)
    async with httpx.AsyncClient() as client:
        headers = {"authorization": f"Bearer {attempt.key}"}
        body = {"model": "judge", "messages": [USER], "stream": True}
        async with client.stream("POST", f"{attempt.base_url}/chat/completions", json=body, headers=headers) as answer:
            async for _ in answer.aiter_raw():
                break
    await kept.wait()
    (call,) = await recorded(attempt)
    assert call.model == "judge"
    assert call.code in ("client_gone", None)


async def test_without_an_upstream_the_sentence_says_what_to_configure(tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt()
        async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
            with pytest.raises(
                openai.NotFoundError, match=r"set base_url and api_key_env under \[upstream\] in the recipe"
            ):
                await client.embeddings.create(model="e", input="a")


RECIPE = """
agent = "agent.py:run"
[tasks]
train = "tasks.py:train"
[policy]
model = "m"
[rewards.right]
use = "tasks.py:right"
[upstream]
base_url = "https://api.example.com/v1"
api_key_env = "EXAMPLE_KEY"
[upstream.models]
"judge-*" = {}
"claude-*" = { base_url = "https://claude.example.com/v1", api_key_env = "CLAUDE_KEY" }
"local" = { base_url = "http://127.0.0.1:9/v1" }
"""


def recipe(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


def test_a_recipe_names_the_upstream_and_no_key_stands_in_it(tmp_path: Path) -> None:
    config = recipe(tmp_path, RECIPE).upstream
    default, models = read_upstream(config, {"EXAMPLE_KEY": "their-key", "CLAUDE_KEY": "two"})
    assert default == Upstream(base_url="https://api.example.com/v1", api_key="their-key")
    assert "their-key" not in repr(default)
    assert models["judge-*"] == default
    assert models["claude-*"] == Upstream(base_url="https://claude.example.com/v1", api_key="two")
    assert models["local"].api_key is None, "a key is sent to the address it was named for"


def test_what_is_missing_of_an_upstream_is_told(tmp_path: Path) -> None:
    config = recipe(tmp_path, RECIPE).upstream
    with pytest.raises(
        ConfigError, match="the environment variable 'EXAMPLE_KEY' is not set; set it to the provider's key"
    ):
        read_upstream(config, {})
    with pytest.raises(ConfigError, match=r"upstream.models.'a' has no base_url"):
        read_upstream(UpstreamConfig.model_validate({"models": {"a": {}}}), {})
    with pytest.raises(ConfigError, match=r"\[upstream\] has no base_url"):
        read_upstream(UpstreamConfig(), {})
    with pytest.raises(ConfigError, match=r"upstream.base_url"):
        recipe(tmp_path, RECIPE.replace("https://api.example.com/v1", "api.example.com"))
