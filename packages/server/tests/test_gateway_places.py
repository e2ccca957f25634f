"""Where calls go: with and without /v1, to nobody's path, to no rollout, with a wrong key, and while the store cannot
keep them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from starlette.applications import Starlette

from lightningrl.call_origin import LONGEST_ROLE
from lightningrl.errors import StoreError
from lightningrl.types import OtherCall, Outcome
from lightningrl_server.gateway.app import create_gateway
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.records import CallRecord, ToolCallRecord
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.store.errors import StoreFull
from lightningrl_server.store.protocol import Store
from lightningrl_testing.live_gateway import live_gateway

USER: dict[str, Any] = {"role": "user", "content": "hi"}


async def kept(store: Store, rollout_id: str) -> tuple[OtherCall, ...]:
    await store.finish_attempt(rollout_id, 1, Outcome.SUCCEEDED)
    (trajectory,) = await store.trajectories([rollout_id])
    return trajectory.other_calls


@pytest.mark.parametrize("key_header", ["x-api-key", "authorization"])
async def test_messages_are_answered_below_the_attempt_too(tmp_path: Path, key_header: str) -> None:
    """Vercel's Anthropic provider adds /messages to ANTHROPIC_BASE_URL, official SDKs add /v1/messages."""
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt()
        below = attempt.base_url.removesuffix("/v1")
        key = attempt.key if key_header == "x-api-key" else f"Bearer {attempt.key}"
        async with httpx.AsyncClient(headers={key_header: key}) as client:
            body = {"model": "m", "max_tokens": 5, "messages": [USER]}
            answer = await client.post(f"{below}/messages", json=body)
            count = await client.post(f"{below}/messages/count_tokens", json=body)
            refused = await client.post(f"{below}/messages", json={**body, "messages": []})
        assert answer.json()["content"] == [{"type": "text", "text": "ok"}]
        assert count.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
        assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
        async with AsyncAnthropic(base_url=below, api_key=attempt.key) as sdk:
            await sdk.messages.create(model="m", max_tokens=5, messages=[USER])  # type: ignore[list-item]
        assert len(await attempt.transitions()) == 2


@pytest.mark.parametrize("path", ["v1/moderations", "moderations", "chat/completions"])
async def test_a_path_that_nobody_answers_is_kept_with_the_attempt_where_the_key_is_right(
    tmp_path: Path, path: str
) -> None:
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt()
        url = f"{attempt.base_url.removesuffix('v1')}{path}"
        async with httpx.AsyncClient() as client:
            answer = await client.post(url, json={}, headers={"authorization": f"Bearer {attempt.key}"})
            stranger = await client.post(url, json={}, headers={"authorization": "Bearer wrong"})
        for one in (answer, stranger):
            assert (one.status_code, one.json()["error"]["code"]) == (404, "unknown_path")
        assert ("end the client's base URL in /v1" in answer.text) == ("v1" not in path)
        (refusal,) = await kept(gateway.store, attempt.rollout_id)
        assert (refusal.path, refusal.code) == (path.removeprefix("v1/"), "unknown_path")


async def test_a_wrong_key_learns_not_whether_there_is_such_a_rollout(tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt(rollout_id="known")
        async with httpx.AsyncClient(base_url=gateway.url, headers={"authorization": "Bearer wrong"}) as client:
            answers = [
                await client.post(f"/rollouts/{place}/v1/chat/completions", json={"model": "m", "messages": [USER]})
                for place in ("known/attempts/1", "known/attempts/2", "nobody/attempts/1", f"known/attempts/{2**63}")
            ]
        assert {answer.status_code for answer in answers} == {401}
        sentences = {answer.json()["error"]["message"].partition("; ")[2] for answer in answers}
        assert sentences == {"use the key of its lease"}
        assert await attempt.transitions() == ()


async def test_a_plain_rollout_answers_below_v1_for_clients_that_know_nothing_of_rollouts(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, settings=GatewaySettings(plain_rollout="by-hand")) as gateway:
        attempt = await gateway.attempt(rollout_id="by-hand")
        other = await gateway.attempt()
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=attempt.key, max_retries=0) as client:
            answer = await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
            assert [model.id async for model in client.models.list()] == ["policy"]
        assert answer.choices[0].message.content == "ok"
        async with AsyncAnthropic(base_url=gateway.url, api_key=attempt.key) as sdk:
            await sdk.messages.create(model="m", max_tokens=5, messages=[USER])  # type: ignore[list-item]
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            body = {"model": "m", "messages": [USER]}
            wrong = await http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {other.key}"})
            unknown = await http.post("/v1/moderations", json=body, headers={"authorization": f"Bearer {attempt.key}"})
        assert (wrong.status_code, unknown.status_code) == (401, 404)
        assert len(await attempt.transitions()) == 2


async def test_without_a_plain_rollout_v1_belongs_to_nobody(tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt()
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {attempt.key}"}) as client:
            answer = await client.post(f"{gateway.url}/v1/chat/completions", json={"model": "m", "messages": [USER]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_rollout")


@pytest.mark.parametrize(("length", "status"), [(LONGEST_ROLE, 200), (LONGEST_ROLE + 1, 400)])
async def test_a_role_is_as_long_as_a_name_may_be(tmp_path: Path, length: int, status: int) -> None:
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt()
        gateway.engine.enqueue("hello")
        headers = {"authorization": f"Bearer {attempt.key}", "x-lightningrl-agent": quote("ü" * length)}
        async with httpx.AsyncClient(headers=headers) as client:
            answer = await client.post(f"{attempt.base_url}/chat/completions", json={"model": "m", "messages": [USER]})
        assert answer.status_code == status, answer.text
        await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
        (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    roles = [*(call.agent for call in trajectory.transitions), *(call.agent for call in trajectory.other_calls)]
    assert roles == ["ü" * LONGEST_ROLE]
    if status == 400:
        assert answer.json()["error"]["message"].startswith(
            "the role in 'x-lightningrl-agent' is longer than 200 characters"
        )


class TroubledStore:
    """Keeps no call."""

    def __init__(self, store: Store, error: StoreError) -> None:
        self._store = store
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append_calls(
        self, records: Sequence[CallRecord], tool_calls: Sequence[ToolCallRecord] = ()
    ) -> tuple[CallRecord | None, ...]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "code"), [(StoreFull("no room on the disk"), "store_full"), (StoreError("a disk failed"), "store_error")]
)
async def test_a_call_that_the_store_cannot_keep_is_answered_as_trouble_of_the_server(
    tmp_path: Path, error: StoreError, code: str
) -> None:
    """503, which SDKs send again and workers count as infrastructure: it is none of the agent's doing."""
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt()
        store: Any = TroubledStore(gateway.store, error)
        app = Starlette(
            routes=create_gateway(store, gateway.engines, {"policy": PolicyRenderer(gateway.engine.tokenizer)}).routes
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client:
            answer = await client.post(
                f"{attempt.base_url}/chat/completions",
                json={"model": "m", "messages": [USER]},
                headers={"authorization": f"Bearer {attempt.key}"},
            )
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        assert answer.headers["x-should-retry"] == "true"
