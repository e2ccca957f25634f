"""What one rollout starts, several use and nobody ends: its calls are nobody's, and the rollout that started it is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from sizes import PATIENCE_S

from lightningrl.records import RolloutRecord
from lightningrl.types import Outcome, Trajectory
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.store_conformance import make_spec
from lightningrl_testing.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.slow

AGENT = '''
import asyncio, contextvars, multiprocessing, queue, subprocess, sys, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import httpx

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
URL = "https://api.openai.com/v1/chat/completions"
kept, both = {}, None

async def ask():
    async with httpx.AsyncClient(timeout=None) as client:
        return (await client.post(URL, json=BODY)).status_code

def ask_sync(*_):
    return httpx.post(URL, json=BODY, timeout=None).status_code

async def meet():
    global both
    both = both or asyncio.Barrier(2)
    await both.wait()

async def serve(jobs, call):
    while True:
        done = await jobs.get()
        done.set_result(await call())

async def within(call):
    return await asyncio.create_task(call())

async def by_task(_, call=ask, context=None):
    if "jobs" not in kept:
        kept["jobs"] = asyncio.Queue()
        kept["task"] = asyncio.create_task(serve(kept["jobs"], call), context=context)
    await meet()
    done = asyncio.get_running_loop().create_future()
    kept["jobs"].put_nowait(done)
    status = await done
    await meet()
    return status

async def by_inner_task(_):
    return await by_task(_, lambda: within(ask))

async def by_task_of_own_context(_):
    return await by_task(_, lambda: within(ask), contextvars.copy_context())

async def by_uvloop(_):
    import uvloop
    if "loop" not in kept:
        kept["loop"], kept["jobs"] = uvloop.new_event_loop(), asyncio.Queue()
        threading.Thread(target=kept["loop"].run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(serve(kept["jobs"], ask), kept["loop"])
    await meet()
    async def hand_in():
        done = asyncio.get_running_loop().create_future()
        kept["jobs"].put_nowait(done)
        return await done
    status = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(hand_in(), kept["loop"]))
    await meet()
    return status

PROGRAM = """
import os, sys, urllib.request
for line in sys.stdin:
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    print(urllib.request.urlopen(urllib.request.Request(url, line.encode(), headers)).status, flush=True)
"""
LINE = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}' + bytes([10])

async def by_program(_):
    if "lock" not in kept:
        kept["lock"] = asyncio.Lock()
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        kept["program"] = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, **pipes)
    await meet()
    async with kept["lock"]:
        kept["program"].stdin.write(LINE)
        status = int(await kept["program"].stdout.readline())
    await meet()
    return status

async def by_thread(_, start=lambda work: ThreadPoolExecutor(1).submit(work)):
    if "jobs" not in kept:
        kept["jobs"] = queue.Queue()
        def work():
            while True:
                kept["jobs"].get()(ask_sync())
        start(work)
    await meet()
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    kept["jobs"].put(lambda status: loop.call_soon_threadsafe(done.set_result, status))
    status = await done
    await meet()
    return status

async def by_processes(_):
    if "pool" not in kept:
        kept["pool"] = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    await meet()
    status = await asyncio.get_running_loop().run_in_executor(kept["pool"], ask_sync)
    await meet()
    return status

async def by_thread_of_a_context(_):
    def start(work):
        threading.Thread(target=contextvars.copy_context().run, args=(work,), name="server", daemon=True).start()
    return await by_thread(_, start)

SERVER = """
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import SamplingMessage, TextContent
server = MCPServer("asks")
@server.tool()
async def ask(ctx: Context) -> str:
    messages = [SamplingMessage(role="user", content=TextContent(type="text", text="hi"))]
    return (await ctx.session.create_message(messages=messages, max_tokens=10)).content.text
server.run("stdio")
"""

async def sample(*_):
    from mcp.types import CreateMessageResult, TextContent
    text = TextContent(type="text", text=str(await ask()))
    return CreateMessageResult(role="assistant", model="m", content=text)

async def hold_session(opened):
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
    server = StdioServerParameters(command=sys.executable, args=["-c", SERVER])
    async with stdio_client(server) as (read, write), ClientSession(read, write, sampling_callback=sample) as session:
        await session.initialize()
        opened.set_result(session)
        await asyncio.Event().wait()

async def by_session(_):
    if "session" not in kept:
        kept["session"] = asyncio.get_running_loop().create_future()
        kept["task"] = asyncio.create_task(hold_session(kept["session"]))
    session = await kept["session"]
    await meet()
    result = await session.call_tool("ask", {})
    await meet()
    return int(result.content[0].text)

async def of_senders_threads(_):
    """A kept thread that runs each job in its sender's context; and anyio's, which does so, too."""
    import anyio
    await meet()
    if "jobs" not in kept:
        kept["jobs"] = queue.Queue()
        def work():
            while True:
                context, job, done = kept["jobs"].get()
                done(context.run(job))
                time.sleep(0.2)  # the rollout may end meanwhile
                del context, job, done
        threading.Thread(target=work, daemon=True).start()
    status = await anyio.to_thread.run_sync(ask_sync)
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    hand_out = lambda status: loop.call_soon_threadsafe(done.set_result, status)
    kept["jobs"].put((contextvars.copy_context(), ask_sync, hand_out))
    status += await done - 200
    await meet()
    return status

async def of_batches(_):
    """A kept thread that asks for all jobs at once, in the context of the first."""
    if "jobs" not in kept:
        kept["jobs"] = queue.Queue()
        def work():
            while True:
                jobs = [kept["jobs"].get(), kept["jobs"].get()]
                for status, (_, done) in zip(jobs[0][0].run(lambda: [ask_sync(), ask_sync()]), jobs):
                    done(status)
                del jobs, done
        threading.Thread(target=work, daemon=True).start()
    await meet()
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    kept["jobs"].put((contextvars.copy_context(), lambda status: loop.call_soon_threadsafe(done.set_result, status)))
    status = await done
    await meet()
    return status

async def failing(_, serve=by_task):
    is_starter = not kept
    status = await serve(_)
    if is_starter:
        await ask()
        raise ValueError("the policy's own failure")
    return status

async def failing_with_a_program(_):
    return await failing(_, by_program)

async def failing_beside_its_own(_):
    async def fail():
        await ask()
        raise ValueError("the policy's own failure")
    async def go_on():
        await ask()
        await asyncio.sleep(0.3)
    await meet()
    await asyncio.gather(fail(), go_on())

async def of_its_own(_):
    jobs = asyncio.Queue()
    task, idle = asyncio.create_task(serve(jobs, ask)), asyncio.create_task(asyncio.Event().wait())
    kept.setdefault("idle", []).append((idle, subprocess.Popen(["sleep", "100"])))
    done = asyncio.get_running_loop().create_future()
    await meet()
    jobs.put_nowait(done)
    status = await done
    with ThreadPoolExecutor() as threads:
        status += threads.submit(ask_sync).result() - 200
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        assert pool.submit(abs, -1).result() == 1
    process = multiprocessing.get_context("fork").Process(target=abs, args=(-1,))
    process.start()
    process.join()
    process.close()
    task.cancel()
    await meet()
    return status
'''
NAMES = {
    "by_task": "task 'serve'",
    "by_inner_task": "task 'serve'",
    "by_task_of_own_context": "task 'serve'",
    "by_uvloop": "task 'serve'",
    "by_program": f"program '{sys.executable} -c",
    "by_thread": "job 'by_thread.<locals>.work'",
    "by_thread_of_a_context": "thread 'server'",
    "by_session": "task 'hold_session'",
    "by_processes": "process 'ForkProcess",
    "failing": "task 'serve'",
    "failing_with_a_program": f"program '{sys.executable} -c",
}


async def run_two(agent: str, folder: Path) -> tuple[list[Trajectory], list[RolloutRecord], str]:
    """Run the agent's two rollouts at once in a process; returns them, their records and the worker's log."""
    (folder / "agent.py").write_text(AGENT)
    engine = ScriptedEngine(tiny_tokenizer(), reply=lambda _: "hello")
    async with live_gateway(folder, engine=engine) as control:
        ids = ["r0", "r1"]
        await control.store.create_rollouts([make_spec(name, "hi") for name in ids])
        runs = f"agent.py:{agent}"
        settings: Any = {"workers": 1, "concurrency": 2, "base_dir": folder, "log_folder": folder}
        async with WorkerPool(control.url, control.run_key, runs, **settings):
            await control.store.wait_finished(ids, PATIENCE_S)
        trajectories = await control.store.trajectories(ids)
        records = [await control.store.rollout(name) for name in ids]
    return list(trajectories), records, (folder / "worker-0.log").read_text()


@pytest.mark.parametrize("agent", NAMES)
async def test_what_outlives_its_rollout_and_asked_for_others_is_told_and_nothing_of_it_is_trained(
    agent: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trajectories, records, log = await run_two(agent, tmp_path)
    (starter,) = [trajectory for trajectory in trajectories if trajectory.transitions]
    trained = [call.trainable for call in starter.transitions]
    if agent.startswith("failing"):
        assert starter.outcome is Outcome.AGENT_ERROR
        assert trained == [False, False, True], "one of each in what it left behind, and its own call"
        assert "the policy's own failure" in (starter.error or "")
        assert "these 2 calls are not trained" in (starter.error or "")
    else:
        assert starter.outcome is Outcome.INFRASTRUCTURE_ERROR, log
        assert len(trained) == 2, "a call of each, and both under the rollout that started it"
        assert "nothing is trained on this rollout" in (starter.error or "")
    assert NAMES[agent] in (starter.error or "")
    assert f"rollout {starter.rollout_id}: " in caplog.text and NAMES[agent] in caplog.text
    assert [len(record.attempts) for record in records] == [1, 1], "tried again, it would be no better"


@pytest.mark.parametrize("agent", ["of_its_own", "of_senders_threads"])
async def test_work_that_ends_with_its_rollout_or_runs_in_its_senders_context_is_trained(
    agent: str, tmp_path: Path
) -> None:
    trajectories, _, log = await run_two(agent, tmp_path)
    assert [(each.outcome, each.output) for each in trajectories] == [(Outcome.SUCCEEDED, 200)] * 2, log
    assert [[call.trainable for call in each.transitions] for each in trajectories] == [[True, True]] * 2


async def test_a_failures_own_tasks_are_trained_where_they_end_with_it(tmp_path: Path) -> None:
    trajectories, _, log = await run_two("failing_beside_its_own", tmp_path)
    assert [each.outcome for each in trajectories] == [Outcome.AGENT_ERROR] * 2, log
    assert [[call.trainable for call in each.transitions] for each in trajectories] == [[True, True]] * 2


@pytest.mark.xfail(reason="a thread that asks for several in the context of one is not told from that one", strict=True)
async def test_a_batch_of_several_rollouts_is_trained_under_none(tmp_path: Path) -> None:
    trajectories, _, log = await run_two("of_batches", tmp_path)
    assert [each.output for each in trajectories] == [200, 200], log
    trained = [call for each in trajectories if each.outcome is Outcome.SUCCEEDED for call in each.transitions]
    assert not any(call.trainable for call in trained)
