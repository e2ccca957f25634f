"""Bytes on disk of a 50-turn rollout whose history grows (DESIGN §11: linear, at most 80 kB), and what a recorded call costs.

Each turn adds 120 prompt tokens (the tool's answer and the template) and samples 60; vocabulary of 150,000. One tool call per turn with
its arguments and 500 characters of result, rewards and advantages included. `--turns` shows that it is linear.

    python benchmarks/store_bytes.py
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np

from lightningrl.records import CallRecord, Lease, Score, ToolCallRecord
from lightningrl.store import SqlStore
from lightningrl.types import FinishReason, Outcome, RolloutSpec, SamplingSettings, Task, ToolCall, ToolStatus, Transition

PROMPT, COMPLETION, VOCABULARY = 120, 60, 150_000
WORDS = ["select", "from", "where", "join", "group", "by", "order", "limit", "count", "name", "id", "city", "country", "year", "singer"]


def make_call(lease: Lease, index: int, rng: np.random.Generator, parent: CallRecord | None) -> CallRecord:
    """Turn `index`, which goes on from the turn before."""
    before = () if parent is None else (parent.transition.prompt_ids, parent.transition.completion_ids)
    transition = Transition(
        id=f"{lease.rollout_id}/{lease.attempt}/{index}",
        policy="main",
        policy_version=12,
        prompt_ids=np.concatenate([*before, rng.integers(0, VOCABULARY, PROMPT, dtype=np.int32)]),
        completion_ids=rng.integers(0, VOCABULARY, COMPLETION, dtype=np.int32),
        logprobs=-rng.random(COMPLETION, dtype=np.float32),
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
    task = Task(id=rollout_id, input={"question": " ".join(rng.choice(WORDS, 20))}, answer=" ".join(rng.choice(WORDS, 20)))
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
        tools.append(ToolCallRecord(tool_call=call, span_id=f"{rng.integers(2**63):016x}", parent_span_id=f"{rng.integers(2**63):016x}"))
    await store.append_tool_calls(rollout_id, 1, tools)
    await store.finish_attempt(rollout_id, 1, Outcome.SUCCEEDED, {"answer": "x"})
    advantages = {f"{rollout_id}/1/{index}": np.full(COMPLETION, 0.5, np.float32) for index in range(turns)}
    await store.set_scores([Score(rollout_id=rollout_id, attempt=1, rewards={"match": 1.0}, reward=1.0, advantages=advantages)])


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


async def cost_per_call(rollouts: int, turns: int = 50) -> tuple[float, float]:
    """(CPU milliseconds, calls per second) of `append_call` with so many rollouts at once."""
    with tempfile.TemporaryDirectory() as folder:
        store = await SqlStore.open(f"sqlite:///{folder}/store.db")
        rng = np.random.default_rng(0)
        specs = [RolloutSpec(id=f"r{index}", task=Task(id="t", input=0), group_id="g") for index in range(rollouts)]
        await store.create_rollouts(specs)
        leases = [lease for _ in specs if (lease := await store.lease("w", 600.0))]
        batches = [make_calls(lease, turns, rng) for lease in leases]

        async def run(calls: list[CallRecord]) -> None:
            for call in calls:
                await store.append_call(call)

        await asyncio.gather(*(run(calls[:5]) for calls in batches))  # warm
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(run(calls[5:]) for calls in batches))
        count = rollouts * (turns - 5)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        await store.close()
        return cpu / count * 1e3, count / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="*", default=[10, 50, 100])
    for turns in parser.parse_args().turns:
        size = asyncio.run(bytes_per_rollout(turns))
        target = "  (target ≤ 80 kB)" if turns == 50 else ""
        print(f"stored, {turns:>3} turns            {size / 1000:8.1f} kB  {size / turns:6.0f} B per turn{target}")
    for rollouts in (1, 16, 128):
        cpu, rate = asyncio.run(cost_per_call(rollouts))
        print(f"append_call, {rollouts:>3} at once     {cpu:8.3f} ms CPU  {rate:6.0f} durable calls/s")
    print(f"RESULT {asyncio.run(bytes_per_rollout(50)):.0f}")


if __name__ == "__main__":
    main()
