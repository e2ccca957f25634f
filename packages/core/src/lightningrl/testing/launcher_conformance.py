"""What a worker launcher is: subclass `LauncherConformance`, say how to make yours, and run it with pytest.

    class TestMyLauncher(LauncherConformance):
        def create_launcher(self): return MyLauncher()

Whatever becomes of an agent must come out the same wherever its worker runs: outcomes, sentences, kills, replacements, the end of a pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl.runtime.launcher import WorkerLauncher, WorkerPoolError
from lightningrl.runtime.pool import WorkerPool
from lightningrl.testing._pytest import pytest
from lightningrl.testing.scripted_server import ScriptedServer

__all__ = ["AGENT_CODE", "LauncherConformance"]

AGENT_CODE = """
import asyncio, os, signal, sys, threading, time
import httpx

URL = "https://api.openai.com/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
client = httpx.Client(timeout=30)
aclient = httpx.AsyncClient(timeout=30)

def ask():
    return client.post(URL, json=BODY).raise_for_status().json()["choices"][0]["message"]["content"]

async def ask_async(task=None):
    return (await aclient.post(URL, json=BODY)).raise_for_status().json()["choices"][0]["message"]["content"]

def ask_in_new_loop(text):
    return asyncio.run(ask_async())

def act(task):
    what = task["do"]
    if what == "ask": return ask()
    if what == "print": print("to the log"); return sys.stdin.read() or "read nothing"
    if what == "raise": raise ValueError("no such table: singer")
    if what == "exit": sys.exit(7)
    if what == "nothing": return None
    if what == "object": return {"when": object()}
    if what == "nan": return {"x": float("nan")}
    if what == "hang": time.sleep(60)
    if what == "sleep": time.sleep(task["s"]); return "slept"
    if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "environment": return [os.environ["OPENAI_BASE_URL"], os.environ["ANTHROPIC_BASE_URL"], os.environ["OMP_NUM_THREADS"]]
    if what == "pid": time.sleep(0.05); return os.getpid()
    if what == "unreachable": return httpx.post("http://127.0.0.1:9/v1/nothing").status_code
    if what == "wrapped":
        try: ask()
        except httpx.HTTPError: raise RuntimeError("my step failed")
    if what == "thread":
        answers = []
        thread = threading.Thread(target=lambda: answers.append(ask()))
        thread.start(); thread.join()
        return answers[0]

async def act_async(task):
    if task["do"] == "hang": await asyncio.sleep(60)
    if task["do"] == "loop": return id(asyncio.get_running_loop())
    if task["do"] == "pid": return os.getpid()
    return await ask_async()
"""
"""What the agents of these tests do, by the task's `do`; written to `agents.py`."""


class LauncherConformance:
    """The pool's semantics, with a launcher of yours."""

    def create_launcher(self) -> WorkerLauncher:
        """A new launcher."""
        raise NotImplementedError

    @pytest.fixture
    def server(self) -> Iterator[ScriptedServer]:
        with ScriptedServer(lambda body: {"content": "hello"}) as server:
            yield server

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "agents.py").write_text(AGENT_CODE)
        return tmp_path

    def pool(self, server: ScriptedServer, folder: Path, agent: str = "agents.py:act", **options: Any) -> WorkerPool:
        """A pool of one worker, if `options` do not say otherwise."""
        options = {"workers": 1, "base_dir": folder, "log_folder": folder / "logs", "launcher": self.create_launcher(), **options}
        return WorkerPool(server.url, server.run_key, agent, **options)

    async def run(
        self, server: ScriptedServer, folder: Path, *tasks: Any, agent: str = "agents.py:act", timeout_s: float = 30, **options: Any
    ) -> list[Any]:
        """Results of the tasks, in order."""
        for number, task in enumerate(tasks):
            server.add_rollout(f"r{number}", task, timeout_s=timeout_s if task == {"do": "hang"} else 900)
        async with self.pool(server, folder, agent, **options):
            await server.wait_finished()
        return [server.result(f"r{number}") for number in range(len(tasks))]

    async def test_a_worker_runs_attempt_after_attempt_in_one_process(self, server: ScriptedServer, folder: Path) -> None:
        results = await self.run(server, folder, *[{"do": "pid"}] * 3, {"do": "ask"}, {"do": "thread"}, {"do": "print"})
        assert [result["outcome"] for result in results] == ["succeeded"] * 6
        assert len({result["output"] for result in results[:3]}) == 1
        assert [result["output"] for result in results[3:]] == ["hello", "hello", "read nothing"]
        assert [call.rollout_id for call in server.calls] == ["r3", "r4"]
        assert "to the log" in (folder / "logs" / "worker-0.log").read_text()

    async def test_failures_of_the_agent_are_typed_and_say_why(self, server: ScriptedServer, folder: Path) -> None:
        tasks = [{"do": what} for what in ("raise", "exit", "nothing", "object", "nan", "unreachable", "ask")]
        results = await self.run(server, folder, *tasks)
        assert [result["outcome"] for result in results] == ["agent_error"] * 6 + ["succeeded"]
        errors = [result["error"] for result in results[:6]]
        assert errors[0].startswith("ValueError: no such table: singer\n") and "agents.py" in errors[0]
        assert errors[1].startswith("SystemExit: 7")
        assert errors[2] == "the agent 'agents.py:act' returned nothing; return its answer, which the reward looks at"
        assert "returned a dict that is not JSON (Object of type object is not JSON serializable)" in errors[3]
        assert "not JSON (Out of range float values" in errors[4]
        assert "Connection refused" in errors[5]

    async def test_a_hanging_agent_is_killed_reported_and_replaced(self, server: ScriptedServer, folder: Path) -> None:
        hang, pid = await self.run(server, folder, {"do": "hang"}, {"do": "pid"}, timeout_s=1)
        assert hang["outcome"] == "timeout"
        assert hang["duration_s"] > 0.9
        assert pid["outcome"] == "succeeded"

    async def test_a_hanging_async_agent_is_cancelled_without_losing_its_worker(self, server: ScriptedServer, folder: Path) -> None:
        tasks = [{"do": what} for what in ("pid", "hang", "pid", "loop", "loop", "ask")]
        results = await self.run(server, folder, *tasks, agent="agents.py:act_async", timeout_s=1)
        assert [result["outcome"] for result in results] == ["succeeded", "timeout", *["succeeded"] * 4]
        assert results[0]["output"] == results[2]["output"]
        assert results[3]["output"] == results[4]["output"]
        assert server.calls[0].headers["connection"] == "keep-alive"

    async def test_a_dead_worker_is_reported_and_replaced(self, server: ScriptedServer, folder: Path) -> None:
        dead, alive = await self.run(server, folder, {"do": "segfault"}, {"do": "ask"})
        assert dead["outcome"] == "infrastructure_error"
        assert dead["error"].startswith("the worker process died with SIGSEGV while it ran the agent; see ")
        assert alive["outcome"] == "succeeded"

    async def test_workers_that_keep_dying_end_the_pool(self, server: ScriptedServer, folder: Path) -> None:
        for number in range(5):
            server.add_rollout(f"r{number}", {"do": "segfault"})
        pool = self.pool(server, folder)
        await pool.start()
        with pytest.raises(WorkerPoolError, match="workers died 5 times"):
            await asyncio.wait_for(pool.wait(), 900)
        await pool.stop()

    async def test_a_cancelled_rollout_stops_its_agent(self, server: ScriptedServer, folder: Path) -> None:
        for agent in ("agents.py:act", "agents.py:act_async"):
            server.add_rollout(agent, {"do": "hang"})
            async with self.pool(server, folder, agent, lease_s=3.0):
                while not server.heartbeats(agent):  # noqa: ASYNC110  another thread's state
                    await asyncio.sleep(0.01)
                server.cancel(agent)
                server.add_rollout(f"{agent}-next", {"do": "pid"})  # which the worker runs once it has stopped the first
                await server.wait_finished(agent, f"{agent}-next")
            result = server.result(agent)
            assert result is not None
            assert result["outcome"] == "cancelled"

    async def test_heartbeats_go_on_while_a_sync_agent_runs(self, server: ScriptedServer, folder: Path) -> None:
        await self.run(server, folder, {"do": "sleep", "s": 6.0}, lease_s=3.0)
        assert server.heartbeats("r0") >= 3

    async def test_the_environment_points_at_the_rollout(
        self, server: ScriptedServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (result,) = await self.run(server, folder, {"do": "environment"}, environment={"OMP_NUM_THREADS": "3"})
        base = f"{server.url}/rollouts/r0/attempts/1"
        assert result["output"] == [f"{base}/v1", base, "3"]

    @pytest.mark.parametrize("agent", ["agents.py:act", "agents.py:act_async"])
    async def test_concurrent_attempts_in_one_worker(self, server: ScriptedServer, folder: Path, agent: str) -> None:
        tasks = [{"do": "ask"}] * 12
        results = await self.run(server, folder, *tasks, agent=agent, concurrency=4)
        assert [result["output"] for result in results] == ["hello"] * 12
        assert sorted(call.rollout_id or "" for call in server.calls) == sorted(f"r{number}" for number in range(12))

    async def test_a_lost_server_ends_the_pool(self, server: ScriptedServer, folder: Path) -> None:
        pool = self.pool(server, folder, patience_s=0.5, lease_wait_s=0.2)
        await pool.start()
        server.__exit__(None, None, None)
        with pytest.raises(WorkerPoolError, match="has lost the server"):
            await asyncio.wait_for(pool.wait(), 900)
        await pool.stop()

    async def test_stopping_lets_a_running_attempt_finish_and_idle_ones_leave_at_once(self, server: ScriptedServer, folder: Path) -> None:
        pool = self.pool(server, folder, workers=2, lease_wait_s=3600)
        await pool.start()
        await pool.wait_ready()
        server.add_rollout("r0", {"do": "sleep", "s": 0.7})
        while not pool.status.busy:  # noqa: ASYNC110  a snapshot, not an event
            await asyncio.sleep(0.01)
        await pool.stop(grace_s=1e6)
        result = server.result("r0")
        assert result is not None
        assert result["output"] == "slept"

    async def test_attempts_that_outlast_the_grace_are_cancelled(self, server: ScriptedServer, folder: Path) -> None:
        server.add_rollout("r0", {"do": "hang"})
        pool = self.pool(server, folder)
        await pool.start()
        while not pool.status.busy:  # noqa: ASYNC110  a snapshot, not an event
            await asyncio.sleep(0.01)
        await pool.stop(grace_s=0.1)
        result = server.result("r0")
        assert result is not None
        assert result["outcome"] == "cancelled"

    async def test_a_worker_killed_while_it_imports_the_agent_again_is_replaced(self, server: ScriptedServer, tmp_path: Path) -> None:
        (tmp_path / "agent.py").write_text(
            "import os, pathlib\nfile = pathlib.Path(__file__).with_name('lives')\nlife = len(file.read_text()) if file.exists() else 0\n"
            "file.write_text('x' * (life + 1))\nif life == 1: os.kill(os.getpid(), 9)\n"
            "def answer(task): return life if task == 'live' else os.kill(os.getpid(), 9)\n"
        )
        results = await self.run(server, tmp_path, "die", "live", agent="agent.py:answer")
        assert (results[0]["outcome"], results[1]["output"]) == ("infrastructure_error", 2)

    @pytest.mark.parametrize(
        ("source", "sentence"),
        [("import nowhere_to_be_found", "ModuleNotFoundError"), ("import os; os._exit(9)", "exited with status 9 while")],
    )
    async def test_an_agent_that_cannot_be_imported_fails_the_pool_with_a_sentence(
        self, server: ScriptedServer, tmp_path: Path, source: str, sentence: str
    ) -> None:
        (tmp_path / "agent.py").write_text(source)
        with pytest.raises(ConfigError, match=sentence):
            async with self.pool(server, tmp_path, "agent.py:answer"):
                pass
