"""What a stored rollout takes, whose history grows turn by turn.

    python benchmarks/stored.py bytes      bytes on disk of 50 turns (linear, at most 80 kB)
    python benchmarks/stored.py samples    CPU from 50 stored turns to samples (at most 3 ms): read, credit, rows

Each turn adds 120 prompt tokens (the tool's answer and the template) and samples 60; vocabulary of 150,000. One tool
call per turn with its arguments and 500 characters of result, rewards and advantages included.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring import median_cpu_ms, result

from lightningrl.records import Lease, Score
from lightningrl.types import (
    FinishReason,
    Outcome,
    RolloutSpec,
    SamplingSettings,
    Task,
    ToolCall,
    ToolStatus,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from lightningrl.wire import decode_trajectories, encode_trajectories
from lightningrl_credit.samples import build_samples
from lightningrl_server.records import CallRecord, ToolCallRecord
from lightningrl_server.store import SqlStore
from lightningrl_server.store.look import read_trajectories
from lightningrl_server.store.reader import Reader
from lightningrl_server.store.sql import open_database

TURNS = 50
PROMPT, COMPLETION, VOCABULARY = 120, 60, 150_000
KEYWORDS = ("select", "from", "where", "join", "group", "by", "order", "limit", "count")
WORDS = (*KEYWORDS, "name", "id", "city", "country", "year", "singer")


def make_call(
    lease: Lease,
    index: int,
    rng: np.random.Generator,
    parent: CallRecord | None,
    sizes: tuple[int, int, int] = (PROMPT, COMPLETION, VOCABULARY),
) -> CallRecord:
    """Turn `index`, which goes on from the turn before; `sizes`: new prompt tokens, completion tokens, vocabulary."""
    prompt, completion, vocabulary = sizes
    before = () if parent is None else (parent.transition.prompt_ids, parent.transition.completion_ids)
    transition = Transition(
        id=f"{lease.rollout_id}/{lease.attempt}/{index}",
        policy="main",
        policy_version=12,
        prompt_ids=np.concatenate([*before, rng.integers(0, vocabulary, prompt, dtype=np.int32)]),
        completion_ids=rng.integers(0, vocabulary, completion, dtype=np.int32),
        logprobs=-rng.random(completion, dtype=np.float32),
        finish_reason=FinishReason.STOP,
        parent_id=None if parent is None else parent.transition.id,
        sampling=SamplingSettings(temperature=1.0, max_tokens=256),
        agent="write",
        span_id=f"{rng.integers(2**63):016x}",
        tool_call_ids=(f"call_{index}",),
        started_at=time.time(),
        duration_s=0.5,
    )
    return CallRecord(
        rollout_id=lease.rollout_id,
        attempt=lease.attempt,
        call_key=f"{rng.integers(2**63):016x}",
        transition=transition,
        history_key=f"{rng.integers(2**63):016x}{rng.integers(2**63):016x}",
    )


def make_calls(lease: Lease, turns: int, rng: np.random.Generator) -> list[CallRecord]:
    """A conversation of so many turns."""
    calls: list[CallRecord] = []
    for index in range(turns):
        calls.append(make_call(lease, index, rng, calls[-1] if calls else None))
    return calls


async def record_rollout(store: SqlStore, rollout_id: str, turns: int, rng: np.random.Generator) -> None:
    """A whole rollout, from order to scores."""
    task = Task(
        id=rollout_id, input={"question": " ".join(rng.choice(WORDS, 20))}, answer=" ".join(rng.choice(WORDS, 20))
    )
    await store.create_rollouts([RolloutSpec(id=rollout_id, task=task, group_id="g")])
    lease = await store.lease("worker", 60.0)
    assert lease is not None
    tools = []
    for index, record in enumerate(make_calls(lease, turns, rng)):
        await store.append_call(record)
        call = ToolCall(
            id=f"call_{index}",
            name="execute",
            arguments=" ".join(rng.choice(WORDS, 12)),
            result=" ".join(rng.choice(WORDS, 85)),
            status=ToolStatus.OK,
            duration_s=0.01,
        )
        tools.append(
            ToolCallRecord(
                tool_call=call, span_id=f"{rng.integers(2**63):016x}", parent_span_id=f"{rng.integers(2**63):016x}"
            )
        )
    await store.append_tool_calls(rollout_id, 1, tools)
    await store.finish_attempt(rollout_id, 1, Outcome.SUCCEEDED, {"answer": "x"})
    advantages = {f"{rollout_id}/1/{index}": np.full(COMPLETION, 0.5, np.float32) for index in range(turns)}
    await store.set_scores(
        [Score(rollout_id=rollout_id, attempt=1, rewards={"match": 1.0}, reward=1.0, advantages=advantages)]
    )


async def bytes_per_rollout(turns: int, rollouts: int = 20) -> float:
    """Of the database file, write-ahead log folded in."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        empty = await SqlStore.open(f"sqlite:///{path}")
        await empty.close()
        before = path.stat().st_size
        store = await SqlStore.open(f"sqlite:///{path}")
        rng = np.random.default_rng(0)
        for index in range(rollouts):
            await record_rollout(store, f"run:train:{index:06d}", turns, rng)
        await store.close()
        return (path.stat().st_size - before) / rollouts


async def report_bytes() -> None:
    for turns in (10, TURNS, 100):
        size = await bytes_per_rollout(turns)
        print(f"{turns:>3} turns {size / 1000:8.1f} kB  {size / turns:6.0f} B per turn")
    result(await bytes_per_rollout(TURNS))


async def record(url: str) -> None:
    store = await SqlStore.open(url)
    await record_rollout(store, "r", TURNS, np.random.default_rng(0))
    await store.close()


def to_samples(trajectory: Trajectory, rows: Any) -> int:
    advantages = (tuple(np.full(COMPLETION, 0.5, np.float32) for _ in trajectory.transitions),)
    group = TrajectoryGroup(id="g", trajectories=(trajectory,))
    return len(build_samples([group], [advantages], rows=rows))


def report_samples() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/store.db"
        asyncio.run(record(url))
        database = open_database(url)
        reader = Reader()

        def read() -> Trajectory:
            with database.reading.connect() as db, db.begin():
                return read_trajectories(reader, db, ["r"])[0]

        trajectory = read()
        wire = encode_trajectories((trajectory,))
        stages = {
            "store → trajectory": median_cpu_ms(read),
            "trajectory → wire": median_cpu_ms(lambda: encode_trajectories((trajectory,))),
            "wire → trajectory": median_cpu_ms(lambda: decode_trajectories(wire)),
            "trajectory → rows, per call": median_cpu_ms(lambda: to_samples(trajectory, "call")),
            "trajectory → rows, merged": median_cpu_ms(lambda: to_samples(trajectory, "merged")),
        }
        database.close()
    for name, value in stages.items():
        print(f"{name:<32}{value:7.3f} ms CPU")
    print(f"{'wire':<32}{len(wire) / 1000:7.1f} kB")
    whole = sum(value for name, value in stages.items() if not name.endswith("per call"))
    print(f"{'all, through the server':<32}{whole:7.3f} ms CPU")
    result(stages["store → trajectory"] + stages["trajectory → rows, merged"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bytes", "samples"))
    if parser.parse_args().what == "bytes":
        asyncio.run(report_bytes())
    else:
        report_samples()


if __name__ == "__main__":
    main()
