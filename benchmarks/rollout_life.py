"""What a rollout costs the server in a real run, from its order to its step: the CPU of the server's process, all its threads.

    python benchmarks/rollout_life.py                        an agent of one call
    python benchmarks/rollout_life.py --agent text_to_sql    examples/text_to_sql: LangGraph, 3.9 calls, its spans

    this process ─ order, wait, trajectories, scores, step ─► server process ◄─ lease, calls, spans, result ─ worker processes
        └─ scripted engine ◄──────── engine link ─────────────┘

The trainer's requests are those of its loop: a step of 128 rollouts in groups of 8 is ordered at once, waited for, read back 64 at a time,
scored and recorded. It runs in trees from f58d0e3 on (`benchmarks/against.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from rollout_overhead import AGENT, RUN_KEY

GROUP = 8
STEP = 128
FETCH = 64
REWRITTEN = 0.596
"""Of the checks say that the query is wrong: 2 · (1 + p + p²) = 3.9 calls of the text-to-SQL agent."""
SPY = ("py-spy", "record", "-t", "-r", "100", "--nonblocking", "-f", "raw")


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def child_pid(command: str) -> int:
    """Of the process of ours that runs `command`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and command in (folder / "cmdline").read_text():
                return int(folder.name)
        except OSError:  # it has ended meanwhile
            continue
    raise SystemExit(f"no process of ours runs {command!r}")


def make_tasks(agent: str, folder: Path) -> list[dict[str, Any]]:
    """Inputs of tasks."""
    if agent == "one_call":
        return [{"question": f"{number}*7?"} for number in range(64)]
    sys.path.insert(0, str(Path.cwd() / "examples" / "text_to_sql"))
    train_tasks = importlib.import_module("data").train_tasks
    return [task["input"] for task, _ in zip(train_tasks(folder / "databases"), range(64), strict=False)]


def make_reply(agent: str) -> Any:
    chance = random.Random(0)

    def reply(prompt: str) -> str:
        if agent == "one_call":
            return "forty-two"
        if "Say correct or incorrect" in prompt:
            return "incorrect" if chance.random() < REWRITTEN else "correct"
        return "SELECT name FROM sqlite_master"

    return reply


async def measure(folder: Path, agent: str, steps: int, workers: int, concurrency: int, flames: str | None) -> dict[str, float]:
    try:
        from lightningrl.control.client import ServerClient
        from lightningrl.engines.link import EngineLink
    except ImportError:  # f58d0e3
        from lightningrl.gateway.engine_link import EngineLink  # type: ignore[import-not-found,no-redef]
        from lightningrl.server.client import ServerClient  # type: ignore[import-not-found,no-redef]
    from lightningrl.records import Score
    from lightningrl.runtime.pool import WorkerPool
    from lightningrl.server.launcher import ServerProcess
    from lightningrl.server.settings import PolicySettings, ServerSettings
    from lightningrl.testing.scripted_engine import ScriptedEngine
    from lightningrl.testing.tokenizers import tiny_tokenizer
    from lightningrl.types import RolloutSpec, Task

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    inputs = make_tasks(agent, folder)
    if agent == "one_call":
        (folder / "agent.py").write_text(AGENT)
        place = folder
    else:
        place = Path.cwd() / "examples" / "text_to_sql"
    adapters = ("langchain",) if agent == "text_to_sql" else ()
    settings = ServerSettings(
        store_url=f"sqlite:///{folder / 'store.sqlite'}", run_key=RUN_KEY, policies={"policy": PolicySettings(model=folder / "policy")}
    )
    digests: dict[str, Any] = {"digests": {"rewards.match": "0123456789abcdef"}} if "digests" in {one.name for one in fields(Score)} else {}
    calls = 0

    async def run_step(client: ServerClient, step: int) -> None:
        nonlocal calls
        specs = [
            RolloutSpec(
                id=f"{step}-{number}",
                task=Task(id=f"t{(step * STEP + number) // GROUP % 64}", input=inputs[(step * STEP + number) // GROUP % 64]),
                group_id=f"{step}-{number // GROUP}",
                step=step,
                timeout_s=300.0,
            )
            for number in range(STEP)
        ]
        await client.create_rollouts(specs)
        waiting = {spec.id for spec in specs}
        scores: list[Score] = []
        while waiting:
            finished = list(await client.wait(sorted(waiting), 10.0, min(FETCH, len(waiting))))
            waiting -= set(finished)
            for start in range(0, len(finished), FETCH):
                for one in await client.trajectories(finished[start : start + FETCH]):
                    assert one.outcome == "succeeded" and one.transitions, one.error
                    calls += len(one.transitions)
                    advantages = {call.id: np.full(len(call.completion_ids), 0.25, np.float32) for call in one.transitions}
                    scores.append(
                        Score(
                            rollout_id=one.rollout_id,
                            attempt=one.attempt,
                            rewards={"match": 1.0},
                            reward=1.0,
                            advantages=advantages,
                            **digests,
                        )
                    )
        await client.set_scores(scores)
        await client.mark_trained(step + 1, [spec.id for spec in specs], {"reward": 1.0})

    engine = ScriptedEngine(tokenizer, reply=make_reply(agent), chunk_tokens=64)
    async with (
        ServerProcess(settings) as server,
        EngineLink(engine, server.url, RUN_KEY),
        ServerClient(server.url, RUN_KEY) as client,
        WorkerPool(
            server.url,
            RUN_KEY,
            "agent.py:answer",
            workers=workers,
            concurrency=concurrency,
            adapters=adapters,
            base_dir=place,
            log_folder=folder,
        ) as pool,
    ):
        pid = child_pid("lightningrl.server")
        await pool.wait_ready()
        await run_step(client, 0)
        calls = 0
        before, began = cpu_s(pid), time.perf_counter()
        profiler = None if flames is None else subprocess.Popen([*SPY, "-p", str(pid), "-o", flames])
        for step in range(1, steps + 1):
            await run_step(client, step)
        used, wall = cpu_s(pid) - before, time.perf_counter() - began
        if profiler is not None:
            profiler.send_signal(signal.SIGINT)
            profiler.wait()
    rollouts = steps * STEP
    return {"ms": 1e3 * used / rollouts, "calls": calls / rollouts, "rollouts_per_s": rollouts / wall, "rollouts": rollouts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", choices=("one_call", "text_to_sql"), default="one_call")
    parser.add_argument("--steps", type=int, default=3, help=f"of {STEP} rollouts, after one that warms up")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--flames", help="write stacks of the server here (needs py-spy; the figures mean little then)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(measure(Path(name), options.agent, options.steps, options.workers, options.concurrency, options.flames))
    print(", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    print(f"RESULT {found['ms']:.3f}")


if __name__ == "__main__":
    main()
