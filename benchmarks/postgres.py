"""A run's calls with the store in PostgreSQL against SQLite: one server and several, worked at by many workers, in
turns in one run.

    python benchmarks/postgres.py --workers 50 --rollouts 400 --rounds 5

    workers (a process) ── HTTP ──► server process(es) ──► SQLite file | PostgreSQL (Debian's, started here, its disk
    synced)
                                          └── WebSocket ──► engine (in this process), which answers at once

Each worker leases a rollout at its server, makes its calls, reports its result, and leases the next. Counted: calls per
second by the wall clock; CPU of the servers, and of the database, per call. Checked: every answer that a worker got is
recorded, once, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from postgresql import PostgreSQL, serving_postgresql

from lightningrl.types import Outcome, RolloutSpec, Task
from lightningrl_client.control.client import ServerClient
from lightningrl_server.engines.link import EngineLink, EngineLinks
from lightningrl_server.launcher import ServerProcess, cpu_seconds
from lightningrl_server.settings import PolicySettings, ServerSettings
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

RUN_KEY = "the-run-key"
TEXT = ("SELECT name FROM singer WHERE age > 20 " * 20)[:59]
SCHEMA = ("Table 1: singer(id, name, age, country), concert(id, singer_id, year). " * 40)[:600]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--rollouts", type=int, default=400)
    parser.add_argument("--turns", type=int, default=4, help="calls of a rollout")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {}
    with serving_postgresql(syncs=True) as database, multiprocessing.get_context("spawn").Pool(1) as pool:
        for _ in range(options.rounds):
            for name, servers in (("SQLite", 1), ("PostgreSQL", 1), ("PostgreSQL, 2 servers", 2)):
                with tempfile.TemporaryDirectory() as folder:
                    url = f"sqlite:///{folder}/store.sqlite" if name == "SQLite" else database.new_url()
                    figures = asyncio.run(measure(Path(folder), url, servers, database, pool, options))
                rows.setdefault(name, []).append(figures)
    print(
        f"{'store':24}{'calls/s':>10}{'against SQLite':>16}{'server ms/call':>16}"
        f"{'against SQLite':>16}{'database ms/call':>18}"
    )
    middle = {
        name: {key: statistics.median(row[key] for row in of_name) for key in of_name[0]}
        for name, of_name in rows.items()
    }
    for name, of_name in rows.items():
        speed = statistics.median(
            row["calls_per_s"] / base["calls_per_s"] for row, base in zip(of_name, rows["SQLite"], strict=True)
        )
        cost = statistics.median(
            row["server_ms"] / base["server_ms"] for row, base in zip(of_name, rows["SQLite"], strict=True)
        )
        now = middle[name]
        print(
            f"{name:24}{now['calls_per_s']:10.0f}{speed:16.2f}{now['server_ms']:16.2f}{cost:16.2f}"
            f"{now['database_ms']:18.2f}"
        )
    print(f"{int(sum(row['calls'] for of_name in rows.values() for row in of_name))} calls, each recorded once")


async def measure(
    folder: Path, url: str, count: int, database: PostgreSQL, pool: Pool, options: argparse.Namespace
) -> dict[str, float]:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    settings = ServerSettings(
        store_url=url, run_key=RUN_KEY, policies={"policy": PolicySettings(model=folder / "policy")}
    )
    engine = ScriptedEngine(tokenizer, reply=lambda _: TEXT, chunk_tokens=len(TEXT) + 1)
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(ServerProcess(settings, log_path=folder / f"server-{number}.log"))
            for number in range(count)
        ]
        client = await stack.enter_async_context(ServerClient(servers[0].url, RUN_KEY))
        links = EngineLinks([EngineLink(engine, server.url, RUN_KEY) for server in servers])
        await links.start()
        stack.push_async_callback(links.close)
        work = partial(pool.apply, run_workers, ([server.url for server in servers], options.workers, options.turns))
        await order(client, "warm", options.workers)
        await asyncio.to_thread(work)
        names = await order(client, "counted", options.rollouts)
        used, database_used, began = server_cpu(servers), database.cpu_s(), time.perf_counter()
        answered: list[str] = await asyncio.to_thread(work)
        wall = time.perf_counter() - began
        used, database_used = server_cpu(servers) - used, database.cpu_s() - database_used
        rollouts = [
            one for start in range(0, len(names), 50) for one in await client.trajectories(names[start : start + 50])
        ]
    recorded = [call.id for rollout in rollouts for call in rollout.transitions]
    assert sorted(answered) == sorted(recorded), "every answer is recorded once, and nothing else is"
    calls = len(recorded)
    assert calls == options.rollouts * options.turns
    return {
        "calls": calls,
        "calls_per_s": calls / wall,
        "server_ms": 1000 * used / calls,
        "database_ms": 1000 * database_used / calls,
    }


async def order(client: ServerClient, kind: str, count: int) -> list[str]:
    names = [f"{kind}-{number}" for number in range(count)]
    await client.create_rollouts(
        [RolloutSpec(id=name, task=Task(id=name, input=name), group_id=name) for name in names]
    )
    return names


def run_workers(urls: list[str], workers: int, turns: int) -> list[str]:
    """Until nothing is queued; the ids of the answers that they got."""
    import uvloop

    answers: list[str] = []
    uvloop.run(run_all(urls, workers, turns, answers))
    return answers


async def run_all(urls: list[str], workers: int, turns: int, answers: list[str]) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(workers):
            group.create_task(run_worker(urls[number % len(urls)], f"w{number}", turns, answers))


async def run_worker(url: str, name: str, turns: int, answers: list[str]) -> None:
    import httpx

    async with ServerClient(url, RUN_KEY) as client, httpx.AsyncClient(base_url=url, timeout=120) as http:
        while (lease := await client.lease(name, lease_s=60)) is not None:
            messages: list[Any] = [{"role": "system", "content": SCHEMA}, {"role": "user", "content": lease.task.input}]
            for _ in range(turns):
                headers = {"authorization": f"Bearer {lease.key}"}
                answer = await http.post(
                    f"{lease.base_path}/chat/completions",
                    json={"model": "policy", "messages": messages},
                    headers=headers,
                )
                answer.raise_for_status()
                reply = answer.json()
                answers.append(reply["id"].removeprefix("chatcmpl-"))
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "An error; write it again."}]
            await client.finish_attempt(lease.rollout_id, lease.attempt, Outcome.SUCCEEDED, output="done")


def server_cpu(servers: list[ServerProcess]) -> float:
    return sum(cpu_seconds(server.pid or 0) or 0.0 for server in servers)


if __name__ == "__main__":
    main()
