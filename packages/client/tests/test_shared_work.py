"""What one rollout starts, several use and nobody ends: its calls are nobody's, and the rollout that started it is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sizes import PATIENCE_S

from lightningrl.types import Outcome
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.store_conformance import make_spec
from lightningrl_testing.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.slow

AGENT = '''
import asyncio, contextvars, multiprocessing, queue, subprocess, sys, threading
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
    if "program" not in kept:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        kept["lock"] = asyncio.Lock()
        kept["program"] = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, **pipes)
    await meet()
    async with kept["lock"]:
        kept["program"].stdin.write(LINE)
        status = int(await kept["program"].stdout.readline())
    await meet()
    return status

async def by_thread(_):
    if "jobs" not in kept:
        kept["jobs"] = queue.Queue()
        def work():
            while True:
                kept["jobs"].get()(ask_sync())
        ThreadPoolExecutor(1).submit(work)
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
    "by_processes": "process 'ForkProcess",
}


@pytest.mark.parametrize("agent", [*NAMES, "of_its_own"])
async def test_what_outlives_its_rollout_and_asked_for_others_is_told_and_nothing_of_it_is_trained(
    agent: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    engine = ScriptedEngine(tiny_tokenizer(), reply=lambda _: "hello")
    async with live_gateway(tmp_path, engine=engine) as control:
        specs = [make_spec(f"r{number}", "hi") for number in range(2)]
        await control.store.create_rollouts(specs)
        async with WorkerPool(
            control.url,
            control.run_key,
            f"agent.py:{agent}",
            workers=1,
            concurrency=2,
            base_dir=tmp_path,
            log_folder=tmp_path,
        ):
            await control.store.wait_finished([spec.id for spec in specs], PATIENCE_S)
        trajectories = await control.store.trajectories([spec.id for spec in specs])
        records = [await control.store.rollout(spec.id) for spec in specs]
    log = (tmp_path / "worker-0.log").read_text()
    if agent == "of_its_own":
        assert [(one.outcome, one.output) for one in trajectories] == [(Outcome.SUCCEEDED, 200)] * 2, log
        assert [len(one.transitions) for one in trajectories] == [2, 2]
        return
    (starter,) = [one for one in trajectories if one.transitions]
    assert len(starter.transitions) == 2, "a call of each, and both under the rollout that started it"
    assert starter.outcome is Outcome.INFRASTRUCTURE_ERROR
    assert f"{NAMES[agent]}" in (starter.error or "") and "nothing is trained on this rollout" in (starter.error or "")
    logs = log + caplog.text  # programs' calls are the server's to know
    assert f"rollout {starter.rollout_id}: " in logs and NAMES[agent] in logs
    assert [len(record.attempts) for record in records] == [1, 1], "tried again, it would be no better"
