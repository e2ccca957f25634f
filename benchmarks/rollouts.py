"""What rollouts cost beyond their agents: one by one, a step's, as the store grows, with very many workers.

python benchmarks/rollouts.py overhead                  from order to trajectory, less the agent's own time
python benchmarks/rollouts.py life                      server CPU of a rollout in a run, order to step
python benchmarks/rollouts.py life --agent text_to_sql  the same of text-to-SQL: LangGraph, 3.9 calls, spans
python benchmarks/rollouts.py growth --rollouts 200000  CPU of what is asked of a store all the time, as it grows
python benchmarks/rollouts.py workers --workers 500     simulated workers, each as fast as it is answered

this process ─ order, wait, trajectories, scores, step ─► server ◄─ lease, calls, spans, result ─ workers
    └─ scripted engine ◄─────── engine link ──────────────┘
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measuring import AGENT, ROOT, RUN_KEY, cpu_seconds_of, result, serving

from lightningrl.loading import load_callable
from lightningrl.records import RolloutFilter, Score
from lightningrl.types import Outcome, RolloutSpec, Task
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import make_call

EXAMPLE = ROOT / "examples/text_to_sql"


def order(name: str, number: int, *, group: int = 8, step: int = 0, question: object = None) -> RolloutSpec:
    """Rollout `number` of a step, in a group of so many."""
    place = number // group
    task = Task(id=f"t{place % 64}", input=question or {"question": f"{place % 64}*7?"})
    return RolloutSpec(id=f"{name}-{number}", task=task, group_id=f"{name}-{place}", step=step, timeout_s=300.0)


# ---------------------------------------------------------------------- overhead

ANSWER = b"""{"id": "1", "object": "chat.completion", "created": 0, "model": "m",
"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}"""


async def answer_at_once(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that answers every chat completion."""
    if scope["type"] == "http":
        await receive()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})


def seconds_of_agent(folder: Path, times: int) -> float:
    """Median seconds of the agent alone, in this process, against a server that answers at once."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(answer_at_once, port=0, log_level="error", lifespan="off"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    os.environ["OPENAI_BASE_URL"] = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    answer = load_callable(f"{folder / 'agent.py'}:answer")
    seconds = []
    for _ in range(times + 3):
        started = time.perf_counter()
        answer({"question": "6*7?"})
        seconds.append(time.perf_counter() - started)
    server.should_exit = True
    return statistics.median(seconds[3:])


async def overhead(folder: Path, options: argparse.Namespace) -> None:
    """One rollout at a time; then the rate with a full queue."""
    (folder / "agent.py").write_text(AGENT)
    rollouts = options.rollouts or 100
    end_to_end: list[float] = []
    inside: list[float] = []
    async with (
        serving(folder) as (server, client),
        WorkerPool(server.url, RUN_KEY, "agent.py:answer", workers=2, base_dir=folder, log_folder=folder) as pool,
    ):
        await pool.wait_ready()
        for number in range(rollouts + 3):
            started = time.perf_counter()
            await client.create_rollouts([order("single", number)])
            await client.wait([f"single-{number}"], 30)
            (trajectory,) = await client.trajectories([f"single-{number}"])
            end_to_end.append(time.perf_counter() - started)
            inside.append(trajectory.duration_s)
            assert trajectory.outcome == "succeeded" and len(trajectory.transitions) == 1, trajectory.error
        started = time.perf_counter()
        await client.create_rollouts([order("many", number) for number in range(rollouts)])
        await client.wait([f"many-{number}" for number in range(rollouts)], 60, rollouts)
        rate = rollouts / (time.perf_counter() - started)
    alone = await asyncio.to_thread(seconds_of_agent, folder, rollouts)
    median = statistics.median(end_to_end[3:])
    print(f"end to end       {median * 1e3:7.2f} ms median, {max(end_to_end[3:]) * 1e3:7.2f} ms worst of {rollouts}")
    print(f"inside the agent {statistics.median(inside[3:]) * 1e3:7.2f} ms median (its call through the gateway)")
    print(f"the agent alone  {alone * 1e3:7.2f} ms median")
    print(f"full queue       {rate:7.1f} rollouts/s with 2 workers")
    result(median - alone)


# ---------------------------------------------------------------------- life

STEP, FETCH = 128, 64
"""Rollouts of a step, which is ordered at once, and of a request that reads them back."""
REWRITTEN = 0.596
"""Share of the checks that call a query wrong: 2 · (1 + p + p²) = 3.9 calls of the text-to-SQL agent."""
SPY = ("py-spy", "record", "-t", "-r", "100", "--nonblocking", "-f", "raw")


def questions_of_text_to_sql(folder: Path) -> list[Any]:
    sys.path.insert(0, str(EXAMPLE))
    train_tasks = importlib.import_module("data").train_tasks
    return [task["input"] for task, _ in zip(train_tasks(folder / "databases"), range(64), strict=False)]


def make_reply(agent: str) -> Callable[[str], str]:
    chance = random.Random(0)

    def reply(prompt: str) -> str:
        if agent == "one_call":
            return "forty-two"
        if "Say correct or incorrect" in prompt:
            return "incorrect" if chance.random() < REWRITTEN else "correct"
        return "SELECT name FROM sqlite_master"

    return reply


async def run_step(client: ServerClient, step: int, questions: Sequence[object]) -> int:
    """The trainer's requests of one step, as its loop makes them; how many calls its rollouts took."""
    numbers = range(step * STEP, (step + 1) * STEP)
    specs = [
        order(str(step), number, step=step, question=questions[number // 8 % 64] if questions else None)
        for number in numbers
    ]
    await client.create_rollouts(specs)
    waiting, calls = {spec.id for spec in specs}, 0
    scores: list[Score] = []
    while waiting:
        finished = list(await client.wait(sorted(waiting), 10.0, min(FETCH, len(waiting))))
        waiting -= set(finished)
        for start in range(0, len(finished), FETCH):
            for rollout in await client.trajectories(finished[start : start + FETCH]):
                assert rollout.outcome == "succeeded" and rollout.transitions, rollout.error
                calls += len(rollout.transitions)
                lengths = {call.id: len(call.completion_ids) for call in rollout.transitions}
                scores.append(
                    Score(
                        rollout_id=rollout.rollout_id,
                        attempt=rollout.attempt,
                        rewards={"match": 1.0},
                        reward=1.0,
                        advantages={name: np.full(length, 0.25, np.float32) for name, length in lengths.items()},
                        digests={"rewards.match": "0123456789abcdef"},
                    )
                )
    await client.set_scores(scores)
    await client.mark_trained(step + 1, [spec.id for spec in specs], {"reward": 1.0})
    return calls


async def life(folder: Path, options: argparse.Namespace) -> None:
    """Three steps after one that warms up."""
    is_sql = options.agent == "text_to_sql"
    questions = questions_of_text_to_sql(folder) if is_sql else []
    (folder / "agent.py").write_text(AGENT)
    async with (
        serving(folder, reply=make_reply(options.agent)) as (server, client),
        WorkerPool(
            server.url,
            RUN_KEY,
            "agent.py:answer",
            workers=options.workers or 2,
            concurrency=24,
            adapters=("langchain",) if is_sql else (),
            base_dir=EXAMPLE if is_sql else folder,
            log_folder=folder,
        ) as pool,
    ):
        assert server.pid is not None
        await pool.wait_ready()
        await run_step(client, 0, questions)
        before, began = cpu_seconds_of(server.pid), time.perf_counter()
        spy = options.flames and subprocess.Popen([*SPY, "-p", str(server.pid), "-o", options.flames])
        calls = [await run_step(client, step, questions) for step in range(1, options.steps + 1)]
        used, wall = cpu_seconds_of(server.pid) - before, time.perf_counter() - began
        if spy:
            spy.send_signal(signal.SIGINT)
            spy.wait()
    rollouts = options.steps * STEP
    print(f"{rollouts} rollouts of {sum(calls) / rollouts:.2f} calls, {rollouts / wall:.1f} a second")
    result(1e3 * used / rollouts)


# ---------------------------------------------------------------------- growth

PARTS, PART_STEP, CALLS, TIMES = 5, 250, 5, 5


async def make_step(store: SqlStore, step: int) -> list[str]:
    """Rollouts that are created, leased, called, finished, scored and trained; their ids."""
    specs = [order(str(step), number, step=step) for number in range(PART_STEP)]
    await store.create_rollouts(specs)
    leases = [lease for _ in specs if (lease := await store.lease("w", 3600.0)) is not None]

    async def live(lease: Any) -> Score:
        for number in range(CALLS):
            await store.append_call(make_call(lease, f"{lease.rollout_id}/{number}", range(100), range(40)))
        await store.finish_attempt(lease.rollout_id, lease.attempt, Outcome.SUCCEEDED, output="ok")
        return Score(rollout_id=lease.rollout_id, attempt=lease.attempt, rewards={"match": 1.0}, reward=1.0)

    await store.set_scores(await asyncio.gather(*map(live, leases)))
    ids = [spec.id for spec in specs]
    await store.mark_trained(step + 1, ids, {"reward": 1.0})
    return ids


async def growth(folder: Path, options: argparse.Namespace) -> None:
    """The dearest growth: a query's CPU at the last part ÷ at the first; one that looks at all rollouts may grow with
    them, 5 at most."""
    pragmas = {"synchronous": 0}  # its fsyncs are not what is measured
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}", pragmas=pragmas)
    costs: dict[str, list[float]] = {}
    steps = max(1, (options.rollouts or 8_000) // (PARTS * PART_STEP))
    for part in range(PARTS):
        began = time.process_time()
        for step in range(part * steps, (part + 1) * steps):
            ids = await make_step(store, step)
        costs.setdefault("a rollout's life", []).append((time.process_time() - began) / (steps * PART_STEP))
        queries: dict[str, Callable[[], Awaitable[Any]]] = {
            "list, newest 50": partial(store.list_rollouts, RolloutFilter(limit=50)),
            "list, a group": partial(store.list_rollouts, RolloutFilter(group_id=ids[0], limit=50)),
            "wait for 250 that ended": partial(store.wait_finished, ids, 0.0),
            "64 trajectories": partial(store.trajectories, ids[:64]),
            "counts": store.counts,
            "steps (on resume)": store.steps,
        }
        for name, ask in queries.items():
            began = time.process_time()
            for _ in range(TIMES):
                await ask()
            costs.setdefault(name, []).append((time.process_time() - began) / TIMES)
        line = ", ".join(f"{name} {1e3 * values[-1]:.2f} ms" for name, values in costs.items())
        print(f"{(part + 1) * steps * PART_STEP:>8} rollouts: {line}", flush=True)
    await store.close()
    ratios = {name: values[-1] / values[0] for name, values in costs.items()}
    print(f"{PARTS} times as many: " + ", ".join(f"{name} × {ratio:.2f}" for name, ratio in ratios.items()))
    result(max(ratios.values()))


# ---------------------------------------------------------------------- workers


async def post(
    line: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str, body: Any, key: str = RUN_KEY
) -> Any:
    """One request on a connection that stays open."""
    reader, writer = line
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: server\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next((int(line.partition(":")[2]) for line in lines if line.startswith("content-length")), 0)
    answer = await reader.readexactly(length)
    assert status.split()[1] in ("200", "204"), f"{status}: {answer!r}"
    return json.loads(answer) if answer else None


async def work(port: int, name: str, done: set[str], wanted: int) -> None:
    line = await asyncio.open_connection("127.0.0.1", port)
    while len(done) < wanted:
        request = {"worker_id": name, "wait_s": 1.0, "lease_s": 60.0, "exclusive": True}
        lease = await post(line, "/api/v1/leases", request)
        if lease is None:
            continue
        place = f"rollouts/{lease['rollout_id']}/attempts/{lease['attempt']}"
        body = {"model": "m", "messages": [{"role": "user", "content": "6*7?"}]}
        await post(line, f"/{place}/v1/chat/completions", body, lease["key"])
        await post(line, f"/api/v1/{place}/result", {"outcome": "succeeded", "output": "ok"})
        done.add(lease["rollout_id"])


def cpu_by_thread(pid: int) -> dict[str, float]:
    """CPU seconds of each thread of a process, by its name."""
    seconds: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        stat = (task / "stat").read_text()
        name = "event loop" if task.name == str(pid) else stat[stat.index("(") + 1 : stat.rindex(")")]
        fields = stat.rpartition(")")[2].split()
        seconds[name] = seconds.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


async def workers(folder: Path, options: argparse.Namespace) -> None:
    """The event loop and the store's writer have a thread each, but one interpreter: the sum of their CPU bounds the
    server."""
    count, rollouts = options.workers or 500, options.rollouts or 3_000
    async with serving(folder) as (server, client):
        assert server.pid is not None
        await client.create_rollouts([order("r", number, question="6*7?") for number in range(rollouts)])
        done: set[str] = set()
        port = int(server.url.rpartition(":")[2])
        before, own, began = cpu_by_thread(server.pid), time.process_time(), time.perf_counter()
        await asyncio.gather(*(work(port, f"w{number}", done, rollouts) for number in range(count)))
        wall, own = time.perf_counter() - began, time.process_time() - own
        shares = {name: used - before.get(name, 0.0) for name, used in cpu_by_thread(server.pid).items()}
        assert len(done) == rollouts
    print(f"{count} workers, {rollouts} rollouts of one call: {rollouts / wall:.1f} rollouts/s")
    ranked = sorted(shares.items(), key=lambda share: -share[1])
    print(
        "ms of CPU for a rollout: " + ", ".join(f"{name} {1e3 * used / rollouts:.2f}" for name, used in ranked if used)
    )
    print(f"the workers and the engine, simulated: {own / wall:.2f} of a core")
    result(1e3 * sum(shares.values()) / rollouts)


def main() -> None:
    measures = {measure.__name__: measure for measure in (overhead, life, growth, workers)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=measures)
    parser.add_argument("--rollouts", type=int, help="100 of `overhead`, 8,000 of `growth`, 3,000 of `workers`")
    parser.add_argument("--workers", type=int, help="2 of `life`, 500 of `workers`")
    parser.add_argument("--agent", choices=("one_call", "text_to_sql"), default="one_call", help="of `life`")
    parser.add_argument("--steps", type=int, default=3, help="of `life`")
    parser.add_argument(
        "--flames", help="of `life`: write the server's stacks here (py-spy; the figures mean little then)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measures[options.what](Path(name), options))


if __name__ == "__main__":
    main()
