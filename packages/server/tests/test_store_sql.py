"""SqlStore: the conformance suite, and what only a database on a disk can go through."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sizes import PATIENCE_S, sized
from sqlalchemy import event
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateTable

from lightningrl.errors import StoreError
from lightningrl.types import Outcome, RolloutState, ToolCall
from lightningrl_server.records import AttemptEnd, SpanRecord, ToolCallRecord
from lightningrl_server.store import SqlStore
from lightningrl_server.store.errors import StoreFull, StoreTrouble
from lightningrl_server.store.protocol import Store
from lightningrl_server.store.sql import open_database
from lightningrl_server.store.tables import SCHEMA_VERSION, metadata
from lightningrl_server.store.transaction import Transaction
from lightningrl_server.store.writer import _PATIENCE_S, Writer
from lightningrl_testing.store_conformance import StoreConformance, leased, make_call, make_spec


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    yield store
    await store.close()


class TestSqlStore(StoreConformance):
    pass


def test_it_is_a_store() -> None:
    assert issubclass(SqlStore, Store)


async def test_what_was_acknowledged_is_there_after_reopening(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    first = make_call(lease, "c0", [1, 2], [3])
    await store.append_call(first)
    await store.close()
    store = await SqlStore.open(url)
    assert await store.authorise("a", 1, lease.key) is not None
    assert await store.append_call(make_call(lease, "c1", [4], [5], parent=first)) is None
    assert [one.transition.prompt_ids.tolist() for one in await store.calls("a", 1)] == [[1, 2], [1, 2, 3, 4]]
    await store.close()


async def test_a_store_in_use_by_another_process_is_refused_but_can_be_read(store: SqlStore, tmp_path: Path) -> None:
    await store.create_rollouts([make_spec("a")])
    with pytest.raises(StoreError, match=r"store\.db' is in use by another process"):
        await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    reader = await SqlStore.open(f"sqlite:///{tmp_path}/store.db", read_only=True)
    assert (await reader.rollout("a")).state is RolloutState.QUEUED
    with pytest.raises(StoreError, match="open for reading only"):
        await reader.cancel(["a"])
    await reader.close()


async def test_a_database_that_somebody_locks_is_waited_for_once_for_all_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db", pragmas={"busy_timeout": 50})
    begun: list[None] = []
    begin = Transaction.begin

    def counted(self: Transaction) -> AbstractContextManager[None]:
        begun.append(None)
        return begin(self)

    monkeypatch.setattr(Transaction, "begin", counted)
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        failures = await asyncio.gather(
            *(store.create_rollouts([make_spec(f"r{n}")]) for n in range(20)), return_exceptions=True
        )
    assert all(isinstance(one, StoreError) and "in use by another process" in str(one) for one in failures)
    assert len(begun) <= 3, "the first, and what came while it waited"
    assert await store.create_rollouts([make_spec("r0")]) == 1
    await store.close()


def test_tables_that_change_have_another_version() -> None:
    """A column was added at version 1, and a store of before was opened, to fail at its first read."""
    said = "".join(str(CreateTable(table).compile(dialect=sqlite.dialect())) for table in metadata.sorted_tables)
    digest = hashlib.sha256(said.encode()).hexdigest()[:12]
    assert (SCHEMA_VERSION, digest) == (2, "1b2af75095e4"), "raise SCHEMA_VERSION, and write here what it is now"


@pytest.mark.parametrize("version", ["0", "1", "99", "2.5"])
async def test_a_store_of_another_version_is_refused_whoever_opens_it(tmp_path: Path, version: str) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    await (await SqlStore.open(url)).close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", [version])
    before = (tmp_path / "store.db").read_bytes()
    says = f"has schema version {version}, and this lightningrl reads version {SCHEMA_VERSION}; open it with the "
    says += "lightningrl that wrote it"
    for read_only in (False, True):
        with pytest.raises(StoreError, match=says):
            await SqlStore.open(url, read_only=read_only)
    assert (tmp_path / "store.db").read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="rights of files are POSIX's")
async def test_a_store_is_its_owners_alone_when_it_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = os.umask(0)
    try:
        store = await SqlStore.open(f"sqlite:///{folder}/store.db")
        await store.create_rollouts([make_spec("a")])
        rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        await store.close()
    finally:
        os.umask(before)
    assert {"store.db", "store.db-wal", "store.db-shm", "store.db-lock"} == set(rights) and set(rights.values()) == {
        0o600
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"this is no database at all" * 100)
    with pytest.raises(StoreError, match="no readable SQLite database"):
        await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    db = sqlite3.connect(tmp_path / "other.db")
    db.execute("CREATE TABLE things (x)")
    db.close()
    with pytest.raises(StoreError, match="no LightningRL store"):
        await SqlStore.open(f"sqlite:///{tmp_path}/other.db")
    with pytest.raises(StoreError, match="there is no store at"):
        await SqlStore.open(f"sqlite:///{tmp_path}/none.db", read_only=True)


@pytest.mark.parametrize("url", ["mongodb://x", "sqlite://", "what", "sqlite:///:memory:"])
async def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(StoreError, match=r"write 'sqlite:///path/to/store.db'"):
        await SqlStore.open(url)


async def test_a_full_disk_refuses_and_loses_nothing_and_passes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = await SqlStore.open(url, pragmas={"max_page_count": 60})
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    big = np.arange(2000).tolist()
    acknowledged = []
    with pytest.raises(
        StoreFull, match=r"no room on the disk for the store '.*store\.db'; nothing of this request was kept: free some"
    ):
        for index in range(1000):
            await store.append_call(make_call(lease, f"c{index}", big, [1]))
            acknowledged.append(f"c{index}")
    results = await asyncio.gather(
        *(store.append_call(make_call(lease, f"x{i}", big, [1])) for i in range(20)), return_exceptions=True
    )
    assert all(isinstance(one, StoreFull) for one in results)
    assert [one.transition.id for one in await store.calls("a", 1)] == acknowledged and acknowledged
    await store.close()
    store = await SqlStore.open(url)
    assert [one.transition.id for one in await store.calls("a", 1)] == acknowledged
    await store.append_call(make_call(lease, "after", big, [1]))
    assert await store.finish_attempt("a", 1, Outcome.SUCCEEDED) is RolloutState.SUCCEEDED
    await store.close()


async def test_the_same_store_works_again_once_there_is_room(tmp_path: Path) -> None:
    room = 60
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db", pragmas={"max_page_count": room})
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    with pytest.raises(StoreFull):
        await store.append_call(make_call(lease, "big", list(range(2**17)), [1]))
    assert await store.append_call(make_call(lease, "small", [1], [2])) is None
    await store.close()


async def test_a_cancelled_lease_goes_to_somebody_else(store: SqlStore) -> None:
    waiting = asyncio.create_task(store.lease("gone", 600.0, wait_s=PATIENCE_S))
    await asyncio.sleep(0.05)
    creating = asyncio.create_task(store.create_rollouts([make_spec("a")]))
    await asyncio.sleep(0)
    waiting.cancel()
    await creating
    await asyncio.gather(waiting, return_exceptions=True)
    lease = await store.lease("here", 60.0, wait_s=PATIENCE_S)
    assert lease is not None and lease.attempt == 1


_WRITER = """
    import asyncio, sys
    from lightningrl_server.store import SqlStore
    from lightningrl_testing.store_conformance import leased, make_call, make_spec

    async def main():
        store = await SqlStore.open(sys.argv[1])
        run = sys.argv[2]
        await store.create_rollouts([make_spec(f"{run}-{i}") for i in range(8)])
        await store.interrupt("killed")

        async def agent():
            lease = await leased(store)
            for index in range(100_000):
                call = f"{run}/{lease.rollout_id}/{lease.attempt}/{index}"
                await store.append_call(make_call(lease, call, list(range(index % 50)), [index + 1]))
                sys.stdout.write(f"{lease.rollout_id} {lease.attempt} {call}\\n")
                sys.stdout.flush()

        await asyncio.gather(*(agent() for _ in range(8)))

    asyncio.run(main())
"""


def _killed_run(url: str, run: int, script: Path, lines: int) -> list[tuple[str, int, str]]:
    """Calls a process acknowledged before `kill -9` struck it in the middle of its writing."""
    process = subprocess.Popen([sys.executable, str(script), url, str(run)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines_read = []
    for line in process.stdout:
        lines_read.append(line)
        if len(lines_read) == lines:
            os.kill(process.pid, signal.SIGKILL)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    whole = [line.split() for line in lines_read if line.endswith("\n")]
    return [(rollout_id, int(attempt), call) for rollout_id, attempt, call in whole]


@pytest.mark.slow
async def test_kill_9_loses_no_acknowledged_call(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(_WRITER))
    acknowledged: list[tuple[str, int, str]] = []
    for run in range(sized(4, 20)):
        acknowledged += await asyncio.to_thread(_killed_run, url, run, script, 20 + 13 * run)
    store = await SqlStore.open(url)
    stored = {
        (rollout_id, attempt, call.transition.id)
        for rollout_id, attempt in {(one[0], one[1]) for one in acknowledged}
        for call in await store.calls(rollout_id, attempt)
    }
    assert len(acknowledged) > sized(150, 1000) and set(acknowledged) <= stored
    assert len(stored) == len({call for _, _, call in stored})
    await store.close()


async def test_a_tool_call_costs_the_same_however_many_its_attempt_has(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create_rollouts([make_spec("a")])
    await leased(store)
    read, count = Transaction.rows, 0

    def counted(*args: Any, **values: Any) -> list[Any]:
        nonlocal count
        rows = read(*args, **values)
        count += len(rows)
        return rows

    monkeypatch.setattr(Transaction, "rows", counted)
    for number in [*range(100), 99]:
        await store.append_tool_calls("a", 1, [make_tool(number)])
    assert count < 10, "the attempt's own row"
    assert len(await store.tool_call_ids("a", 1)) == 100


async def test_tool_calls_and_spans_of_an_attempt_are_bounded(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightningrl_server.store.tool_calls.MOST_REPORTED", 2)
    await store.create_rollouts([make_spec("a")])
    await leased(store)
    await store.append_tool_calls("a", 1, [make_tool(0), make_tool(1)])
    await store.append_spans("a", 1, [SpanRecord(span_id="s0"), SpanRecord(span_id="s1")])
    for _ in range(2):
        with pytest.raises(StoreError, match="rollout 'a' would have 3 tool calls, more than 2; report fewer"):
            await store.append_tool_calls("a", 1, [make_tool(2)])
        with pytest.raises(StoreError, match="rollout 'a' would have 3 spans, more than 2; report fewer"):
            await store.append_spans("a", 1, [SpanRecord(span_id="s2")])
    assert await store.append_tool_calls("a", 1, [make_tool(1)]) == 0
    await store.append_spans("a", 1, [SpanRecord(span_id="s1")])
    with pytest.raises(StoreError, match="would have 3 tool calls"):
        await store.finish_and_lease("a", 1, AttemptEnd(outcome=Outcome.SUCCEEDED, tool_calls=[make_tool(2)]), None)
    assert await store.finish_attempt("a", 1, Outcome.SUCCEEDED) is RolloutState.SUCCEEDED
    assert [call.id for call in (await store.trajectories(["a"]))[0].tool_calls] == ["t0", "t1"]


def make_tool(number: int) -> ToolCallRecord:
    return ToolCallRecord(tool_call=ToolCall(id=f"t{number}", name="sql"), span_id=f"s{number}")


async def test_the_key_of_a_lease_opens_its_attempt_without_a_read_and_not_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    await store.create_rollouts([make_spec("a"), make_spec("b")])
    lease = await leased(store)
    reads = 0
    read = store.read

    async def counted(query: Any) -> Any:
        nonlocal reads
        reads += 1
        return await read(query)

    monkeypatch.setattr(store, "read", counted)
    info = await store.authorise("a", 1, lease.key)
    assert info is not None and (info.rollout_id, info.attempt, info.timeout_s, info.calls) == (
        "a",
        1,
        lease.timeout_s,
        0,
    )
    assert await store.authorise("a", 1, "another") is None and reads == 0
    # leased and cancelled in one commit: what is remembered of the lease goes with its end
    lease, _ = await asyncio.gather(leased(store), store.cancel(["b"]))
    assert lease.rollout_id == "b"
    assert await store.authorise("b", 1, lease.key) is None
    await store.close()


async def test_nobody_waits_for_a_writer_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")

    def end(*_: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr("lightningrl_server.store.writer.patiently", end)
    with pytest.raises(StoreTrouble, match=r"the writer of the store .* has ended \(SystemExit: 3\); open it again"):
        await store.create_rollouts([make_spec("r")])
    with pytest.raises(StoreTrouble, match="closed; open it again"):
        await store.create_rollouts([make_spec("r")])
    await store.close()


async def test_a_database_that_goes_away_in_mid_transaction_is_waited_for_once_for_all_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    database = open_database(f"sqlite:///{tmp_path / 'store.sqlite'}")
    monkeypatch.setattr(
        "lightningrl_server.store.writer.time", SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    )
    monkeypatch.setattr(database, "is_lost", lambda error: True)
    monkeypatch.setattr(database, "regain", lambda: None)
    is_away, is_busy, is_grouped = (threading.Event() for _ in range(3))

    def fail(*_: object) -> None:
        if is_away.is_set():
            error = sqlite3.OperationalError("the server closed the connection")
            error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            raise error

    def wait_for_group(_: Transaction) -> None:
        is_busy.set()
        is_grouped.wait()

    def go_away(_: Transaction) -> None:
        is_away.set()
        fail()

    event.listen(database.writing, "do_connect", fail)
    writer = Writer(database, asyncio.get_running_loop(), lambda events: None)
    before = writer.submit(wait_for_group)
    await asyncio.to_thread(is_busy.wait)
    group = [writer.submit(go_away), *(writer.submit(lambda tx: None) for _ in range(3))]
    is_grouped.set()
    await before
    assert [type(error) for error in await asyncio.gather(*group, return_exceptions=True)] == [StoreTrouble] * 4
    assert sum(waits) < 2 * _PATIENCE_S
    await writer.close()
    database.close()
