"""An agent that is a program: what it is given, what its answer is, and that it ends with its rollout."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import all_ended, is_alive, written

from lightningrl import command_agent
from lightningrl.errors import ConfigError
from lightningrl_client.runtime.command import CommandFailed
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_testing.scripted_server import ScriptedServer

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
    case "complain on stdout":
        print("the API says: quota exceeded")
        sys.exit(1)
    case "tell":
        print(json.dumps(sorted(name for name in os.environ if name.startswith("OTEL_"))))
    case "hang":
        child = subprocess.Popen(["sleep", "100000"])
        pathlib.Path(task["pids"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(100_000)
"""
AGENT = f"""
from lightningrl import command_agent

answer = command_agent({sys.executable!r}, "program.py")
silent = command_agent({sys.executable!r}, "program.py", telemetry=False)
"""
STARTER = """
import asyncio, json, multiprocessing, os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
import anyio

COPIED = {**os.environ}
PROGRAM = [sys.executable, "asks.py"]

def told(said):
    return json.loads(said)

def child(rid, pipe):
    import asks
    pipe.send(asks.ask(rid))

def start(task):
    rid, how = task["rid"], task["how"]
    run = lambda **options: told(subprocess.run([*PROGRAM, rid], capture_output=True, check=True, **options).stdout)
    match how:
        case "run": return run()
        case "copied-environment": return run(env={**os.environ, "MORE": "1"})
        case "environment-of-the-import": return run(env=COPIED)
        case "key-alone": return run(env={"PATH": os.environ["PATH"], "OPENAI_API_KEY": "sk-the-users-own"})
        case "by-place":
            places = (-1, None, None, subprocess.PIPE, None, None, True, False, None, {**os.environ})
            return told(subprocess.Popen([*PROGRAM, rid], *places).communicate()[0])
        case "executor":
            with ThreadPoolExecutor() as pool: return pool.submit(run).result()
        case "multiprocessing":
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(target=child, args=(rid, theirs))
            process.start(); found = ours.recv(); process.join()
            return found
        case "nothing-of-ours": return run(env={"PATH": os.environ["PATH"]})
        case "elsewhere": return run(env={**os.environ, "OPENAI_BASE_URL": "https://llm.example.com/v1"})

async def start_async(task):
    rid, how = task["rid"], task["how"]
    match how:
        case "asyncio":
            process = await asyncio.create_subprocess_exec(*PROGRAM, rid, stdout=-1)
            return told((await process.communicate())[0])
        case "asyncio-shell":
            process = await asyncio.create_subprocess_shell(" ".join([*PROGRAM, rid]), stdout=-1, env={**os.environ})
            return told((await process.communicate())[0])
        case "anyio": return told((await anyio.run_process([*PROGRAM, rid], env=COPIED)).stdout)
"""
ASKS = """
import json, os, sys, urllib.request

def ask(rid):
    base = os.environ.get("OPENAI_BASE_URL", "")
    if "/rollouts/" not in base:
        return [base, os.environ.get("OPENAI_API_KEY", "")]
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = {"model": "m", "messages": [{"role": "user", "content": "RID=" + rid}]}
    request = urllib.request.Request(base + "/chat/completions", json.dumps(body).encode(), key)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

if __name__ == "__main__":
    print(json.dumps(ask(sys.argv[1])))
"""
WAYS = (
    "run",
    "copied-environment",
    "environment-of-the-import",
    "key-alone",
    "by-place",
    "executor",
    "multiprocessing",
)
ASYNC_WAYS = ("asyncio", "asyncio-shell", "anyio")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "starter.py").write_text(STARTER)
    (tmp_path / "asks.py").write_text(ASKS)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize(("agent", "ways"), [("start", WAYS), ("start_async", ASYNC_WAYS)], ids=["sync", "async"])
async def test_a_program_that_an_agent_starts_calls_for_the_rollout_that_started_it(
    folder: Path, agent: str, ways: Sequence[str], concurrency: int
) -> None:
    with ScriptedServer(lambda body: {"content": body["messages"][0]["content"]}) as server:
        for way in ways:
            for number in range(2):
                server.add_rollout(f"{way}-{number}", {"how": way, "rid": f"{way}-{number}"})
        pool = WorkerPool(
            server.url,
            server.run_key,
            f"starter.py:{agent}",
            workers=1,
            concurrency=concurrency,
            base_dir=folder,
            log_folder=folder,
        )
        async with pool:
            await server.wait_finished()
        results = {rid: server.result(rid) or {} for rid in server.rollout_ids}
        assert [result["error"] for result in results.values() if result["error"]] == []
        assert {rid: result["output"] for rid, result in results.items()} == {rid: f"RID={rid}" for rid in results}
        assert sorted(call.rollout_id or "" for call in server.calls) == sorted(results)


@pytest.mark.slow
async def test_what_the_author_of_a_programs_environment_left_out_or_set_elsewhere_stays_so(folder: Path) -> None:
    with ScriptedServer(lambda body: {"content": "hi"}) as server:
        for way in ("nothing-of-ours", "elsewhere"):
            server.add_rollout(way, {"how": way, "rid": "r"})
        pool = WorkerPool(
            server.url, server.run_key, "starter.py:start", workers=1, concurrency=4, base_dir=folder, log_folder=folder
        )
        async with pool:
            await server.wait_finished()
        outputs = {way: (server.result(way) or {})["output"] for way in server.rollout_ids}
    assert outputs["nothing-of-ours"] == ["", ""]
    assert outputs["elsewhere"][0] == "https://llm.example.com/v1"


@pytest.mark.slow
async def test_a_program_may_be_run_without_the_variables_of_telemetry_and_says_why_it_failed_wherever_it_says_so(
    folder: Path,
) -> None:
    told: dict[str, Any] = {}
    with ScriptedServer(lambda body: {"content": "hi"}) as server:
        for agent in ("answer", "silent"):
            server.add_rollout(agent, {"do": "tell"})
            if agent == "silent":
                server.add_rollout("failed", {"do": "complain on stdout"})
            pool = WorkerPool(
                server.url, server.run_key, f"agent.py:{agent}", workers=1, base_dir=folder, log_folder=folder
            )
            async with pool:
                await server.wait_finished()
        told = {rid: server.result(rid) or {} for rid in server.rollout_ids}
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in told["answer"]["output"]
    assert told["silent"]["output"] == []
    assert "ended with status 1\na line that is no answer\nthe API says: quota exceeded" in told["failed"]["error"]


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


async def test_a_program_and_what_it_started_end_with_the_process_that_ran_it_however_that_ends(folder: Path) -> None:
    """Whoever runs it is supervised by nobody here: an agent in the trainer's own process, or a worker whose trainer
    was killed."""
    hang = f"{{'do': 'hang', 'pids': {str(folder / 'pids')!r}}}"
    code = f"import asyncio, agent; asyncio.run(agent.answer({hang}))"
    runner = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=folder)
    async with all_ended(folder / "pids"):
        await written(folder / "pids", words=2)
        runner.kill()
        await runner.wait()


def test_a_program_is_started_without_python_between_fork_and_exec() -> None:
    """Handlers of forks (OpenTelemetry's start threads in the child) and `preexec_fn` are not safe where other threads
    run."""
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("fork"))
    assert python("print('done')") == "done"
    assert forks == []


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
        (
            '{"query": "a\\u2028b\\x85c"}',
            {"query": "a\u2028b\x85c"},
        ),  # JavaScript's JSON has such line ends as they are
        ("a\\x0cb", "a\x0cb"),
        ("[" * 2000, "[" * 2000),
    ],
)
def test_the_last_line_is_the_output(printed: str, output: Any) -> None:
    assert python(f"print('first'); print('''{printed}'''); print()") == output


def test_the_input_is_json_on_stdin() -> None:
    assert python("import sys, json; print(json.dumps(json.load(sys.stdin)))") == {"question": "ü?"}


def test_a_program_that_does_not_read_its_input_is_fine() -> None:
    assert asyncio.run(command_agent(sys.executable, "-c", "print('done')")({"long": "x" * 1_000_000})) == "done"


def test_what_a_program_prints_without_end_is_dropped_as_it_comes() -> None:
    tracemalloc.start()
    try:
        assert (
            shell("yes aaaaaaaaaaaaaaaaaaaaaaaaaaa | head -c 100000000; yes b | head -c 100000000 >&2; echo; echo last")
            == "last"
        )
        assert tracemalloc.get_traced_memory()[1] < 80_000_000
    finally:
        tracemalloc.stop()
    with pytest.raises(CommandFailed, match="printed a last line of more than 8388608 bytes; shorten it"):
        shell("yes | head -c 40000000 | tr -d '\\n'")


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
def test_a_process_that_left_its_session_its_folder_and_its_environment_ends_with_the_program(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    daemon = f"cd /; echo $$ > {pids}; exec env -i sleep 100000"
    assert (
        shell(f"setsid sh -c '(setsid sh -c \"{daemon}\" &)' > /dev/null 2>&1; sleep 0.3; cat {pids}")
        == pids.read_text().strip()
    )
    assert not is_alive(int(pids.read_text()))


def test_a_program_that_stops_or_kills_its_keeper_ends_with_its_time(tmp_path: Path) -> None:
    async def run_briefly(command: str) -> None:
        async with asyncio.timeout(3):
            await command_agent("/bin/sh", "-c", command)("x")

    with pytest.raises(TimeoutError):
        asyncio.run(run_briefly(f"echo $$ > {tmp_path}/pid; kill -STOP $PPID; sleep 100000"))
    assert not is_alive(int((tmp_path / "pid").read_text()))
    with pytest.raises((CommandFailed, TimeoutError)):
        asyncio.run(run_briefly("kill -9 $PPID"))


def shell(command: str) -> Any:
    return asyncio.run(command_agent("/bin/sh", "-c", command)("x"))


def test_programs_that_cannot_answer_say_why() -> None:
    with pytest.raises(CommandFailed, match="said nothing on stdout; print the answer as its last line"):
        python("pass")
    with pytest.raises(CommandFailed, match=r"ended with status 3\nhalf a reason"):
        python("import sys; print('x'); sys.stderr.write('half a reason'); sys.exit(3)")
    with pytest.raises(CommandFailed, match=r"'no-such-program' cannot be started: .*; install it, or give its path"):
        asyncio.run(command_agent("no-such-program")(""))
    with pytest.raises(ConfigError, match="names no program"):
        command_agent()


def test_a_program_that_warns_on_stderr_and_says_why_on_stdout_is_heard_on_both() -> None:
    with pytest.raises(CommandFailed, match=r"ended with status 1\nExperimentalWarning: x\nquota exceeded$"):
        python("import sys; print('quota exceeded'); sys.exit('ExperimentalWarning: x')")


def test_its_environment_is_the_workers_and_what_is_added() -> None:
    agent = command_agent(
        sys.executable, "-c", "import os; print(os.environ['MODE'], os.environ['PATH'])", environment={"MODE": "fast"}
    )
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
