"""CPU from a stored 50-turn rollout to samples (DESIGN §11: at most 3 ms): read, put together, credit, rows.

python benchmarks/trace_to_samples.py
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lightningrl.advantages.samples import build_samples
from lightningrl.store import SqlStore
from lightningrl.store.database import open_database
from lightningrl.store.reads import Reader
from lightningrl.store.trajectories import read_trajectories
from lightningrl.types import Trajectory, TrajectoryGroup
from lightningrl.wire import decode_trajectories, encode_trajectories

sys.path.insert(0, str(Path(__file__).parent))
from store_bytes import COMPLETION, record_rollout

TURNS, REPEATS = 50, 200


def cpu_ms(work: Callable[[], Any]) -> float:
    """Median CPU time of one call."""
    for _ in range(10):
        work()
    times = []
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e3


async def record(url: str) -> None:
    store = await SqlStore.open(url)
    await record_rollout(store, "r", TURNS, np.random.default_rng(0))
    await store.close()


def to_samples(trajectory: Trajectory, rows: Any) -> int:
    advantages = (tuple(np.full(COMPLETION, 0.5, np.float32) for _ in trajectory.transitions),)
    group = TrajectoryGroup(id="g", trajectories=(trajectory,))
    return len(build_samples([group], [advantages], rows=rows))


def main() -> None:
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
            "store → trajectory": cpu_ms(read),
            "trajectory → wire": cpu_ms(lambda: encode_trajectories((trajectory,))),
            "wire → trajectory": cpu_ms(lambda: decode_trajectories(wire)),
            "trajectory → rows, per call": cpu_ms(lambda: to_samples(trajectory, "call")),
            "trajectory → rows, merged": cpu_ms(lambda: to_samples(trajectory, "merged")),
        }
        database.close()
    for name, value in stages.items():
        print(f"{name:<32}{value:7.3f} ms CPU")
    print(f"{'wire':<32}{len(wire) / 1000:7.1f} kB")
    local = stages["store → trajectory"] + stages["trajectory → rows, merged"]
    print(f"{'store → merged rows':<32}{local:7.3f} ms CPU  (target ≤ 3 ms)")
    whole = sum(value for name, value in stages.items() if not name.endswith("per call"))
    print(f"{'the same through the server':<32}{whole:7.3f} ms CPU")
    print(f"RESULT {local:.3f}")


if __name__ == "__main__":
    main()
