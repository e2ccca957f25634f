"""Very many workers against one server: 500 simulated ones lease, call and report, each over one connection, as fast as they are answered.

    python benchmarks/many_workers.py --workers 500

What saturates first is the thread that is named first, at one rollout each time its CPU has passed: the event loop and the store's writer
have one thread each, but one interpreter, so their sum bounds the server. `RESULT` is that sum, in ms for a rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from rollout_life import child_pid
from rollout_overhead import RUN_KEY


class Line:
    """One kept-alive connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def post(self, path: str, body: Any, key: str = RUN_KEY) -> Any:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: server\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next((int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length")), 0)
        answer = await self._reader.readexactly(length)
        assert status.split()[1] in ("200", "204"), f"{status}: {answer!r}"
        return json.loads(answer) if answer else None


async def work(port: int, name: str, done: set[str], wanted: int) -> None:
    line = Line(*await asyncio.open_connection("127.0.0.1", port))
    while len(done) < wanted:
        lease = await line.post("/api/v1/leases", {"worker_id": name, "wait_s": 1.0, "lease_s": 60.0, "exclusive": True})
        if lease is None:
            continue
        place = f"rollouts/{lease['rollout_id']}/attempts/{lease['attempt']}"
        body = {"model": "m", "messages": [{"role": "user", "content": "6*7?"}]}
        await line.post(f"/{place}/v1/chat/completions", body, lease["key"])
        await line.post(f"/api/v1/{place}/result", {"outcome": "succeeded", "output": "ok"})
        done.add(lease["rollout_id"])


def thread_cpu(pid: int) -> dict[str, float]:
    """Seconds of each thread of a process, by its name."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        stat = (task / "stat").read_text()
        name = "event loop" if task.name == str(pid) else stat[stat.index("(") + 1 : stat.rindex(")")]
        fields = stat.rpartition(")")[2].split()
        found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


async def measure(folder: Path, workers: int, rollouts: int) -> None:
    from lightningrl.control.client import ServerClient
    from lightningrl.engines.link import EngineLink
    from lightningrl.server.launcher import ServerProcess
    from lightningrl.server.settings import PolicySettings, ServerSettings
    from lightningrl.testing.scripted_engine import ScriptedEngine
    from lightningrl.testing.tokenizers import tiny_tokenizer
    from lightningrl.types import RolloutSpec, Task

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    settings = ServerSettings(
        store_url=f"sqlite:///{folder / 'store.sqlite'}", run_key=RUN_KEY, policies={"policy": PolicySettings(model=folder / "policy")}
    )
    async with (
        ServerProcess(settings) as server,
        EngineLink(ScriptedEngine(tokenizer, chunk_tokens=64), server.url, RUN_KEY),
        ServerClient(server.url, RUN_KEY) as client,
    ):
        pid = child_pid("lightningrl.server")
        await client.create_rollouts(
            [RolloutSpec(id=f"r{n}", task=Task(id=f"t{n // 8}", input="6*7?"), group_id=f"g{n // 8}") for n in range(rollouts)]
        )
        done: set[str] = set()
        before, own, began = thread_cpu(pid), time.process_time(), time.perf_counter()
        await asyncio.gather(*(work(int(server.url.rpartition(":")[2]), f"w{n}", done, rollouts) for n in range(workers)))
        wall, own = time.perf_counter() - began, time.process_time() - own
        shares = {name: used - before.get(name, 0.0) for name, used in thread_cpu(pid).items()}
        assert len(done) == rollouts
        counts = (await client.status()).counts
    print(f"{workers} workers, {rollouts} rollouts of one call, {counts.attempts} attempts: {rollouts / wall:.1f} rollouts/s")
    told = sorted(shares.items(), key=lambda one: -one[1])
    print("ms of CPU for a rollout: " + ", ".join(f"{name} {1e3 * used / rollouts:.2f}" for name, used in told if used))
    print(f"the workers and the engine, simulated: {own / wall:.2f} of a core")
    print(f"RESULT {1e3 * sum(shares.values()) / rollouts:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--rollouts", type=int, default=3_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(Path(name), options.workers, options.rollouts))


if __name__ == "__main__":
    main()
