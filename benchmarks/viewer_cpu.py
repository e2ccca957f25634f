"""The viewer's part of a run's server CPU while one person looks, told apart inside the server (at most 5 %).

    python benchmarks/viewer_cpu.py             the store of benchmarks/viewer.py, rollouts of 4 calls, a page every 2 s, the news
    python benchmarks/viewer_cpu.py --nobody    what its indices cost while nobody looks, of the whole server's CPU (at most 1 %)

The server's process imports `Meter` before anything else: of each callback of the loop and each job of a thread that began with a request
to the viewer it adds up the thread's CPU time. Callbacks of uvloop cannot be told apart, so that server runs on asyncio's own loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from lightningrl.store import SqlStore
from lightningrl.types import RolloutSpec, Task

P = ParamSpec("P")
T = TypeVar("T")

METER = "LIGHTNINGRL_BENCHMARK_METER"
"""Where a metered server writes: a line with the time, the viewer's CPU seconds and all of the process, every half second."""
SITE = "import sys\nsys.path.insert(0, {folder!r})\nimport viewer_cpu\nviewer_cpu.start_meter()\n"


class Meter:
    """CPU seconds of what began with a request to the viewer."""

    def __init__(self) -> None:
        self.is_looking = contextvars.ContextVar("is_looking", default=False)
        self._spent = 0.0
        self._lock = threading.Lock()

    def timed(self, function: Callable[P, T]) -> Callable[P, T]:
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                with self._lock:
                    self._spent += time.thread_time() - began

        return run

    def install(self) -> None:
        """In callbacks, in threads, and where requests come in."""
        run_callback, submit = asyncio.Handle._run, ThreadPoolExecutor.submit

        def run(handle: Any) -> None:
            looks = handle._context.get(self.is_looking, False)
            (self.timed(run_callback) if looks else run_callback)(handle)

        def submit_timed(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return submit(pool, self.timed(function) if self.is_looking.get() else function, *args, **kwargs)

        asyncio.Handle._run = run  # type: ignore[method-assign,assignment]
        ThreadPoolExecutor.submit = submit_timed  # type: ignore[method-assign,assignment]
        from lightningrl.view.guard import Guard

        answer = Guard.__call__

        async def call(guard: Any, *request: Any) -> None:
            self.is_looking.set(True)
            await answer(guard, *request)

        Guard.__call__ = call  # type: ignore[method-assign,assignment]

    def write(self, path: Path) -> None:
        """For ever."""
        with path.open("a", encoding="utf-8", buffering=1) as lines:
            while True:
                lines.write(f"{time.monotonic()} {self._spent} {time.process_time()}\n")
                time.sleep(0.5)


def start_meter() -> None:
    """In a server's process alone."""
    if "lightningrl.server" not in sys.orig_argv:
        return
    sys.modules["uvloop"] = types.SimpleNamespace(new_event_loop=asyncio.new_event_loop)  # type: ignore[assignment]
    meter = Meter()
    meter.install()
    threading.Thread(target=meter.write, args=(Path(os.environ[METER]),), daemon=True).start()


async def measure(store: Path, scratch: Path, rollouts: int, *, is_viewed: bool = True) -> tuple[float, float, float]:
    """CPU seconds of the viewer, those of the server without it, and how long the rollouts took."""
    from viewer import play_out, running

    folder, lines = scratch / "run", scratch / "meter"
    shutil.copytree(store, folder)
    os.environ[METER] = str(lines)
    async with running(folder, is_viewed=is_viewed) as (_, client):
        await asyncio.sleep(13.0 if is_viewed else 0.0)  # their first pages import what pages are made with
        began = time.monotonic()
        await play_out(client, rollouts)
        ended = time.monotonic()
    found = [[float(number) for number in line.split()] for line in lines.read_text(encoding="utf-8").splitlines()]
    first, *_, last = (line for line in found if began <= line[0] <= ended)
    looked = last[1] - first[1]
    return looked, last[2] - first[2] - looked, last[0] - first[0]


async def measure_indices(folder: Path, turns: int, rollouts: int = 32) -> float:
    """CPU seconds that the indices which only the viewer reads cost a store for a rollout of 4 calls without tools, as `running` records
    them: in turns with a store without them, the median."""
    from viewer import VIEWERS, play

    stores = [await SqlStore.open(f"sqlite:///{folder / name}") for name in ("with", "without")]
    with closing(sqlite3.connect(folder / "without", timeout=60)) as db:
        for name in VIEWERS:
            db.execute(f"DROP INDEX {name}")
    rng, more = np.random.default_rng(0), []
    for turn in range(turns):
        took = [0.0, 0.0]
        for which in ((0, 1), (1, 0))[turn % 2]:
            ids = [f"g{turn * rollouts + number:06d}" for number in range(rollouts)]
            specs = [RolloutSpec(id=name, task=Task(id="t", input="x"), group_id=name[:-1]) for name in ids]
            began = time.process_time()
            await stores[which].create_rollouts(specs)
            for _ in specs:
                await play(stores[which], rng, 1000, turns=4, tool_calls=0)
            took[which] = time.process_time() - began
        more.append((took[0] - took[1]) / rollouts)
    for store in stores:
        await store.close()
    return statistics.median(more)


def _metered(arguments: argparse.Namespace, *, is_viewed: bool) -> tuple[float, float, float]:
    """As `measure`, of a new server."""
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE.format(folder=str(Path(__file__).resolve().parent)), encoding="utf-8")
        os.environ["PYTHONPATH"] = str(site)
        return asyncio.run(measure(arguments.folder, Path(scratch), arguments.rollouts, is_viewed=is_viewed))


def main() -> None:
    from viewer import ROLLOUTS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made = Path(tempfile.gettempdir()) / f"lightningrl-viewer-{ROLLOUTS}"
    parser.add_argument("--folder", type=Path, default=made, help="the store that benchmarks/viewer.py made")
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--nobody", action="store_true", help="what the viewer's indices cost while nobody looks")
    arguments = parser.parse_args()
    if arguments.nobody:
        with tempfile.TemporaryDirectory() as scratch:
            indices = asyncio.run(measure_indices(Path(scratch), 20 * arguments.turns))
        whole = statistics.median(_metered(arguments, is_viewed=False)[1] for _ in range(arguments.turns)) / arguments.rollouts
        share = f"{indices / whole:+.1%} of a server's {1000 * whole:.1f} ms"
        print(f"nobody looks: the viewer's indices cost {1000 * indices:.3f} ms of CPU a rollout of 4 calls, {share}")
        return
    shares = []
    for _ in range(arguments.turns):
        looked, rest, took = _metered(arguments, is_viewed=True)
        shares.append(looked / rest)
        print(f"viewer {looked:.2f} s, the rest of the server {rest:.2f} s, in {took:.0f} s: {looked / rest:.1%}", flush=True)
    print(f"one person: {statistics.median(shares):.1%} of the server's other CPU")


if __name__ == "__main__":
    main()
