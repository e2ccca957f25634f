"""Warm workers on this machine: every launcher's semantics, and what only local workers are asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError
from lightningrl.runtime.pool import WorkerPool
from lightningrl.runtime.process import LocalLauncher
from lightningrl.testing.launcher_conformance import AGENT_CODE, LauncherConformance
from lightningrl.testing.scripted_server import ScriptedServer

pytestmark = pytest.mark.slow

SDK_AGENT = """
import openai
client = openai.OpenAI(api_key="sk-the-users-own", max_retries=0)

def ask():
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}]).choices[0].message.content

def act(task):
    if task["do"] == "ask": return ask()
    try: ask()
    except openai.APIError: raise RuntimeError("my step failed")
"""


class TestLocalLauncher(LauncherConformance):
    def create_launcher(self) -> LocalLauncher:
        return LocalLauncher()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(lambda body: {"content": "hello"}) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENT_CODE)
    (tmp_path / "sdk_agents.py").write_text(SDK_AGENT)
    return tmp_path


def make_pool(server: ScriptedServer, folder: Path, agent: str = "agents.py:act", **options: Any) -> WorkerPool:
    return WorkerPool(server.url, server.run_key, agent, **{"workers": 1, "base_dir": folder, "log_folder": folder / "logs", **options})


async def run(
    server: ScriptedServer, folder: Path, *tasks: Any, agent: str = "agents.py:act", timeout_s: float = 900, **options: Any
) -> list[Any]:
    """Results of the tasks, in order."""
    for number, task in enumerate(tasks):
        server.add_rollout(f"r{number}", task, timeout_s=timeout_s)
    async with make_pool(server, folder, agent, **options):
        await server.wait_finished()
    return [server.result(f"r{number}") for number in range(len(tasks))]


@pytest.mark.parametrize("agent", ["agents.py:act", "sdk_agents.py:act"])
async def test_failures_of_the_gateway_are_told_from_the_agents(server: ScriptedServer, folder: Path, agent: str) -> None:
    failures = {
        "context_overflow": (400, "context_length_exceeded", "the prompt has 9000 tokens; the context has 4096"),
        "infrastructure_error": (503, "engine_unavailable", "no engine"),
        "agent_error": (400, "bad_request", "no messages"),
    }
    answers = iter([failure for failure in failures.values() for _ in range(2)])
    server.answer = lambda body: next(answers)
    results = await run(server, folder, *[{"do": "ask"}, {"do": "wrapped"}] * 3, agent=agent)
    assert [result["outcome"] for result in results] == [outcome for outcome in failures for _ in range(2)]


async def test_one_event_loop_per_attempt_works_with_import_time_clients(server: ScriptedServer, folder: Path) -> None:
    results = await run(server, folder, *["hi"] * 10, agent="agents.py:ask_in_new_loop")
    assert [result["output"] for result in results] == ["hello"] * 10


@pytest.mark.parametrize(
    ("source", "agent", "sentence"),
    [
        ("import nowhere_to_be_found", "agent.py:answer", "ModuleNotFoundError"),
        ("1/0", "agent.py:answer", "ZeroDivisionError"),
        ("def reply(x): ...", "agent.py:answer", "has no 'answer'; it has: reply"),
        ("answer = 42", "agent.py:answer", "is a int, not callable"),
        ("class answer: ...", "agent.py:answer", "is a class"),
        ("def answer(x): yield x", "agent.py:answer", "is a generator"),
        ("import os; os._exit(9)", "agent.py:answer", "exited with status 9 while it imported the agent"),
        ("", "elsewhere.py:answer", "no file"),
        ("", "agent.py", "names no callable"),
    ],
)
async def test_an_agent_that_cannot_be_loaded_fails_the_pool_with_a_sentence(
    server: ScriptedServer, tmp_path: Path, source: str, agent: str, sentence: str
) -> None:
    (tmp_path / "agent.py").write_text(source)
    with pytest.raises(ConfigError, match=sentence):
        async with make_pool(server, tmp_path, agent, workers=2):
            pass


def test_an_agent_that_no_other_process_finds_is_refused() -> None:
    with pytest.raises(ConfigError, match="define it at the top of a module"):
        WorkerPool("http://127.0.0.1:1", "key", lambda task: task)


def test_a_pool_of_no_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="workers = 0"):
        WorkerPool("http://127.0.0.1:1", "key", "agent.py:answer", workers=0)


def test_workers_die_with_a_killed_pool(server: ScriptedServer, folder: Path) -> None:
    script = folder / "run.py"
    script.write_text(
        "import asyncio, sys\nfrom lightningrl.runtime.pool import WorkerPool\n"
        f"async def main():\n    pool = WorkerPool({server.url!r}, 'run-key', 'agents.py:act', workers=1, base_dir={str(folder)!r})\n"
        "    async with pool:\n"
        "        print('up', flush=True)\n        await pool.wait()\nasyncio.run(main())\n"
    )
    server.add_rollout("r0", {"do": "pid"})
    server.add_rollout("r1", {"do": "hang"})
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    while server.result("r0") is None or not server.attempts("r1"):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    worker = (server.result("r0") or {})["output"]
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(worker):
        assert time.monotonic() < deadline, "the worker outlived its pool"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
