"""An agent that is a program: what it is given, what its answer is, and that it ends with its rollout."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import all_ended, written

from lightningrl import command_agent
from lightningrl.errors import ConfigError
from lightningrl.runtime.command import CommandFailed
from lightningrl.runtime.pool import WorkerPool
from lightningrl.testing.scripted_server import ScriptedServer

PROGRAM = """
import json, os, pathlib, subprocess, sys, time, urllib.request

task = json.loads(sys.stdin.readline())
print("a line that is no answer")

def post(path, body):
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), key)
    return json.load(urllib.request.urlopen(request))

def ask(text):
    return post("/chat/completions", {"model": "m", "messages": [{"role": "user", "content": text}]})["choices"][0]["message"]["content"]

match task["do"]:
    case "ask":
        print(json.dumps({"said": ask("RID=" + task["rid"]), "base": os.environ["ANTHROPIC_BASE_URL"]}))
    case "fail":
        print("half an answer")
        sys.exit("no such table: pilots")
    case "hang":
        child = subprocess.Popen(["sleep", "100000"])
        pathlib.Path(task["pids"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(100_000)
"""
AGENT = f"""
from lightningrl import command_agent

answer = command_agent({sys.executable!r}, "program.py")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 8])
async def test_a_program_runs_as_an_agent(folder: Path, concurrency: int) -> None:
    with ScriptedServer(lambda body: {"content": body["messages"][0]["content"]}) as server:
        for number in range(8):
            server.add_rollout(f"r{number}", {"do": "ask", "rid": f"r{number}"})
        server.add_rollout("fails", {"do": "fail"})
        server.add_rollout("hangs", {"do": "hang", "pids": str(folder / "timeout.pids")}, timeout_s=5.0)
        server.add_rollout("cancelled", {"do": "hang", "pids": str(folder / "cancel.pids")})
        pool = WorkerPool(
            server.url,
            server.run_key,
            "agent.py:answer",
            workers=1,
            concurrency=concurrency,
            base_dir=folder,
            log_folder=folder,
            lease_s=6.0,
        )
        async with pool, all_ended(folder / "timeout.pids", folder / "cancel.pids"):
            await written(folder / "cancel.pids", words=2)
            server.cancel("cancelled")
            await server.wait_finished()
        results = {rid: server.result(rid) or {} for rid in server.rollout_ids}
    for number in range(8):
        output = results[f"r{number}"]["output"]
        assert output["said"] == f"RID=r{number}"
        assert f"/rollouts/r{number}/attempts/" in output["base"] and not output["base"].endswith("/v1")
    assert results["fails"]["outcome"] == "agent_error"
    assert "ended with status 1\nno such table: pilots" in results["fails"]["error"]
    assert results["hangs"]["outcome"] == "timeout"
    assert results["cancelled"]["outcome"] == "cancelled"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_program_and_what_it_started_end_with_the_worker(folder: Path, how: str) -> None:
    with ScriptedServer(lambda body: {"content": "hi"}) as server:
        server.add_rollout("hangs", {"do": "hang", "pids": str(folder / "pids")})
        pool = WorkerPool(server.url, server.run_key, "agent.py:answer", workers=1, base_dir=folder, log_folder=folder)
        await pool.start()
        async with all_ended(folder / "pids"):
            await written(folder / "pids", words=2)
            if how == "killed":
                program = int((folder / "pids").read_text().split()[0])
                os.kill(os.getsid(program), signal.SIGKILL)  # the worker leads the session
            else:
                await pool.stop(grace_s=0.0)
        await pool.stop(grace_s=0.0)


def python(code: str) -> Any:
    return asyncio.run(command_agent(sys.executable, "-c", code)({"question": "ü?"}))


@pytest.mark.parametrize(
    ("printed", "output"),
    [
        ("SELECT 1", "SELECT 1"),
        ('{"query": "SELECT 1"}', {"query": "SELECT 1"}),
        ('"two\\\\nlines"', "two\nlines"),
        ("[1, 2]", [1, 2]),
        ("42", "42"),
        ("[half", "[half"),
    ],
)
def test_the_last_line_is_the_output(printed: str, output: Any) -> None:
    assert python(f"print('first'); print('''{printed}'''); print()") == output


def test_the_input_is_json_on_stdin() -> None:
    assert python("import sys, json; print(json.dumps(json.load(sys.stdin)))") == {"question": "ü?"}


def test_a_program_that_does_not_read_its_input_is_fine() -> None:
    assert asyncio.run(command_agent(sys.executable, "-c", "print('done')")({"long": "x" * 1_000_000})) == "done"


def test_programs_that_cannot_answer_say_why() -> None:
    with pytest.raises(CommandFailed, match="said nothing on stdout; print the answer as its last line"):
        python("pass")
    with pytest.raises(CommandFailed, match=r"ended with status 3\nhalf a reason"):
        python("import sys; print('x'); sys.stderr.write('half a reason'); sys.exit(3)")
    with pytest.raises(CommandFailed, match=r"'no-such-program' cannot be started: .*; install it, or give its path"):
        asyncio.run(command_agent("no-such-program")(""))
    with pytest.raises(ConfigError, match="names no program"):
        command_agent()


def test_its_environment_is_the_workers_and_what_is_added() -> None:
    agent = command_agent(sys.executable, "-c", "import os; print(os.environ['MODE'], os.environ['PATH'])", environment={"MODE": "fast"})
    assert asyncio.run(agent(None)) == f"fast {os.environ['PATH']}"


async def test_a_cancelled_call_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"import os, time, pathlib; pathlib.Path({str(pids)!r}).write_text(str(os.getpid())); time.sleep(100_000)"
    task = asyncio.create_task(command_agent(sys.executable, "-c", code)(""))
    async with all_ended(pids):
        await written(pids, words=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
