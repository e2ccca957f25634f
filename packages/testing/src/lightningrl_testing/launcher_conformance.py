"""The conformance suite of worker launchers: subclass `LauncherConformance`, and say how to make yours.

    class TestMyLauncher(LauncherConformance):
        def create_launcher(self): return MyLauncher()

Workers run where it says, with what they are given; what fails there is said here; nothing is left at its stop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl.types import RolloutState
from lightningrl_client.runtime.launcher import WorkerLauncher, WorkerPoolError
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_testing._pytest import call_factories, pytest
from lightningrl_testing.scripted_server import ScriptedServer

__all__ = ["AGENT_CODE", "LauncherConformance"]

AGENT_CODE = """
import os, signal, time
import httpx

def ask():
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post("https://api.openai.com/v1/chat/completions", json=body, timeout=None)
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]

def act(task):
    what = task["do"]
    if what == "ask": return ask()
    if what == "hang": time.sleep(3600)
    if what == "sleep": time.sleep(task["s"]); return "slept"
    if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "variable": print("to the log", flush=True); return os.environ["MINE"]
    if what == "pid": return os.getpid()
"""
"""Agents of these tests, by the task's `do`; written to `agents.py`."""


class LauncherConformance:
    """The specification of a launcher whose workers run on this machine and share its files, as tests."""

    def create_launcher(self) -> WorkerLauncher:
        """Make a new launcher."""
        raise NotImplementedError

    @pytest.fixture
    def server(self) -> Iterator[ScriptedServer]:
        with ScriptedServer(lambda body: {"content": "hello"}) as server:
            yield server

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "agents.py").write_text(AGENT_CODE)
        return tmp_path

    def pool(self, server: ScriptedServer, folder: Path, **options: Any) -> WorkerPool:
        """Make a pool of one worker, if `options` do not say otherwise."""
        own = {"workers": 1, "base_dir": folder, "log_folder": folder / "logs", "launcher": self.create_launcher()}
        return WorkerPool(server.url, server.run_key, "agents.py:act", **{**own, **options})

    def test_installed_factories_make_it(self) -> None:
        call_factories("lightningrl_worker_launchers", self.create_launcher())

    async def test_workers_run_the_agent_with_what_they_are_given(self, server: ScriptedServer, folder: Path) -> None:
        for number, what in enumerate(["ask", "variable"]):
            server.add_rollout(f"r{number}", {"do": what})
        async with self.pool(server, folder, workers=2, environment={"MINE": "3"}) as pool:
            await pool.wait_ready()
            await server.wait_finished()
            assert pool.describe().startswith("2 workers ")
        assert [(server.result(f"r{number}") or {})["output"] for number in range(2)] == ["hello", "3"]
        assert [call.rollout_id for call in server.calls] == ["r0"]
        assert any("to the log" in log.read_text() for log in (folder / "logs").rglob("worker-*.log"))

    async def test_workers_that_hang_or_die_are_reported_and_replaced(
        self, server: ScriptedServer, folder: Path
    ) -> None:
        server.add_rollout("r0", {"do": "hang"}, timeout_s=1.0)
        server.add_rollout("r1", {"do": "segfault"})
        server.add_rollout("r2", {"do": "ask"})
        async with self.pool(server, folder):
            await server.wait_finished()
        results = [server.result(f"r{number}") or {} for number in range(3)]
        assert [result["outcome"] for result in results] == ["timeout", "infrastructure_error", "succeeded"]
        assert results[1]["error"].startswith("the worker process died with SIGSEGV while it ran the agent; see ")

    async def test_workers_that_keep_dying_end_the_pool(self, server: ScriptedServer, folder: Path) -> None:
        for number in range(5):
            server.add_rollout(f"r{number}", {"do": "segfault"})
        pool = self.pool(server, folder)
        await pool.start()
        with pytest.raises(WorkerPoolError, match="workers died 5 times"):
            await asyncio.wait_for(pool.wait(), 900)
        await pool.stop()

    @pytest.mark.parametrize(
        ("source", "sentence"),
        [
            ("import nowhere_to_be_found", "ModuleNotFoundError"),
            ("import os; os._exit(9)", "exited with status 9 while"),
        ],
    )
    async def test_an_agent_that_cannot_be_imported_fails_the_pool_with_a_sentence(
        self, server: ScriptedServer, tmp_path: Path, source: str, sentence: str
    ) -> None:
        (tmp_path / "agents.py").write_text(source)
        with pytest.raises(ConfigError, match=sentence):
            async with self.pool(server, tmp_path):
                pass

    async def test_stopping_lets_what_runs_finish_and_leaves_no_process(
        self, server: ScriptedServer, folder: Path
    ) -> None:
        server.add_rollout("r0", {"do": "pid"})
        pool = self.pool(server, folder, workers=2, lease_wait_s=3600)
        await pool.start()
        await pool.wait_ready()
        await server.wait_finished()
        server.add_rollout("r1", {"do": "sleep", "s": 0.7})
        while not server.open:  # noqa: ASYNC110  another thread's state
            await asyncio.sleep(0.01)
        await pool.stop(grace_s=1e6)
        assert (server.result("r1") or {})["output"] == "slept"
        with pytest.raises(ProcessLookupError):
            os.kill((server.result("r0") or {})["output"], 0)

    async def test_what_outlasts_the_grace_is_given_back(self, server: ScriptedServer, folder: Path) -> None:
        server.add_rollout("r0", {"do": "hang"})
        pool = self.pool(server, folder)
        await pool.start()
        while not server.open:  # noqa: ASYNC110  another thread's state
            await asyncio.sleep(0.01)
        await pool.stop(grace_s=0.1)
        assert (server.result("r0") or {})["error"] == "the worker pool was stopped"
        assert server.state("r0") is RolloutState.QUEUED
