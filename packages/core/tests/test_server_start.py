"""How long the start of a server is waited for: while the process lives and works, not for a fixed time."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lightningrl.errors import ServerError
from lightningrl.server.launcher import ServerProcess, StartWatch
from lightningrl.server.settings import ServerSettings


def test_a_server_that_works_is_waited_for_far_beyond_a_minute() -> None:
    watch = StartWatch(most_s=900, stall_s=60)
    assert [watch.give_up(elapsed_s, elapsed_s / 50) for elapsed_s in range(0, 900, 10)] == [None] * 90
    assert watch.give_up(900, 18.0) == "was not ready after 900 s"


def test_a_server_that_does_nothing_is_given_up() -> None:
    watch = StartWatch(most_s=900, stall_s=60)
    assert watch.give_up(10, 5.0) is None
    assert watch.give_up(69, 5.1) is None
    assert watch.give_up(70, 5.1) == "was not ready after 70 s and has done nothing for 60 s"


def test_where_nobody_knows_what_a_process_uses_the_longest_time_counts() -> None:
    watch = StartWatch(most_s=900, stall_s=60)
    assert watch.give_up(899, None) is None
    assert watch.give_up(900, None) is not None


async def test_a_stuck_server_is_told_of_with_its_log_and_is_gone(tmp_path: Path) -> None:
    settings = ServerSettings(store_url=f"sqlite:///{tmp_path}/store.db", run_key="the-run-key")
    server = ServerProcess(settings, log_path=tmp_path / "server.log", stall_s=1.5)
    starting = asyncio.create_task(server.start())
    while server.pid is None:
        await asyncio.sleep(0.001)
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(ServerError, match=r"has done nothing for \d+ s; see '.*server.log'"):
        await starting
    assert not server.is_running
