"""A second database: the whole conformance suite, and the lock, on a real PostgreSQL server; skipped where there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from postgresql import PostgreSQL, serving_postgresql

from lightningrl.errors import StoreError
from lightningrl.store import SqlStore
from lightningrl.testing.store_conformance import StoreConformance, leased, make_call, make_spec


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    with serving_postgresql() as server:
        yield server


@pytest.fixture
async def store(server: PostgreSQL) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(server.new_url())
    yield store
    await store.close()


class TestPostgreSQLStore(StoreConformance):
    pass


async def test_one_process_writes_others_read_and_what_was_acknowledged_is_there_after_reopening(server: PostgreSQL) -> None:
    url = server.new_url()
    with pytest.raises(StoreError, match="no LightningRL store"):
        await SqlStore.open(url, read_only=True)
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    await store.append_call(make_call(lease, "c0", [1, 2], [3]))
    with pytest.raises(StoreError, match="in use by another process"):
        await SqlStore.open(url)
    reader = await SqlStore.open(url, read_only=True)
    assert [call.transition.id for call in await reader.calls("a", 1)] == ["c0"]
    with pytest.raises(StoreError, match="reading only"):
        await reader.cancel(["a"])
    await reader.close()
    await store.close()
    store = await SqlStore.open(url)
    assert await store.authorise("a", 1, lease.key) is not None
    await store.close()


async def test_what_postgresql_cannot_keep_is_refused_with_a_sentence_and_the_store_goes_on(store: SqlStore) -> None:
    with pytest.raises(StoreError, match="cannot keep a value"):
        await store.create_rollouts([make_spec("nul\0")])
    assert await store.create_rollouts([make_spec("a")]) == 1


async def test_a_server_that_is_not_there_is_named(server: PostgreSQL) -> None:
    with pytest.raises(StoreError, match=r"postgresql\+psycopg://me:\*\*\*@127\.0\.0\.1:9/none' cannot be written or read"):
        await SqlStore.open("postgresql+psycopg://me:secret@127.0.0.1:9/none")
