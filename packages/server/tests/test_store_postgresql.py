"""A second database: the whole conformance suite, and what several servers of one store do at once, on a real
PostgreSQL server; skipped where there is none."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from postgresql import PostgreSQL
from sizes import PATIENCE_S

from lightningrl.errors import StoreError
from lightningrl.types import Outcome, ToolCall, ToolStatus
from lightningrl_server.records import DIALOGUE, ToolCallRecord
from lightningrl_server.store import SqlStore
from lightningrl_server.store.errors import AttemptOver, Conflict
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.store_conformance import StoreConformance, leased, make_call, make_spec
from lightningrl_testing.tokenizers import tiny_tokenizer


@pytest.fixture
async def store(postgresql: PostgreSQL) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(postgresql.new_url())
    yield store
    await store.close()


class TestPostgreSQLStore(StoreConformance):
    pass


# ------------------------------------------------------------------ several servers


@asynccontextmanager
async def two_stores(postgresql: PostgreSQL) -> AsyncIterator[tuple[SqlStore, SqlStore]]:
    """Open one store twice, as two servers do."""
    url = postgresql.new_url()
    here, other = await SqlStore.open(url), await SqlStore.open(url)
    try:
        yield here, other
    finally:
        await here.close()
        await other.close()


async def test_a_tool_call_that_is_told_to_two_servers_is_kept_once(postgresql: PostgreSQL) -> None:
    async with two_stores(postgresql) as (here, other):
        await here.create_rollouts([make_spec("a")])
        await leased(other)
        reports = [
            ToolCallRecord(tool_call=ToolCall(id=f"t{number}", name="sql"), span_id=f"s{number}") for number in range(2)
        ]
        assert await here.append_tool_calls("a", 1, reports[:1]) == 1
        assert await other.append_tool_calls("a", 1, reports) == 1
        assert await here.append_tool_calls("a", 1, reports) == 0
        assert await here.tool_call_ids("a", 1) == {"t0", "t1"}


async def test_a_tool_call_that_one_server_is_shown_and_another_told_is_kept_once(postgresql: PostgreSQL) -> None:
    async with two_stores(postgresql) as (here, other):
        await here.create_rollouts([make_spec("a")])
        await leased(other)
        call = ToolCall(id="t", name="sql", arguments="{}", result="3")
        shown = ToolCallRecord(tool_call=call, span_id=f"{DIALOGUE}t")
        report = ToolCallRecord(tool_call=replace(call, status=ToolStatus.OK), span_id="s")
        assert await here.append_tool_calls("a", 1, [shown]) == 1
        assert await other.append_tool_calls("a", 1, [report]) == 1
        assert await here.append_tool_calls("a", 1, [shown]) == 0, "as many are kept as before, and not the same"
        assert await here.append_tool_calls("a", 1, [report]) == 0
        await here.finish_attempt("a", 1, Outcome.SUCCEEDED)
        assert [tool.status for tool in (await other.trajectories(["a"]))[0].tool_calls] == [ToolStatus.OK]


async def test_an_attempt_goes_on_at_any_server_and_none_keeps_a_call_after_another_has_ended_it(
    postgresql: PostgreSQL,
) -> None:
    async with two_stores(postgresql) as (here, other):
        await here.create_rollouts([make_spec("a")])
        lease = await leased(other)
        first = make_call(lease, "c0", [1, 2], [3], agent="planner")
        second = make_call(lease, "c1", [4], [5], parent=first, agent="critic")
        third = make_call(lease, "c2", [6], [7], parent=second, agent="planner")
        for store, call in ((here, first), (other, second), (here, third)):
            assert await store.append_call(call) is None
        again = await other.append_call(make_call(lease, "c2x", [6], [8], parent=second, call_key="key-c2"))
        assert again is not None and again.transition.id == "c2", (
            "a retry at the other server is answered with the first"
        )
        with pytest.raises(Conflict, match="'c1' is already used"):
            await here.append_call(make_call(lease, "c1", [9], [9], call_key="new"))
        for store in (here, other):
            info = await store.authorise("a", 1, lease.key)
            assert info is not None and info.calls == 3
            calls = [call.transition for call in await store.calls("a", 1)]
            assert [(call.id, call.prompt_ids.tolist(), call.agent) for call in calls] == [
                ("c0", [1, 2], "planner"),
                ("c1", [1, 2, 3, 4], "critic"),
                ("c2", [1, 2, 3, 4, 5, 6], "planner"),
            ]
        await other.finish_attempt("a", 1, Outcome.SUCCEEDED)
        with pytest.raises(AttemptOver, match="call 'c3' came too late"):
            await here.append_call(make_call(lease, "c3", [9], [9]))
        assert await here.authorise("a", 1, lease.key) is None
        assert not await here.heartbeat("a", 1, 60.0)


async def test_who_waits_at_one_server_hears_what_another_does(postgresql: PostgreSQL) -> None:
    async with two_stores(postgresql) as (here, other), asyncio.timeout(PATIENCE_S):
        working = asyncio.create_task(here.lease("w", 60.0, wait_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        await other.create_rollouts([make_spec("a")])
        lease = await working
        assert lease is not None
        waiting = asyncio.create_task(here.wait_finished(["a"], PATIENCE_S))
        await asyncio.sleep(0.01)
        assert await other.cancel(["a"]) == 1
        assert await waiting == ("a",)


async def test_no_rollout_goes_to_workers_of_two_servers(postgresql: PostgreSQL) -> None:
    async with two_stores(postgresql) as stores, asyncio.timeout(PATIENCE_S):
        names = [f"r{number}" for number in range(40)]
        working = [
            asyncio.create_task(stores[number % 2].lease(f"w{number}", 60.0, wait_s=PATIENCE_S)) for number in range(40)
        ]
        await asyncio.gather(
            *(stores[number % 2].create_rollouts([make_spec(name)]) for number, name in enumerate(names))
        )
        leases = await asyncio.gather(*working)
        assert sorted(lease.rollout_id for lease in leases if lease is not None) == sorted(names)


async def test_leases_of_a_server_that_is_gone_end_at_another(postgresql: PostgreSQL) -> None:
    url = postgresql.new_url()
    gone, other = await SqlStore.open(url), await SqlStore.open(url)
    await gone.create_rollouts([make_spec("a", max_attempts=2)])
    await leased(gone)
    await gone.close()
    working = asyncio.create_task(other.lease("w", 60.0, wait_s=PATIENCE_S))
    await asyncio.to_thread(postgresql.ask, f"UPDATE {url.rpartition('%3D')[2]}.attempts SET expires_at = 0")
    lease = await working
    await other.close()
    assert lease is not None and lease.attempt == 2


async def test_a_database_that_is_killed_is_waited_for_and_no_lease_ends_meanwhile(postgresql: PostgreSQL) -> None:
    async with two_stores(postgresql) as (here, other), asyncio.timeout(PATIENCE_S):
        await here.create_rollouts([make_spec("a"), make_spec("b")])
        lease_s = 6.0  # enough for what is asked after the outage, which is longer than it, also on a busy machine
        lease = await leased(here, lease_s=lease_s)
        await here.append_call(make_call(lease, "c0", [1], [2]))
        await asyncio.to_thread(postgresql.kill)
        asking = asyncio.create_task(other.calls("a", 1))
        keeping = asyncio.create_task(here.append_call(make_call(lease, "c1", [1], [2])))
        await asyncio.sleep(lease_s + 0.1)
        await asyncio.to_thread(postgresql.start)
        assert [call.transition.id for call in await asking][:1] == ["c0"]
        assert await keeping is None
        assert await here.heartbeat("a", 1, 60.0), "nobody could hear its worker"
        working = asyncio.create_task(other.lease("w", 60.0, wait_s=PATIENCE_S))
        following = await working
        assert following is not None and following.rollout_id == "b"
        waiting = asyncio.create_task(other.wait_finished(["a"], PATIENCE_S))
        assert await here.cancel(["a"]) == 1
        assert await waiting == ("a",), "what others tell is heard again"


async def test_a_conversation_whose_calls_go_to_two_servers_in_turn_is_one_history(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    url = postgresql.new_url()
    engine = ScriptedEngine(tiny_tokenizer())
    async with (
        live_gateway(tmp_path, store_url=url, engine=engine) as here,
        live_gateway(tmp_path, store_url=url, engine=engine) as other,
    ):
        attempt = await here.attempt()
        messages = [{"role": "user", "content": "count"}]
        for turn, gateway in enumerate((here, other, here, here, other)):
            engine.enqueue(f"answer {turn}")
            async with AsyncOpenAI(base_url=f"{gateway.url}{_path(attempt.base_url)}", api_key=attempt.key) as openai:
                given: Any = messages
                completion = await openai.chat.completions.create(model="policy", messages=given)
                answer = completion.choices[0].message.content
            messages += [{"role": "assistant", "content": answer or ""}, {"role": "user", "content": f"more {turn}"}]
        calls = await attempt.transitions()
        assert [call.is_break for call in calls] == [False] * 5
        for before, call in itertools.pairwise(calls):
            assert call.parent_id == before.id, "it goes on from the tokens that the other server sampled"
            whole = [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]
            assert call.prompt_ids.tolist()[: len(whole)] == whole
        assert await _answer_twice(here, other, attempt.base_url, attempt.key) == 1


async def _answer_twice(here: LiveGateway, other: LiveGateway, base_url: str, key: str) -> int:
    """Count the answers that a call gets which is retried at the other server, with its id."""
    answers: set[str] = set()
    for gateway in (here, other):
        here.engine.enqueue(f"said by {len(answers)}")
        async with AsyncOpenAI(base_url=f"{gateway.url}{_path(base_url)}", api_key=key) as openai:
            call = openai.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "again"}],
                extra_headers={"x-lightningrl-call-id": "the-call"},
            )
            answers.add((await call).id)
    return len(answers)


def _path(base_url: str) -> str:
    return base_url[base_url.index("/rollouts/") :]


async def test_a_reader_is_beside_the_servers_and_what_was_acknowledged_is_there_after_reopening(
    postgresql: PostgreSQL,
) -> None:
    url = postgresql.new_url()
    with pytest.raises(StoreError, match="no LightningRL store"):
        await SqlStore.open(url, read_only=True)
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    await store.append_call(make_call(lease, "c0", [1, 2], [3]))
    reader = await SqlStore.open(url, read_only=True)
    assert [call.transition.id for call in await reader.calls("a", 1)] == ["c0"]
    with pytest.raises(StoreError, match="reading only"):
        await reader.cancel(["a"])
    await reader.close()
    await store.close()
    store = await SqlStore.open(url)
    assert await store.authorise("a", 1, lease.key) is not None
    await store.close()


# ------------------------------------------------------------------ what goes wrong


async def test_what_postgresql_cannot_keep_is_refused_with_a_sentence_and_the_store_goes_on(store: SqlStore) -> None:
    with pytest.raises(StoreError, match="cannot keep a value"):
        await store.create_rollouts([make_spec("nul\0")])
    assert await store.create_rollouts([make_spec("a")]) == 1


async def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    with pytest.raises(
        StoreError,
        match=r"^the store 'postgresql://me:\*\*\*@127\.0\.0\.1:9/none' cannot be written or read .*its server runs",
    ):
        await SqlStore.open("postgresql://me:secret@127.0.0.1:9/none")


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_wrong_password_is_named(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch, *, read_only: bool
) -> None:
    monkeypatch.setenv("PGPASSWORD", "not the one")
    with pytest.raises(
        StoreError, match=r"is not opened by this password .*; set PGPASSWORD or write it to ~/.pgpass$"
    ) as refused:
        await SqlStore.open(postgresql.guarded, read_only=read_only)
    assert "not the one" not in str(refused.value)


async def test_a_password_is_taken_without_the_line_end_of_its_file(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "open sesame\n")
    with pytest.raises(StoreError, match="may not be used by its user"):  # it may make no schema: the door is open
        await SqlStore.open(postgresql.guarded)


async def test_a_database_of_something_else_and_a_schema_that_is_gone_are_named(postgresql: PostgreSQL) -> None:
    url = postgresql.new_url()
    schema = url.rpartition("%3D")[2]
    postgresql.ask(f"CREATE TABLE {schema}.customers (name text)")
    with pytest.raises(StoreError, match="is a database of something else, no LightningRL store"):
        await SqlStore.open(url)
    postgresql.ask(f"DROP SCHEMA {schema} CASCADE")
    with pytest.raises(StoreError, match="its database has no such schema; restore it, or start a new run"):
        await SqlStore.open(url)


async def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r'needs psycopg; `pip install "lightningrl\[postgres\]"`'):
        await SqlStore.open("postgresql://me@host/name")
