"""The engine link over a real WebSocket: exact tokens, holds, reconnects, an engine that dies in mid-call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI
from sizes import PATIENCE_S

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.errors import ServerError
from lightningrl_server.engines.link import EngineLink
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

USER: Any = {"role": "user", "content": "hi"}


@asynccontextmanager
async def linked(
    tmp_path: Path, engine: ScriptedEngine, *, wait_s: float = 10.0
) -> AsyncIterator[tuple[LiveGateway, EngineLink]]:
    async with (
        live_gateway(tmp_path, engine=engine, attach=False, wait_s=wait_s) as gateway,
        EngineLink(engine, gateway.url, gateway.run_key, backoff_s=(0.02, 0.1)) as link,
    ):
        yield gateway, link


async def ask(attempt: LiveAttempt, *, stream: bool = False) -> str:
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0) as client:
        if not stream:
            return (await client.chat.completions.create(model="m", messages=[USER])).choices[0].message.content or ""
        text = ""
        async for chunk in await client.chat.completions.create(model="m", messages=[USER], stream=True):
            text += chunk.choices[0].delta.content or ""
        return text


async def until(condition: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_sampled_arrives_bit_for_bit(tmp_path: Path, stream: bool) -> None:
    engine = ScriptedEngine(tiny_tokenizer(), version=7)
    async with linked(tmp_path, engine) as (gateway, _):
        engine.enqueue("Grüße 🙂")
        attempt = await gateway.attempt()
        assert await ask(attempt, stream=stream) == "Grüße 🙂"
        (transition,) = await attempt.transitions()
    emission = engine.emissions[transition.id]
    assert tuple(transition.prompt_ids.tolist()) == emission.request.prompt_ids
    assert tuple(transition.completion_ids.tolist()) == emission.token_ids
    assert tuple(transition.logprobs.tolist()) == emission.logprobs
    assert transition.policy_version == 7
    assert transition.sampling == emission.request.sampling


async def test_hold_waits_for_what_is_sampled_and_keeps_the_rest_until_the_new_version(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    async with linked(tmp_path, engine) as (gateway, link):
        attempt = await gateway.attempt()
        engine.pause()
        first = asyncio.create_task(ask(attempt))
        await until(lambda: engine.requests)
        holding = asyncio.create_task(link.hold())
        await asyncio.sleep(0.05)
        assert not holding.done(), "a call is still being sampled"
        second = asyncio.create_task(ask(attempt))
        engine.resume()
        await holding
        assert await first == "ok"
        await asyncio.sleep(0.05)
        assert not second.done() and len(engine.requests) == 1
        assert gateway.engines.status()[0].held
        engine.version = 1
        await link.release()
        assert await second == "ok"
        assert [transition.policy_version for transition in await attempt.transitions()] == [0, 1]
        assert gateway.engines.status()[0].version == 1


async def test_an_engine_that_dies_in_mid_call_is_replaced_by_the_next(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    dying, heir = ScriptedEngine(tokenizer), ScriptedEngine(tokenizer, version=1, reply=lambda _: "from the heir")
    dying.pause()
    async with live_gateway(tmp_path, engine=dying, attach=False, wait_s=PATIENCE_S) as gateway:
        link = EngineLink(dying, gateway.url, gateway.run_key)
        await link.start()
        attempt = await gateway.attempt()
        calls = [asyncio.create_task(ask(attempt)) for _ in range(5)]
        await until(lambda: len(dying.requests) == 5)
        await link.close()
        async with EngineLink(heir, gateway.url, gateway.run_key):
            assert await asyncio.gather(*calls) == ["from the heir"] * 5
        assert {transition.policy_version for transition in await attempt.transitions()} == {1}


async def test_a_stream_whose_engine_dies_after_its_first_words_fails_and_leaves_no_record(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer(), token_delay_s=0.03)
    engine.enqueue("a long answer that will not end")
    async with live_gateway(tmp_path, engine=engine, attach=False) as gateway:
        link = EngineLink(engine, gateway.url, gateway.run_key)
        await link.start()
        attempt = await gateway.attempt()
        async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0) as client:
            stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
            with pytest.raises(Exception, match="went away in mid-call"):
                async for _ in stream:
                    await link.close()
        assert await attempt.transitions() == ()


async def test_the_link_reconnects_by_itself(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    async with linked(tmp_path, engine) as (gateway, link):
        attempt = await gateway.attempt()
        assert await ask(attempt) == "ok"
        socket = link._socket
        assert socket is not None
        socket.transport.abort()
        await until(lambda: link._socket is not None and link._socket is not socket)
        assert await ask(attempt) == "ok"


async def test_a_link_that_reconnects_while_held_is_still_held(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    async with linked(tmp_path, engine) as (gateway, link):
        await link.hold()
        socket = link._socket
        assert socket is not None
        socket.transport.abort()
        await until(
            lambda: link._socket is not None and link._socket is not socket and gateway.engines.status()[0].connected
        )
        assert gateway.engines.status()[0].held
        await link.release()
        assert await ask(await gateway.attempt()) == "ok"


async def test_without_an_engine_a_call_waits_so_long_and_is_then_told(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, attach=False, wait_s=0.1) as gateway:
        attempt = await gateway.attempt()
        with pytest.raises(
            APIStatusError, match=r"policy 'policy' has no engine connected after 0.1 s; is the trainer running?"
        ) as caught:
            await ask(attempt)
        assert caught.value.status_code == 503


async def test_a_call_held_too_long_is_told(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    async with linked(tmp_path, engine, wait_s=0.1) as (gateway, link):
        await link.hold()
        await until(lambda: gateway.engines.status()[0].held)
        with pytest.raises(APIStatusError, match=r"is still held for a weight update after 0.1 s"):
            await ask(await gateway.attempt())


async def test_a_wrong_run_key_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, attach=False) as gateway:
        with pytest.raises(ServerError, match="refused the engine: wrong run key"):
            await EngineLink(gateway.engine, gateway.url, "wrong").start()


async def test_no_server_is_told_in_time() -> None:
    with pytest.raises(ServerError, match=r"no server answers at 'ws://127.0.0.1:9/api/v1/engines' after 0.1 s"):
        await EngineLink(ScriptedEngine(tiny_tokenizer()), "http://127.0.0.1:9", "key").start(wait_s=0.1)


async def test_a_client_that_goes_away_frees_the_engine(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    engine.pause()
    async with linked(tmp_path, engine) as (gateway, _):
        attempt = await gateway.attempt()
        call = asyncio.create_task(ask(attempt))
        await until(lambda: engine.requests)
        call.cancel()
        await until(lambda: engine.cancelled)
        assert await attempt.transitions() == ()


class Broken(ScriptedEngine):
    """Fails after a few tokens, or changes version in mid-call."""

    mixes = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        yield TokenChunk(token_ids=(70,), logprobs=(-0.5,), policy_version=0)
        if not self.mixes:
            raise RuntimeError("out of memory")
        yield TokenChunk(token_ids=(71,), logprobs=(-0.5,), policy_version=1)


@pytest.mark.parametrize(
    ("mixes", "message"), [(False, "RuntimeError: out of memory"), (True, "changed from version 0 to 1 in mid-call")]
)
async def test_a_failing_engine_or_one_that_mixes_versions_fails_the_call(
    tmp_path: Path, mixes: bool, message: str
) -> None:
    engine = Broken(tiny_tokenizer())
    engine.mixes = mixes
    async with linked(tmp_path, engine) as (gateway, _):
        attempt = await gateway.attempt()
        with pytest.raises(APIStatusError, match=message):
            await ask(attempt)
        assert await attempt.transitions() == ()
