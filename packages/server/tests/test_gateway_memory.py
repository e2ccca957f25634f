"""What the gateway remembers of an attempt: found again after a restart whoever calls first, and never recorded for
nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from sizes import PATIENCE_S
from starlette.applications import Starlette
from starlette.types import Message

from lightningrl_server.gateway.app import Gateway, create_gateway
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.records import CallRecord, ToolCallRecord
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.store.protocol import Store
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway

USER = {"role": "user", "content": "hi"}
OTHER = {"role": "user", "content": "sub-task"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as running:
        yield running


async def post(
    attempt: LiveAttempt, messages: Sequence[Any], app: Starlette | None = None, **headers: str
) -> dict[str, Any]:
    transport = httpx.ASGITransport(app=app) if app is not None else None
    async with httpx.AsyncClient(transport=transport, timeout=PATIENCE_S) as client:
        answer = await client.post(
            f"{attempt.base_url}/chat/completions",
            content=json.dumps({"model": "m", "messages": messages}),
            headers={
                "authorization": f"Bearer {attempt.key}",
                **{name.replace("_", "-"): value for name, value in headers.items()},
            },
        )
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def app_of(gateway: LiveGateway, store: Store | None = None, settings: GatewaySettings | None = None) -> Starlette:
    """A gateway that remembers nothing."""
    return Starlette(routes=gateway_of(gateway, store, settings).routes)


def gateway_of(gateway: LiveGateway, store: Store | None = None, settings: GatewaySettings | None = None) -> Gateway:
    return create_gateway(
        store or gateway.store, gateway.engines, {"policy": PolicyRenderer(gateway.engine.tokenizer)}, settings
    )


async def test_a_sub_agents_first_call_after_a_restart_does_not_hide_the_main_agents_history(
    gateway: LiveGateway,
) -> None:
    attempt = await gateway.attempt()
    said = await post(attempt, [USER])
    restarted = app_of(gateway)
    await post(attempt, [OTHER], restarted)
    await post(attempt, [USER, said, {"role": "user", "content": "go on"}], restarted)
    first, _, third = await attempt.transitions()
    assert third.parent_id == first.id and not third.is_break


async def test_an_attempt_that_was_dropped_from_memory_is_found_again_whoever_calls_first(gateway: LiveGateway) -> None:
    app = app_of(gateway, settings=GatewaySettings(max_attempts_in_memory=1))
    attempt = await gateway.attempt()
    said = await post(attempt, [USER], app)
    await post(await gateway.attempt(), [USER], app)  # drops the first
    await post(attempt, [OTHER], app)
    await post(attempt, [USER, said, {"role": "user", "content": "go on"}], app)
    first, _, third = await attempt.transitions()
    assert third.parent_id == first.id and not third.is_break


@pytest.mark.parametrize("calls_again", [False, True])
async def test_an_attempt_whose_prompt_was_too_long_is_known_after_a_restart(
    gateway: LiveGateway, calls_again: bool
) -> None:
    attempt = await gateway.attempt()
    place = attempt.rollout_id, attempt.attempt
    with pytest.raises(AssertionError, match="context_length_exceeded"):
        await post(attempt, [{"role": "user", "content": "x" * 40_000}])
    restarted = gateway_of(gateway)
    if calls_again:
        await post(attempt, [USER], Starlette(routes=restarted.routes))
    assert await restarted.is_overflowed(*place)


async def test_an_attempt_that_was_refused_for_other_reasons_is_not_too_long(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    with pytest.raises(AssertionError, match="has no messages"):
        await post(attempt, [])
    assert not await gateway_of(gateway).is_overflowed(attempt.rollout_id, attempt.attempt)


async def test_a_prompt_that_is_too_long_is_known_after_a_hundred_other_refusals(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    for messages in (*([],) * 101, [{"role": "user", "content": "x" * 40_000}]):
        with pytest.raises(AssertionError):
            await post(attempt, messages)
    assert await gateway.gateway.is_overflowed(attempt.rollout_id, attempt.attempt)


async def test_an_attempts_first_call_reads_no_history(gateway: LiveGateway) -> None:
    class NoReads(_Passing):
        async def calls(self, rollout_id: str, attempt: int) -> tuple[CallRecord, ...]:
            raise AssertionError("a history was read")

    app = app_of(gateway, NoReads(gateway.store))
    attempt = await gateway.attempt()
    said = await post(attempt, [USER], app)
    await post(attempt, [USER, said, OTHER], app)


class _Passing:
    """A store that passes everything on."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class SlowStore(_Passing):
    """Commits, and says so only when it is let."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.is_kept = asyncio.Event()
        self.may_return = asyncio.Event()

    async def append_calls(
        self, records: Sequence[CallRecord], tool_calls: Sequence[ToolCallRecord] = ()
    ) -> tuple[CallRecord | None, ...]:
        kept = await self._store.append_calls(records, tool_calls)
        self.is_kept.set()
        await self.may_return.wait()
        return kept


async def leave_while_stored(
    app: Starlette, store: SlowStore, attempt: LiveAttempt, body: dict[str, Any], **headers: str
) -> None:
    """One request whose client goes away after its call is stored and before it is answered."""
    left = asyncio.Event()
    messages: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await store.is_kept.wait()
        left.set()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("nobody listens")

    path = attempt.base_url.partition("://")[2].partition("/")[2]
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/{path}/chat/completions",
        "headers": [(b"authorization", f"Bearer {attempt.key}".encode())]
        + [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }
    working, leaving = asyncio.create_task(app(scope, receive, send)), asyncio.create_task(left.wait())
    await asyncio.wait(
        (working, leaving), return_when=asyncio.FIRST_COMPLETED
    )  # a call that fails before that leaves nobody
    assert left.is_set(), working.result()
    for _ in range(3):
        await asyncio.sleep(0)  # the disconnect reaches the call, which waits for the store
    store.may_return.set()
    await working


@pytest.mark.parametrize("retry", [{}, {"x_stainless_retry_count": "1"}], ids=["says nothing", "counts"])
async def test_a_client_that_leaves_while_its_call_is_stored_is_answered_with_it_when_it_comes_again(
    gateway: LiveGateway, retry: dict[str, str]
) -> None:
    store = SlowStore(gateway.store)
    app = app_of(gateway, store)
    gateway.engine.enqueue("first", "second", "third")
    attempt = await gateway.attempt()
    await leave_while_stored(app, store, attempt, {"model": "m", "messages": [USER]})
    assert (await post(attempt, [USER], app, **retry))["content"] == "first"
    assert len(await attempt.transitions()) == 1
    assert (await post(attempt, [USER], app))["content"] == "second", "an equal call that is no retry is one of its own"


async def test_with_a_call_id_it_is_answered_without_sampling_again(gateway: LiveGateway) -> None:
    store = SlowStore(gateway.store)
    app = app_of(gateway, store)
    gateway.engine.enqueue("first", "second")
    attempt = await gateway.attempt()
    headers = {"x_lightningrl_call_id": "c1"}
    await leave_while_stored(app, store, attempt, {"model": "m", "messages": [USER]}, **headers)
    assert (await post(attempt, [USER], app, **headers))["content"] == "first"
    assert len(gateway.engine.requests) == 1
