"""Interned words: a seed makes none, a reader reads those it needs, one that was rolled back is forgotten, and memory
holds few of them."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import event

from lightningrl.errors import StoreError
from lightningrl.records import Lease
from lightningrl.types import Outcome, SamplingSettings
from lightningrl_server.lru import LruCache
from lightningrl_server.store import SqlStore
from lightningrl_server.store.call_log import append_calls
from lightningrl_server.store.sql import open_database
from lightningrl_server.store.transaction import Transaction
from lightningrl_testing.store_conformance import leased, make_call, make_spec


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    yield store
    await store.close()


def words_in(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return [text for (text,) in db.execute("SELECT text FROM words ORDER BY pk")]


async def test_calls_with_seeds_of_their_own_make_no_words_and_keep_their_seeds(
    store: SqlStore, tmp_path: Path
) -> None:
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    seeds = [None, 0, -1, 7, 2**63 - 1, 2**64 - 1, -(2**63), *range(100, 120)]
    for number, seed in enumerate(seeds):
        settings = SamplingSettings(temperature=0.5, stop=("\n",), seed=seed)
        await store.append_call(make_call(lease, f"c{number}", [1], [2], sampling=settings))
    stored = [call.transition.sampling for call in await store.calls("a", 1)]
    assert stored == [SamplingSettings(temperature=0.5, stop=("\n",), seed=seed) for seed in seeds]
    await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
    (trajectory,) = await store.trajectories(["a"])
    assert [one.sampling for one in trajectory.transitions] == stored
    assert len(words_in(tmp_path / "store.db")) == 2  # the policy and the settings


async def test_a_reader_reads_the_words_it_needs_and_no_others(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    await store.append_calls(
        [make_call(lease, f"c{number}", [1], [2], agent=f"agent-{number}") for number in range(50)]
    )
    await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
    await store.create_rollouts([make_spec("b")])
    await store.append_call(make_call(await leased(store), "d0", [1], [2], agent="agent-7"))
    await store.finish_attempt("b", 1, Outcome.SUCCEEDED)
    await store.close()

    database = open_database(url, read_only=True)
    read: list[str] = []
    event.listen(database.reading, "before_cursor_execute", lambda *args: read.append(args[2]))
    reader = SqlStore(database, read_only=True)
    (trajectory,) = await reader.trajectories(["b"])
    assert [one.agent for one in trajectory.transitions] == ["agent-7"]
    assert [statement.count("WHERE words.pk =") for statement in read if "FROM words" in statement] == [1, 1, 1]
    await reader.close()


def test_a_word_that_was_rolled_back_is_not_read_in_place_of_the_one_that_got_its_number(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/store.db")
    transaction = Transaction(database)
    lease = made_attempt(transaction)
    with pytest.raises(StoreError, match="the disk is full"), transaction.begin():
        append_calls(
            transaction, [make_call(lease, "c0", [1], [2], agent="lost", sampling=SamplingSettings(temperature=0.1))]
        )
        # A retry reads the words.
        (first,) = append_calls(transaction, [make_call(lease, "c9", [1], [2], call_key="key-c0")])
        assert first is not None and first.transition.agent == "lost"
        raise StoreError("the disk is full")
    with transaction.begin():
        append_calls(
            transaction, [make_call(lease, "c1", [1], [2], agent="kept", sampling=SamplingSettings(temperature=0.9))]
        )
        (again,) = append_calls(transaction, [make_call(lease, "c9", [1], [2], call_key="key-c1")])
    assert again is not None and (again.transition.agent, again.transition.sampling.temperature) == ("kept", 0.9)
    transaction.close()
    database.close()


def made_attempt(transaction: Transaction) -> Lease:
    from lightningrl_server.store.queue_writes import create_rollouts, lease

    spec = make_spec("a")
    with transaction.begin():
        create_rollouts(transaction, [spec])
        row = lease(transaction, "w", b"digest", 60.0, 1.0, exclusive=False)
        assert (row.id, row.number) == ("a", 1)
    return Lease(rollout_id="a", attempt=1, task=spec.task, mode=spec.mode, timeout_s=1.0, key="k", expires_at=61.0)


def test_of_what_is_remembered_the_longest_unused_goes_first_and_what_is_large_is_not_kept() -> None:
    recent = LruCache[int, str](most=3, longest=5)
    for number in range(3):
        recent.put(number, "x", 1)
    assert recent.get(0) == "x"
    recent.put(3, "y", 5)
    assert recent.put(4, "too long", 8) == "too long"
    assert [recent.get(number) for number in range(5)] == ["x", None, "x", "y", None]


def test_what_is_remembered_is_bounded_together() -> None:
    recent = LruCache[int, str](most=9, longest=9, together=10)
    for number, size in enumerate((4, 4, 4)):
        recent.put(number, "x", size)
    recent.put(1, "y", 6)
    assert [recent.get(number) for number in range(3)] == [None, "y", "x"]


async def test_words_that_agents_choose_are_not_kept_in_memory(store: SqlStore) -> None:
    """20 MB of roles and stop strings, written and read again."""

    async def write_and_read(rollout_id: str, count: int, length: int) -> None:
        await store.create_rollouts([make_spec(rollout_id)])
        lease = await leased(store)
        for number in range(0, count, 50):
            await store.append_calls(
                [
                    make_call(
                        lease,
                        f"{rollout_id}-{index}",
                        [1],
                        [2],
                        agent=f"{rollout_id} {index} ".ljust(length, "x"),
                        sampling=SamplingSettings(stop=(f"{rollout_id} {index} ".ljust(length, "y"),)),
                    )
                    for index in range(number, number + 50)
                ]
            )
        await store.finish_attempt(rollout_id, 1, Outcome.SUCCEEDED)
        (trajectory,) = await store.trajectories([rollout_id])
        assert len(trajectory.transitions) == count

    await write_and_read("warm", 50, 10)
    tracemalloc.start()
    try:
        await write_and_read("long", 100, 100_000)
        await asyncio.gather(*(store.trajectories(["warm"]) for _ in range(50)))  # a thread holds what it read last
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 8 * 2**20
