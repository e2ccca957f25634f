"""What rollouts cost beyond their agents: one by one, and a step's.

python benchmarks/rollouts.py overhead                  from order to trajectory, less the agent's own time
python benchmarks/rollouts.py life                      server CPU of a rollout in a run, order to step
python benchmarks/rollouts.py life --agent text_to_sql  the same of text-to-SQL: LangGraph, 3.9 calls, spans

this process ─ order, wait, trajectories, scores, step ─► server ◄─ lease, calls, spans, result ─ workers
    └─ scripted engine ◄─────── engine link ──────────────┘
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import AGENT, ROOT, RUN_KEY, cpu_by_process, result, serving

from lightningrl.loading import load_callable
from lightningrl.records import Score
from lightningrl.types import RolloutSpec, Task
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.pool import WorkerPool

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
    rollouts: int = options.rollouts
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
            workers=2,
            concurrency=24,
            adapters=("langchain",) if is_sql else (),
            base_dir=EXAMPLE if is_sql else folder,
            log_folder=folder,
        ) as pool,
    ):
        assert server.pid is not None
        await pool.wait_ready()
        await run_step(client, 0, questions)
        before, began = cpu_by_process(server.pid)[server.pid], time.perf_counter()
        calls = [await run_step(client, step, questions) for step in range(1, options.steps + 1)]
        used, wall = cpu_by_process(server.pid)[server.pid] - before, time.perf_counter() - began
    rollouts = options.steps * STEP
    print(f"{rollouts} rollouts of {sum(calls) / rollouts:.2f} calls, {rollouts / wall:.1f} a second")
    result(1e3 * used / rollouts)


def main() -> None:
    measures = {measure.__name__: measure for measure in (overhead, life)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=measures)
    parser.add_argument("--rollouts", type=int, default=100, help="of `overhead`")
    parser.add_argument("--agent", choices=("one_call", "text_to_sql"), default="one_call", help="of `life`")
    parser.add_argument("--steps", type=int, default=3, help="of `life`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measures[options.what](Path(name), options))


if __name__ == "__main__":
    main()
