"""Leases end where no heartbeat came, not where the clock jumped or the server stood still."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from sizes import PATIENCE_S

from lightningrl_server.store import SqlStore
from lightningrl_server.store.databases import LeaseClock
from lightningrl_server.store.transaction import Transaction
from lightningrl_testing.store_conformance import leased, make_spec


def test_the_lease_clock_does_not_jump_with_the_time_of_day_and_stands_still_with_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elapsed = [0.0]
    clock = LeaseClock(lambda: elapsed[0])
    began = clock.now()
    monkeypatch.setattr(time, "time", lambda: began + 86_400)
    for elapsed[0] in (0.5, 1.0, 1.5):
        assert clock.now() == pytest.approx(began + elapsed[0], abs=1e-3)
    elapsed[0] += 3600.0  # nobody looked for an hour
    assert clock.now() == pytest.approx(began + 2.5, abs=1e-3)


async def test_a_worker_outlives_a_store_that_was_closed_for_longer_than_its_lease(tmp_path: Path) -> None:
    """No heartbeat could reach it meanwhile."""
    url = f"sqlite:///{tmp_path}/store.db"
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    await store.close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        db.execute("UPDATE attempts SET expires_at = 0")
    store = await SqlStore.open(url)
    assert await store.lease("other", 60.0) is None, "the sweep and every lease end what is over"
    assert await store.heartbeat(lease.rollout_id, lease.attempt, 60.0)
    await store.close()


async def test_a_lease_that_is_given_in_the_commit_of_a_sweep_is_not_forgotten(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a", max_attempts=1)])
    await store.close()
    store = await SqlStore.open(url)
    is_busy, is_grouped = threading.Event(), threading.Event()

    def wait_for_group(_: Transaction) -> None:
        is_busy.set()
        is_grouped.wait()

    assert store._writer is not None
    store._writer.submit(wait_for_group)
    is_busy.wait()
    leasing = asyncio.create_task(leased(store, lease_s=0.05))
    await asyncio.sleep(0)  # the sweep's first step, then the lease's
    is_grouped.set()
    await leasing
    assert await store.wait_finished(["a"], PATIENCE_S) == ("a",)
    await store.close()


_STOPPED = """
    import asyncio, sys
    from lightningrl_server.store import SqlStore
    from lightningrl_testing.store_conformance import leased, make_spec

    async def main():
        store = await SqlStore.open(sys.argv[1])
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store, lease_s=3.0)
        print("leased", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        print(await store.lease("other", 60.0) is None and await store.heartbeat("a", lease.attempt, 60.0), flush=True)
        await store.close()

    asyncio.run(main())
"""


@pytest.mark.long
def test_a_server_that_stood_still_ends_no_lease(tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(textwrap.dedent(_STOPPED))
    command = [sys.executable, str(script), f"sqlite:///{tmp_path}/store.db"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "leased\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(6.0)
    process.stdin.write("go on\n")
    process.stdin.flush()
    os.kill(process.pid, signal.SIGCONT)
    assert process.stdout.readline() == "True\n"
    process.stdin.close()
    assert process.wait() == 0
    process.stdout.close()
