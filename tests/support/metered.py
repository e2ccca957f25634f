"""A server in a process of its own that tells how long each request held its event loop, and what memory it has.

A tick every millisecond looks at the clock and at the CPU time of the process; the longest time between two ticks is
what a request of somebody else would have waited. The smaller of both counts: a busy machine lengthens the one alone,
threads beside the loop the other.

async with metered_server(folder) as server:        # real server and store; a scripted engine behind the engine link
    attempt = await server.attempt()
    answer, pause_s = await server.timed(attempt, "chat/completions", body)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import msgspec

from lightningrl.records import Lease
from lightningrl.types import Outcome, RolloutSpec, Task, Trajectory
from lightningrl_client.control.client import ServerClient
from lightningrl_server import metrics, process
from lightningrl_server.engines.link import EngineLink
from lightningrl_server.settings import PolicySettings, ServerSettings
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

__all__ = ["MeteredServer", "metered_server"]

RUN_KEY: Final = "the-run-key"
PATIENCE_S: Final = 900.0
_TICK_S: Final = 0.001
_GAUGE: Final = struct.Struct("<qd")
"""Ticks since the start, and the longest pause since it was last set to zero, in seconds."""
_YARDSTICK: Final = json.dumps(
    [{"index": number, "text": f"piece {number}", "values": [number / 7, None]} for number in range(13_000)]
)
_YARDSTICK_S: Final = 0.02
"""CPU time that reading it takes where a target of 50 ms means 50 ms."""


def slowness() -> float:
    """How many times as long as on the machine that targets are set for the same work takes on this one just now; at least 1."""
    took = []
    for _ in range(3):
        began = time.process_time()
        json.loads(_YARDSTICK)
        took.append(time.process_time() - began)
    return max(1.0, min(took) / _YARDSTICK_S)


class Ticks(metrics.ServerMetrics):
    """The server's own watch, a thousand times a second, shown to another process."""

    async def watch(self, interval_s: float = _TICK_S) -> None:
        with Path(os.environ["PAUSE_GAUGE"]).open("r+b") as file, mmap.mmap(file.fileno(), _GAUGE.size) as gauge:
            for number in itertools.count(1):
                clock, cpu = time.perf_counter(), time.process_time()
                await asyncio.sleep(interval_s)
                pause = min(time.perf_counter() - clock - interval_s, time.process_time() - cpu)
                _GAUGE.pack_into(gauge, 0, number, max(pause, _GAUGE.unpack_from(gauge)[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeteredServer:
    """A running server."""

    url: str
    pid: int
    engine: ScriptedEngine
    client: ServerClient
    http: httpx.AsyncClient
    gauge: mmap.mmap
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def attempt(self) -> Lease:
        """A new rollout, leased."""
        rollout_id = f"r{next(self._numbers)}"
        await self.client.create_rollouts(
            [RolloutSpec(id=rollout_id, task=Task(id=rollout_id, input="x"), group_id="g")]
        )
        lease = await self.client.lease("w", lease_s=80_000)
        assert lease is not None and lease.rollout_id == rollout_id
        return lease

    async def post(self, lease: Lease, path: str, body: bytes, **headers: str) -> httpx.Response:
        """As the attempt's agent: below its base URL, or from the server's root where `path` begins with a slash."""
        url = self.url + (path if path.startswith("/") else f"{lease.base_path}/{path}")
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(
            url,
            content=body,
            headers={"authorization": f"Bearer {lease.key}", "content-type": "application/json", **given},
        )

    async def timed(self, lease: Lease, path: str, body: bytes, **headers: str) -> tuple[httpx.Response, float]:
        """The answer, and the longest that the request held the event loop, in seconds of the machine that targets are set for."""
        await self._tick()
        _GAUGE.pack_into(self.gauge, 0, _GAUGE.unpack_from(self.gauge)[0], 0.0)
        answer = await self.post(lease, path, body, **headers)
        await self._tick()
        return answer, float(_GAUGE.unpack_from(self.gauge)[1]) / slowness()

    async def end(self, lease: Lease) -> Trajectory:
        """Its attempt succeeds; what the trainer reads."""
        await self.client.finish_attempt(lease.rollout_id, lease.attempt, Outcome.SUCCEEDED, "done")
        (trajectory,) = await self.client.trajectories([lease.rollout_id])
        return trajectory

    @property
    def memory_bytes(self) -> int:
        """Resident, of the server's process."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def _tick(self) -> None:
        """Until what the server is at has been measured."""
        before = _GAUGE.unpack_from(self.gauge)[0]
        async with asyncio.timeout(PATIENCE_S):
            while _GAUGE.unpack_from(self.gauge)[0] < before + 2:
                await asyncio.sleep(_TICK_S)


@asynccontextmanager
async def metered_server(folder: Path, *, context_length: int = 32_768) -> AsyncIterator[MeteredServer]:
    """`folder` takes the store, the policy's tokenizer and the log."""
    engine = ScriptedEngine(tiny_tokenizer(), context_length=context_length)
    engine.tokenizer.save_pretrained(folder / "policy")
    settings = ServerSettings(
        store_url=f"sqlite:///{folder}/store.db",
        run_key=RUN_KEY,
        policies={engine.policy: PolicySettings(model=folder / "policy")},
    )
    (folder / "gauge").write_bytes(bytes(_GAUGE.size))
    with (folder / "server.log").open("ab") as log, (folder / "gauge").open("r+b") as file:
        server = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PAUSE_GAUGE": str(folder / "gauge")},
        )
        assert server.stdin is not None and server.stdout is not None
        try:
            server.stdin.write(settings.model_dump_json().encode() + b"\n")
            async with asyncio.timeout(PATIENCE_S):
                said = msgspec.json.decode(await server.stdout.readline(), type=dict[str, str | int])
            url = str(said["url"])
            async with (
                ServerClient(url, RUN_KEY) as client,
                httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http,
                EngineLink(engine, url, RUN_KEY),
            ):
                gauge = mmap.mmap(file.fileno(), _GAUGE.size)
                yield MeteredServer(url=url, pid=server.pid, engine=engine, client=client, http=http, gauge=gauge)
        finally:
            server.stdin.close()  # its lifeline
            await server.wait()


if __name__ == "__main__":
    metrics.ServerMetrics = Ticks  # type: ignore[misc]
    sys.exit(process.main())
