"""The start of a server: how long it is waited for, while the process lives and works, and what else it may print."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from sizes import PATIENCE_S

from lightningrl.dialects import DIALECTS, Dialect
from lightningrl.errors import ServerError
from lightningrl_server.launcher import ServerProcess, StartWatch, StartWords
from lightningrl_server.settings import ServerSettings


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


def test_a_server_that_starts_slowly_is_said_to_wait_for_what_it_waits_for() -> None:
    words = StartWords()
    assert words.explain(30, 25.0, 9.0) == "it loads the policies' tokenizers (25 s of CPU in the last 30 s)"
    assert (
        words.explain(60, 27.0, 9.0)
        == "this machine is busy (9 processes want each core) and gave it 2 s of CPU in the last 30 s"
    )
    assert words.explain(90, 27.0, 0.3).endswith(
        "tokenizers, and waits for a disk or a network (0 s of CPU in the last 30 s)"
    )
    assert words.explain(120, None, None) == "it loads the policies' tokenizers"


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


LOUD = """
from lightningrl_server.gateway.dialects.chat import ChatFormat

print("imported")

class Format(ChatFormat):
    def write_error(self, refusal):
        print("x" * 1_000_000, "refused")
        return super().write_error(refusal)
"""


@pytest.mark.usefixtures("fresh_processes")
async def test_a_dialect_that_prints_when_imported_and_with_each_call_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loud.py").write_text(LOUD, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    dialect = Dialect(name="loud", format="loud:Format", endpoints=("loud",))
    settings = ServerSettings(
        store_url=f"sqlite:///{tmp_path}/store.db", run_key="the-run-key", dialects=(*DIALECTS, dialect)
    )
    async with (
        ServerProcess(settings, log_path=tmp_path / "server.log") as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        refused = await client.post("/v1/loud", json={})
        healthy = await client.get("/health")
    assert (refused.status_code, healthy.status_code) == (403, 200), refused.text
    printed = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert "imported" in printed and "xx refused" in printed


def test_a_server_whose_trainer_is_killed_while_it_starts_never_opens_the_store(tmp_path: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import ServerSettings
settings = ServerSettings(store_url="sqlite:///{tmp_path}/store.sqlite", run_key="the-run-key")
asyncio.run(ServerProcess(settings, log_path=Path("{tmp_path}/server.log")).start())
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    children, give_up = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children"), time.monotonic() + PATIENCE_S
    while not (server := children.read_text().strip()) and time.monotonic() < give_up:
        time.sleep(0.001)
    time.sleep(0.1)  # the trainer has told it what it is to serve; it imports that for half a second
    trainer.kill()
    trainer.wait()
    assert server, "the trainer started none"
    while Path(f"/proc/{server}").exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not Path(f"/proc/{server}").exists()
    assert not (tmp_path / "store.sqlite").exists(), "it is in nobody's way"
