"""The engine link meets what it cannot send or read: one call fails with a sentence, or the link is made anew; nobody
waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sizes import PATIENCE_S
from websockets.asyncio.client import connect

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.types import SamplingSettings
from lightningrl_server.engines.link import EngineLink
from lightningrl_server.engines.messages import Hello
from lightningrl_testing.live_gateway import LiveAttempt, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

USER = {"role": "user", "content": "hi"}
FAST = (0.01, 0.05)


async def post(attempt: LiveAttempt, **body: Any) -> tuple[int, dict[str, Any]]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(
            f"{attempt.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {attempt.key}"},
            json={"model": "m", "messages": [USER], **body},
        )
    return answer.status_code, answer.json()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("body", [{"seed": 2**64}, {"seed": -(2**63) - 1}, {"seed": 2**63 - 1, "n": 2}])
async def test_a_seed_that_no_engine_can_take_is_refused(tmp_path: Path, body: dict[str, int]) -> None:
    async with live_gateway(tmp_path) as gateway:
        status, answer = await post(await gateway.attempt(), **body)
        assert status == 400
        assert answer["error"]["param"] == "seed"
        assert gateway.engine.requests == []


async def test_the_largest_seeds_are_sampled_and_recorded(tmp_path: Path) -> None:
    async with (
        live_gateway(tmp_path, attach=False) as gateway,
        EngineLink(gateway.engine, gateway.url, gateway.run_key),
    ):
        attempt = await gateway.attempt()
        status, _ = await post(attempt, seed=2**63 - 2, n=2)
        assert status == 200
        assert [transition.sampling.seed for transition in await attempt.transitions()] == [2**63 - 2, 2**63 - 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_no_frame_can_carry_fails_alone_and_the_others_are_answered(
    tmp_path: Path, stream: bool
) -> None:
    async with (
        live_gateway(tmp_path, attach=False) as gateway,
        EngineLink(gateway.engine, gateway.url, gateway.run_key),
    ):
        odd = await gateway.attempt(sampling=SamplingSettings(seed=2**70))
        status, answer = await post(odd, stream=stream)
        assert (status, answer["error"]["code"]) == (502, "engine_failed")
        assert "cannot be sent over the engine link" in answer["error"]["message"]
        assert (await post(await gateway.attempt()))[0] == 200


class OddEngine(ScriptedEngine):
    """Spoils what it samples for one call, named by its rollout."""

    def __init__(self, spoil: Callable[[TokenChunk], TokenChunk]) -> None:
        super().__init__(tiny_tokenizer())
        self._spoil = spoil

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        async for chunk in super().generate(request):
            yield self._spoil(chunk) if request.session.startswith("odd") else chunk


def _fail(chunk: TokenChunk) -> TokenChunk:
    raise RuntimeError("half a character: \ud800")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda chunk: replace(chunk, policy_version=2**70),
        lambda chunk: replace(chunk, token_ids=tuple(2**40 for _ in chunk.token_ids)),
        lambda chunk: replace(chunk, finish_reason=None),
        _fail,
    ],
    ids=["version", "token", "no end", "surrogate in the error"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_whose_answer_cannot_be_sent_fails_that_call_alone(
    tmp_path: Path, spoil: Callable[[TokenChunk], TokenChunk], stream: bool
) -> None:
    engine = OddEngine(spoil)
    async with (
        live_gateway(tmp_path, engine=engine, attach=False) as gateway,
        EngineLink(engine, gateway.url, gateway.run_key),
    ):
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            odd = await gateway.attempt(rollout_id="odd")
            answer = await client.post(
                f"{odd.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {odd.key}"},
                json={"model": "m", "messages": [USER], "stream": stream},
            )
        assert "engine_failed" in answer.text
        assert await odd.transitions() == ()
        assert (await post(await gateway.attempt()))[0] == 200


async def test_an_unreadable_frame_from_the_server_is_logged_and_the_engine_connects_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        live_gateway(tmp_path, attach=False) as gateway,
        EngineLink(gateway.engine, gateway.url, gateway.run_key, backoff_s=FAST) as link,
    ):
        first = link._socket
        (seat,) = gateway.engines._policies["policy"].seats
        seat.engine.outbox._messages.append(msgspec.Raw(b"\xc1"))  # type: ignore[attr-defined]
        assert (await post(await gateway.attempt()))[0] == 200
        assert link._socket is not first
    assert "a frame cannot be read" in caplog.text


async def test_an_unreadable_frame_from_an_engine_detaches_it_and_closes_its_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_gateway(tmp_path, attach=False) as gateway:
        url = gateway.url.replace("http", "ws") + "/api/v1/engines"
        async with connect(url, additional_headers={"Authorization": f"Bearer {gateway.run_key}"}) as socket:
            await socket.send(msgspec.msgpack.encode([Hello("policy", 0, 1000, held=False)]))
            await socket.recv()
            await socket.send(b"\xc1")
            await socket.wait_closed()
            assert socket.close_code == 1003
        assert gateway.engines.status()[0].connected == 0
    assert "a frame that cannot be read" in caplog.text


async def test_a_writer_that_dies_detaches_the_engine_and_its_calls_go_to_the_next_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        live_gateway(tmp_path, attach=False) as gateway,
        EngineLink(gateway.engine, gateway.url, gateway.run_key, backoff_s=FAST) as link,
    ):
        first = link._socket
        (seat,) = gateway.engines._policies["policy"].seats
        seat.engine.outbox._messages = [object()]  # type: ignore[attr-defined]  # what no put lets in: the writer fails on it
        assert (await post(await gateway.attempt()))[0] == 200
        assert link._socket is not first
    assert "the link to an engine broke" in caplog.text


async def test_a_call_that_every_engine_goes_away_from_is_given_up_in_the_end(tmp_path: Path) -> None:
    class Dying(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
            self.requests.append(request)
            return
            yield  # an async generator without an item

    engine = Dying(tiny_tokenizer())
    async with live_gateway(tmp_path, engine=engine) as gateway:
        status, answer = await post(await gateway.attempt())
        assert status == 503
        assert "4 engines of policy 'policy' went away under this call" in answer["error"]["message"]
        assert len(engine.requests) == 4
