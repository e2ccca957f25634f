"""Warm workers on this machine: every launcher's semantics, and what only local workers are asked."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import all_ended
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl_client.runtime.launcher import WorkerPoolError
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_client.runtime.recipe_pool import start_pool
from lightningrl_client.runtime.supervisor import LocalLauncher
from lightningrl_testing.launcher_conformance import LauncherConformance
from lightningrl_testing.scripted_server import ScriptedServer

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


AGENT_CODE = """
import asyncio, os, signal, sys, threading, time
import httpx

URL = "https://api.openai.com/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
client = httpx.Client(timeout=None)
aclient = httpx.AsyncClient(timeout=None)

def ask():
    return client.post(URL, json=BODY).raise_for_status().json()["choices"][0]["message"]["content"]

async def ask_async(task=None):
    return (await aclient.post(URL, json=BODY)).raise_for_status().json()["choices"][0]["message"]["content"]

def ask_in_new_loop(text):
    return asyncio.run(ask_async())

async def ask_in_both(text):
    first = await ask_async()
    others = [asyncio.to_thread(ask_in_new_loop, text) for _ in range(4)]
    return [first, *await asyncio.gather(*others, ask_async())]

def act(task):
    what = task["do"]
    if what == "ask": return ask()
    if what == "print": print("to the log"); return sys.stdin.read() or "read nothing"
    if what == "raise": raise ValueError("no such table: singer")
    if what == "exit": sys.exit(7)
    if what == "nothing": return None
    if what == "object": return {"when": object()}
    if what == "nan": return {"x": float("nan")}
    if what == "hang": time.sleep(100_000)
    if what == "sleep": time.sleep(task["s"]); return "slept"
    if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "environment": return [os.environ["OPENAI_BASE_URL"], os.environ["ANTHROPIC_BASE_URL"], os.environ["OMP_NUM_THREADS"]]
    if what == "names": return sorted(os.environ)
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
    if task["do"] == "hang": await asyncio.sleep(100_000)
    if task["do"] == "loop": return id(asyncio.get_running_loop())
    if task["do"] == "pid": return os.getpid()
    return await ask_async()
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
    return WorkerPool(
        server.url,
        server.run_key,
        agent,
        **{"workers": 1, "base_dir": folder, "log_folder": folder / "logs", **options},
    )


async def run(
    server: ScriptedServer,
    folder: Path,
    *tasks: Any,
    agent: str = "agents.py:act",
    timeout_s: float = 900,
    **options: Any,
) -> list[Any]:
    """Results of the tasks, in order."""
    for number, task in enumerate(tasks):
        server.add_rollout(f"r{number}", task, timeout_s=timeout_s)
    async with make_pool(server, folder, agent, **options):
        await server.wait_finished()
    return [server.result(f"r{number}") for number in range(len(tasks))]


async def test_a_worker_runs_attempt_after_attempt_in_one_process(server: ScriptedServer, folder: Path) -> None:
    results = await run(server, folder, *[{"do": "pid"}] * 3, {"do": "ask"}, {"do": "thread"}, {"do": "print"})
    assert [result["outcome"] for result in results] == ["succeeded"] * 6
    assert len({result["output"] for result in results[:3]}) == 1
    assert [result["output"] for result in results[3:]] == ["hello", "hello", "read nothing"]
    assert [call.rollout_id for call in server.calls] == ["r3", "r4"]
    assert "to the log" in (folder / "logs" / "worker-0.log").read_text()


async def test_failures_of_the_agent_are_typed_and_say_why(server: ScriptedServer, folder: Path) -> None:
    tasks = [{"do": what} for what in ("raise", "exit", "nothing", "object", "nan", "unreachable", "ask")]
    results = await run(server, folder, *tasks)
    ends = ["agent_error"] * 5 + ["infrastructure_error", "succeeded"]
    assert [result["outcome"] for result in results] == ends
    errors = [result["error"] for result in results[:6]]
    assert errors[0].startswith("ValueError: no such table: singer\n") and "agents.py" in errors[0]
    assert errors[1].startswith("SystemExit: 7")
    assert errors[2] == "the agent 'agents.py:act' returned nothing; return its answer, which the reward looks at"
    assert (
        "returned a dict that cannot be kept: output['when'] is an object, which is not JSON; give text, numbers"
        in errors[3]
    )
    assert "cannot be kept: output['x'] is nan, which JSON has no number for" in errors[4]
    assert "Connection refused" in errors[5]


async def test_a_hanging_agent_is_killed_reported_and_replaced(server: ScriptedServer, folder: Path) -> None:
    hang, pid = await run(server, folder, {"do": "hang"}, {"do": "pid"}, timeout_s=1)
    assert hang["outcome"] == "timeout"
    assert hang["duration_s"] > 0.9
    assert pid["outcome"] == "succeeded"


async def test_a_hanging_async_agent_is_cancelled_without_losing_its_worker(
    server: ScriptedServer, folder: Path
) -> None:
    tasks = [{"do": what} for what in ("pid", "hang", "pid", "loop", "loop", "ask")]
    results = await run(server, folder, *tasks, agent="agents.py:act_async", timeout_s=1)
    assert [result["outcome"] for result in results] == ["succeeded", "timeout", *["succeeded"] * 4]
    assert results[0]["output"] == results[2]["output"]
    assert results[3]["output"] == results[4]["output"]
    assert server.calls[0].headers["connection"] == "keep-alive"


async def test_a_cancelled_rollout_stops_its_agent(server: ScriptedServer, folder: Path) -> None:
    for agent in ("agents.py:act", "agents.py:act_async"):
        server.add_rollout(agent, {"do": "hang"})
        async with make_pool(server, folder, agent, lease_s=3.0):
            while not server.heartbeats(agent):
                await asyncio.sleep(0.01)
            server.cancel(agent)
            server.add_rollout(f"{agent}-next", {"do": "pid"})  # which the worker runs once it has stopped the first
            await server.wait_finished(agent, f"{agent}-next")
        result = server.result(agent)
        assert result is not None
        assert result["outcome"] == "cancelled"


async def test_heartbeats_go_on_while_a_sync_agent_runs(server: ScriptedServer, folder: Path) -> None:
    await run(server, folder, {"do": "sleep", "s": 6.0}, lease_s=3.0)
    assert server.heartbeats("r0") >= 3


async def test_the_environment_points_at_the_rollout(
    server: ScriptedServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (result,) = await run(server, folder, {"do": "environment"}, environment={"OMP_NUM_THREADS": "3"})
    base = f"{server.url}/rollouts/r0/attempts/1"
    assert result["output"] == [f"{base}/v1", base, "3"]


async def test_a_worker_gets_none_of_the_variables_that_are_withheld(
    server: ScriptedServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JUDGE_KEY", "SEARCH_KEY", "LIGHTNINGRL_KEY", "TOOL_KEY"):
        monkeypatch.setenv(name, "secret")
    (result,) = await run(
        server,
        folder,
        {"do": "names"},
        withheld=["JUDGE_KEY", "TOOL_KEY"],
        environment={"TOOL_KEY": "given on purpose"},
    )
    assert {name for name in result["output"] if name.endswith("_KEY")} == {
        "OPENAI_API_KEY",
        "ANTHROPIC_API_KEY",
        "SEARCH_KEY",
        "TOOL_KEY",
    }


@pytest.mark.parametrize("agent", ["agents.py:act", "agents.py:act_async"])
async def test_concurrent_attempts_in_one_worker(server: ScriptedServer, folder: Path, agent: str) -> None:
    tasks = [{"do": "ask"}] * 12
    results = await run(server, folder, *tasks, agent=agent, concurrency=4)
    assert [result["output"] for result in results] == ["hello"] * 12
    assert sorted(call.rollout_id or "" for call in server.calls) == sorted(f"r{number}" for number in range(12))


async def test_a_lost_server_ends_the_pool(server: ScriptedServer, folder: Path) -> None:
    pool = make_pool(server, folder, patience_s=0.5, lease_wait_s=0.2)
    await pool.start()
    server.__exit__(None, None, None)
    with pytest.raises(WorkerPoolError, match="has lost the server"):
        await asyncio.wait_for(pool.wait(), PATIENCE_S)
    await pool.stop()


async def test_a_worker_killed_while_it_imports_the_agent_again_is_replaced(
    server: ScriptedServer, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(
        "import os, pathlib\nfile = pathlib.Path(__file__).with_name('lives')\nlife = len(file.read_text()) if file.exists() else 0\n"
        "file.write_text('x' * (life + 1))\nif life == 1: os.kill(os.getpid(), 9)\n"
        "def answer(task): return life if task == 'live' else os.kill(os.getpid(), 9)\n"
    )
    results = await run(server, tmp_path, "die", "live", agent="agent.py:answer")
    assert (results[0]["outcome"], results[1]["output"]) == ("infrastructure_error", 2)


@pytest.mark.parametrize("agent", ["agents.py:act", "sdk_agents.py:act"])
async def test_failures_of_the_gateway_are_told_from_the_agents(
    server: ScriptedServer, folder: Path, agent: str
) -> None:
    failures = {
        "context_overflow": (400, "context_length_exceeded", "the prompt has 9000 tokens; the context has 4096"),
        "infrastructure_error": (503, "engine_unavailable", "no engine"),
        "agent_error": (400, "bad_request", "no messages"),
    }
    answers = iter([failure for failure in failures.values() for _ in range(2)])
    server.answer = lambda body: next(answers)
    results = await run(server, folder, *[{"do": "ask"}, {"do": "wrapped"}] * 3, agent=agent)
    assert [result["outcome"] for result in results] == [outcome for outcome in failures for _ in range(2)]


WORLD = """
import socket, urllib.request
import httpx, requests

class Down(RuntimeError): ...
class Limited(Exception):
    status_code = 429

def closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]

def mute(read):
    with socket.create_server(("127.0.0.1", 0)) as server:
        read(f"http://127.0.0.1:{server.getsockname()[1]}/")

def answer(what):
    match what:
        case "httpx": httpx.get(f"http://127.0.0.1:{closed()}/")
        case "requests":
            try: requests.get(f"http://127.0.0.1:{closed()}/")
            except requests.ConnectionError as error: raise RuntimeError("the tool is down") from error
        case "urllib": mute(lambda url: urllib.request.urlopen(url, timeout=0.1))
        case "slow": mute(lambda url: httpx.get(url, timeout=0.1))
        case "limited": raise Limited("slow down")
        case "named": raise Down("maintenance")
        case "invented": raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        case "own limit": raise TimeoutError("the tool took more than 3 s")
        case "key": raise KeyError("oops")
"""


RECIPE = {
    "agent": "agent.py:answer",
    "tasks": {"train": "tasks.jsonl"},
    "policy": {"model": "org/model"},
    "rewards": {"right": {"use": "exact_match"}},
}


async def test_what_the_world_breaks_is_run_again_and_never_held_against_the_policy(
    server: ScriptedServer, tmp_path: Path
) -> None:
    """The network and rate limits of hosts other than ours, and what the recipe names; a host that was made up is the
    policy's own."""
    (tmp_path / "agent.py").write_text(WORLD)
    world, own = ["httpx", "requests", "urllib", "slow", "limited", "named"], ["invented", "own limit", "key"]
    results = await run(server, tmp_path, *world, *own, agent="agent.py:answer", infrastructure=["agent.Down"])
    outcomes = dict(zip((*world, *own), (result["outcome"] for result in results), strict=True))
    assert outcomes == {**dict.fromkeys(world, "infrastructure_error"), **dict.fromkeys(own, "agent_error")}


async def test_a_recipe_names_what_the_world_causes(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(WORLD)
    names = ["psycopg.OperationalError", "Down"]
    recipe = Recipe.model_validate({**RECIPE, "outcomes": {"infrastructure": names}, "folder": tmp_path})
    pool = start_pool(recipe, "http://127.0.0.1:1", "key", None, load_plugins())
    assert pool is not None
    assert pool._plan.settings.infrastructure == ("psycopg.OperationalError", "Down")
    with pytest.raises(ValueError, match="a failure that the policy caused is trained; write 'lowest' or 'reward'"):
        Recipe.model_validate({**RECIPE, "outcomes": {"agent_error": "drop"}})


async def test_one_event_loop_per_attempt_works_with_import_time_clients(server: ScriptedServer, folder: Path) -> None:
    results = await run(server, folder, *["hi"] * 10, agent="agents.py:ask_in_new_loop")
    assert [result["output"] for result in results] == ["hello"] * 10


async def test_a_client_of_several_loops_shares_no_connection_among_them(server: ScriptedServer, folder: Path) -> None:
    """The worker's loop keeps its connections, and another loop cannot read from one."""
    results = await run(server, folder, *["hi"] * 10, agent="agents.py:ask_in_both", concurrency=4)
    assert [result["output"] for result in results] == [["hello"] * 6] * 10


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


async def test_workers_die_with_a_killed_pool(server: ScriptedServer, folder: Path) -> None:
    script = folder / "run.py"
    script.write_text(
        "import asyncio\nfrom lightningrl_client.runtime.pool import WorkerPool\n"
        f"pool = WorkerPool({server.url!r}, {server.run_key!r}, 'agents.py:act', base_dir={str(folder)!r}, workers=1)\nasync def main():\n"
        "    async with pool:\n"
        "        print('up', flush=True)\n        await pool.wait()\nasyncio.run(main())\n"
    )
    server.add_rollout("r0", {"do": "pid"})
    server.add_rollout("r1", {"do": "hang"})
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    while server.result("r0") is None or not server.attempts("r1"):
        await asyncio.sleep(0.01)
    (folder / "worker").write_text(str((server.result("r0") or {})["output"]))
    async with all_ended(folder / "worker"):
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


OF_ITS_THREAD = """
import asyncio, contextvars, signal, sqlite3, threading

database = sqlite3.connect(":memory:")
local = threading.local()
local.name = "set at import"
context = contextvars.ContextVar("context")
context.set("at import")

def fail(what):
    if what == "signal": signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if what == "sqlite": database.execute("select 1")
    if what == "loop": asyncio.get_event_loop()
    if what == "local": local.name
    if what == "context": context.get()
    if what == "value": raise ValueError("no such table: singer")
    return "worked"

def act(task):
    try: return fail(task["do"])
    except ValueError as error: raise RuntimeError("my step failed") from error
"""


async def test_an_agent_that_fails_for_its_thread_is_told_what_runs_it_in_the_main_one(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(OF_ITS_THREAD, encoding="utf-8")
    kinds = ["signal", "sqlite", "loop", "local", "context"]
    for concurrency in (2, 1):
        with ScriptedServer(lambda body: {"content": "hello"}) as server:
            for what in (*kinds, "value"):
                server.add_rollout(what, {"do": what})
            async with make_pool(server, tmp_path, concurrency=concurrency):
                await server.wait_finished()
            results = {what: server.result(what) or {} for what in (*kinds, "value")}
        for what in kinds:
            error = results[what].get("error") or ""
            if concurrency == 1:
                assert results[what]["output"] == "worked", (what, error)
            else:
                assert "set runtime.concurrency = 1, and more runtime.workers" in error.splitlines()[0], (what, error)
        assert "runtime.concurrency" not in (results["value"]["error"] or "")
