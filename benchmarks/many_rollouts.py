"""A store of very many rollouts: whether what is asked of it all the time stays as quick as the store grows.

    python benchmarks/many_rollouts.py                          8,000 rollouts of 5 calls, in five parts
    python benchmarks/many_rollouts.py --rollouts 200000        the full size: minutes, about 2 GB

Each part is made (created, leased, called, finished, scored, trained), then the queries are timed, in CPU of this process. `RESULT` is the
dearest growth: a query's CPU at the last part ÷ its CPU at the first; a query that looks at all rollouts may grow with them, 5 at most.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightningrl.look.queries.run_queries import RunQueries
from lightningrl.records import RolloutFilter, Score
from lightningrl.store import SqlStore
from lightningrl.testing.store_conformance import make_call
from lightningrl.types import Outcome, RolloutSpec, Task

PARTS = 5
STEP = 250
CALLS = 5
TIMES = 5


async def make_step(store: SqlStore, step: int) -> list[str]:
    tasks = [Task(id=f"t{number}", input={"question": number}) for number in range(STEP // 8 + 1)]
    specs = [
        RolloutSpec(id=f"{step}-{number}", task=tasks[number // 8], group_id=f"{step}-{number // 8}", step=step) for number in range(STEP)
    ]
    await store.create_rollouts(specs)
    leases = [lease for lease in await asyncio.gather(*(store.lease("w", 3600.0) for _ in specs)) if lease is not None]

    async def live(lease: Any) -> Score:
        for number in range(CALLS):
            await store.append_call(make_call(lease, f"{lease.rollout_id}/{number}", range(100), range(40)))
        await store.finish_attempt(lease.rollout_id, lease.attempt, Outcome.SUCCEEDED, output="ok")
        return Score(rollout_id=lease.rollout_id, attempt=lease.attempt, rewards={"match": 1.0}, reward=1.0)

    await store.set_scores(await asyncio.gather(*map(live, leases)))
    ids = [spec.id for spec in specs]
    await store.mark_trained(step + 1, ids, {"reward": 1.0})
    return ids


async def measure(folder: Path, rollouts: int) -> dict[str, list[float]]:
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}", pragmas={"synchronous": 0})  # its fsyncs are not what is measured
    found: dict[str, list[float]] = {}
    steps = max(1, rollouts // (PARTS * STEP))
    for part in range(PARTS):
        began = time.process_time()
        for step in range(part * steps, (part + 1) * steps):
            ids = await make_step(store, step)
        found.setdefault("a rollout's life", []).append((time.process_time() - began) / (steps * STEP))
        asked: dict[str, Callable[[], Awaitable[Any]]] = {
            "list, newest 50": partial(store.list_rollouts, RolloutFilter(limit=50)),
            "list, a group": partial(store.list_rollouts, RolloutFilter(group_id=ids[0], limit=50)),
            "wait for 250 that ended": partial(store.wait_finished, ids, 0.0),
            "64 trajectories": partial(store.trajectories, ids[:64]),
            "health": RunQueries(store).health,
            "counts": store.counts,
            "steps (on resume)": store.steps,
        }
        for name, ask in asked.items():
            began = time.process_time()
            for _ in range(TIMES):
                await ask()
            found.setdefault(name, []).append((time.process_time() - began) / TIMES)
        told = ", ".join(f"{name} {1e3 * values[-1]:.2f} ms" for name, values in found.items())
        print(f"{(part + 1) * steps * STEP:>8} rollouts: {told}", flush=True)
    await store.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(measure(Path(name), options.rollouts))
    growth = {name: values[-1] / values[0] for name, values in found.items()}
    print(f"{PARTS} times as many rollouts cost: " + ", ".join(f"{name} × {value:.2f}" for name, value in growth.items()))
    print(f"RESULT {max(growth.values()):.2f}")


if __name__ == "__main__":
    main()
