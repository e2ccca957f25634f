"""What a worker leaves behind when it ends, and what an agent may do to the line between the worker and its pool."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import all_ended, is_alive
from sizes import PATIENCE_S

from lightningrl.processes import open_private
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_client.runtime.worker_process import bound_log
from lightningrl_testing.scripted_server import ScriptedServer

pytestmark = pytest.mark.slow

AGENTS = """
import asyncio, ctypes, json, multiprocessing, os, pathlib, stat, subprocess, time
from concurrent.futures import ProcessPoolExecutor
HERE = pathlib.Path(__file__).parent
kept = []

def start(task):
    kept.append(ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")))
    program = subprocess.Popen(["sleep", "100000"])
    (HERE / "left").write_text(f"{kept[0].submit(os.getpid).result()} {program.pid} {os.getpid()}")
    return "started"

def crash(task):
    program = subprocess.Popen(["sleep", "100000"])
    if (child := os.fork()) == 0:
        time.sleep(100_000)
    (HERE / "left").write_text(f"{program.pid} {child}")
    os._exit(9)

def read_nothing(task):
    if task == "fine":
        return task
    ctypes.string_at(0)

def leave(task):
    if task == "fine":
        return task
    program = subprocess.Popen(["sleep", "100000"], start_new_session=True, env={"PATH": os.environ["PATH"]})
    (HERE / "left").write_text(str(program.pid))
    os._exit(9)

def escape(task):
    if (child := ctypes.PyDLL(None).fork()) == 0:  # none that Python knows of, with its lock held over it
        os.setsid()
        (HERE / "left").write_text(str(os.getpid()))
        time.sleep(100_000)
    while not (HERE / "left").exists() or not (HERE / "left").read_text():
        time.sleep(0.01)
    os._exit(9)

def meddle(task):
    forged = json.dumps({"kind": "failed", "error": "forged"}).encode()
    lines = {"write": b"x" * 30_000 + b"\\n" + forged + b"\\n\\xff\\n", "long": b"x" * 2_000_000 + b"\\n"}
    for name in os.listdir("/proc/self/fd") if task in lines else ():
        try:
            if stat.S_ISFIFO(os.fstat(int(name)).st_mode): open(f"/proc/self/fd/{name}", "wb").write(lines[task])
        except OSError: pass
    if task == "fork":
        os.fork()
    return os.getpid()

async def interrupt(task):
    if task == "interrupt": raise KeyboardInterrupt
    if task == "exit": raise SystemExit(3)
    return os.getpid()
"""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(lambda body: {"content": "hello"}) as server:
        yield server


def pool_of_one(server: ScriptedServer, folder: Path, agent: str, **options: Any) -> WorkerPool:
    (folder / "agents.py").write_text(AGENTS)
    return WorkerPool(
        server.url,
        server.run_key,
        f"agents.py:{agent}",
        workers=1,
        base_dir=folder,
        log_folder=folder / "logs",
        **options,
    )


async def run(server: ScriptedServer, folder: Path, agent: str, *tasks: str, **options: Any) -> list[dict[str, Any]]:
    """Results of the tasks, in order; the pool has stopped."""
    for number, task in enumerate(tasks):
        server.add_rollout(f"r{number}", task, timeout_s=PATIENCE_S)
    async with pool_of_one(server, folder, agent, **options):
        await server.wait_finished(timeout_s=PATIENCE_S)
    results = [server.result(f"r{number}") for number in range(len(tasks))]
    return [result for result in results if result is not None]


async def test_process_pools_and_programs_of_an_agent_end_with_its_worker(
    server: ScriptedServer, tmp_path: Path
) -> None:
    async with all_ended(tmp_path / "left"):
        (result,) = await run(server, tmp_path, "start", "go")
        assert result["outcome"] == "succeeded", result


async def test_what_a_crashed_worker_has_started_does_not_survive_it(server: ScriptedServer, tmp_path: Path) -> None:
    async with all_ended(tmp_path / "left"):
        (result,) = await run(server, tmp_path, "crash", "go")
        assert result["outcome"] == "infrastructure_error"
        assert result["error"].startswith("the worker process exited with status 9 while it ran the agent")


async def test_a_worker_that_a_segmentation_fault_ends_leaves_its_stack_in_the_log(
    server: ScriptedServer, tmp_path: Path
) -> None:
    results = await run(server, tmp_path, "read_nothing", "go", "fine")
    log = tmp_path / "logs" / "worker-0.log"
    assert [result["outcome"] for result in results] == ["infrastructure_error", "succeeded"]
    assert results[0]["error"] == f"the worker process died with SIGSEGV while it ran the agent; see {str(log)!r}"
    stack = log.read_text().partition("Fatal Python error: Segmentation fault")[2]
    assert "agents.py" in stack and "in read_nothing" in stack


async def test_what_nobody_finds_after_a_crashed_worker_does_not_keep_its_slot(
    server: ScriptedServer, tmp_path: Path
) -> None:
    results = await run(server, tmp_path, "leave", "go", "fine")
    left = int((tmp_path / "left").read_text())
    try:
        assert is_alive(left), "what should hold the slot was found"
        assert [result["outcome"] for result in results] == ["infrastructure_error", "succeeded"]
    finally:
        os.kill(left, signal.SIGKILL)


@pytest.mark.usefixtures("fresh_processes")  # a forked worker has another's environment, where the mark is looked for
@pytest.mark.skipif(sys.platform != "linux", reason="whoever has left the session is found on Linux alone")
async def test_a_process_that_left_its_workers_session_ends_with_it(server: ScriptedServer, tmp_path: Path) -> None:
    async with all_ended(tmp_path / "left"):
        (result,) = await run(server, tmp_path, "escape", "go")
        assert result["outcome"] == "infrastructure_error"


async def test_an_agent_that_writes_into_the_workers_pipe_or_forks_changes_nothing(
    server: ScriptedServer, tmp_path: Path
) -> None:
    results = await run(server, tmp_path, "meddle", "write", "long", "fork", "fine", "fine")
    assert [result["outcome"] for result in results] == ["succeeded"] * 5
    assert len({result["output"] for result in results}) == 1


async def test_an_async_agent_that_raises_what_ends_a_loop_ends_only_itself(
    server: ScriptedServer, tmp_path: Path
) -> None:
    results = await run(server, tmp_path, "interrupt", "fine", "interrupt", "exit", "fine", concurrency=2)
    assert [result["outcome"] for result in results] == ["succeeded", "agent_error", "agent_error", "succeeded"]
    assert results[0]["output"] == results[3]["output"]


def test_lines_of_a_workers_log_say_when_and_how_grave_and_the_agents_root_logger_gets_none() -> None:
    code = "import logging; from lightningrl_client.runtime import worker; worker.log_to_stderr()"
    code += "; logging.basicConfig(format='agent %(message)s'); worker.logger.info('stays'); logging.getLogger('lightningrl.masking').info('stays, too')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split(" ", 2)[2] for line in ran.stderr.splitlines()]
    assert lines == ["lightningrl_client.runtime.worker INFO: stays", "lightningrl.masking INFO: stays, too"]


def test_a_log_is_private_and_its_end_is_kept_when_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker-0.log"
    with open_private(path) as log:
        log.write(b"a" * 500 + b"b" * 500)
        bound_log(log, most_bytes=1000)
        assert path.stat().st_size == 1000
        log.write(b"c")
        bound_log(log, most_bytes=1000)
        log.write(b"d")
        assert (
            path.read_bytes() == b"... this log was cut at 1001 bytes; what follows is its end\n" + b"b" * 499 + b"cd"
        )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
