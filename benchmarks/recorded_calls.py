"""Server CPU per recorded, durable call: the server's process on SQLite, a fake engine over the real engine link, a
lean client.

    python benchmarks/recorded_calls.py --calls 2000 --in-flight 32
    python benchmarks/recorded_calls.py --held --calls 1000

    lean client ── HTTP ──► server process (gateway + store) ◄── WebSocket ── fake engine, in its own process

Counted: user + system CPU of the server process, all its threads, between the first and the last call. Half of the
calls start a conversation (eight rollouts share a prompt, as a group does), half continue one.

`--held`: the engine keeps so many calls until all are there; all must be answered and recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, Self

import httpx
from fake_engine import ANSWER, FakeEngine
from lean_client import Attempt, bodies, send_all
from measuring import ROOT, RUN_KEY, cpu_by_process, result, server_of

from lightningrl_testing.tokenizers import tiny_tokenizer

__all__ = ["Figures", "Gateway", "OurGateway", "Scene", "allow_many_sockets", "measure"]

GROUP: Final = 8
"""Rollouts of a task."""


class Gateway(Protocol):
    """A running server that records calls."""

    port: int
    pid: int

    async def attempts(self, count: int) -> list[Attempt]:
        """New ones, each of a rollout of its own, ready to call."""
        ...

    async def recorded(self) -> int:
        """Calls kept so far."""
        ...


class OurGateway:
    """The server process of a tree of ours, on a store on disk, asked over HTTP as anybody may: so every tree is asked
    alike."""

    def __init__(self, folder: Path, engine: FakeEngine, tree: Path = ROOT) -> None:
        tiny_tokenizer().save_pretrained(folder / "policy")
        policies = {"policy": {"model": str(folder / "policy")}}
        settings = {"store_url": f"sqlite:///{folder}/store.sqlite", "run_key": RUN_KEY, "policies": policies}
        self._serving = server_of(tree, settings)
        self._engine = engine
        self._made = 0

    async def __aenter__(self) -> Self:
        server, url = await asyncio.to_thread(self._serving.__enter__)
        self.pid = server.pid
        self.port = int(url.rpartition(":")[2])
        headers = {"authorization": f"Bearer {RUN_KEY}"}
        self._client = httpx.AsyncClient(base_url=f"{url}/api/v1", headers=headers, timeout=60.0)
        await asyncio.to_thread(self._engine.link, url, RUN_KEY)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._engine.unlink)
        await self._client.aclose()
        await asyncio.to_thread(self._serving.__exit__, None, None, None)

    async def attempts(self, count: int) -> list[Attempt]:
        numbers = range(self._made, self._made + count)
        self._made += count
        task = {"id": "t", "input": "x"}
        rollouts = [{"id": f"r{n}", "task": task, "group_id": f"g{n // GROUP}"} for n in numbers]
        (await self._client.post("/rollouts", json={"rollouts": rollouts})).raise_for_status()
        return [await self._lease() for _ in numbers]

    async def _lease(self) -> Attempt:
        answer = await self._client.post("/leases", json={"worker_id": "bench", "lease_s": 86_000})
        lease = answer.raise_for_status().json()
        return Attempt(path=f"/rollouts/{lease['rollout_id']}/attempts/{lease['attempt']}/v1", key=lease["key"])

    async def recorded(self) -> int:
        return int((await self._client.get("/status")).raise_for_status().json()["counts"]["calls"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Number of calls in flight, and of calls of an attempt."""

    name: str
    in_flight: int
    attempts: int
    turns: int
    is_held: bool = False
    """The engine keeps them until all are there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one scene in one round, of one gateway."""

    cpu_ms: float
    """Of the server, per call."""
    p50_ms: float
    wall_s: float
    calls: int
    failed: int
    unrecorded: int
    held: int | None
    """Calls at the engine at once; None where nothing was held."""


async def measure(gateway: Gateway, engine: FakeEngine, scene: Scene) -> Figures:
    attempts = await gateway.attempts(scene.attempts)
    before = await gateway.recorded()
    if scene.is_held:
        await asyncio.to_thread(engine.hold, scene.in_flight)
    used = cpu_by_process(gateway.pid)[gateway.pid]
    conversations = [
        (attempt, bodies(scene.turns, ANSWER, table=f"{number // GROUP}: singer"))
        for number, attempt in enumerate(attempts)
    ]
    load = await send_all(gateway.port, conversations, ANSWER, scene.in_flight)
    used = cpu_by_process(gateway.pid)[gateway.pid] - used
    for failure in load.failures[:1]:
        print(
            f"{type(gateway).__name__}, {scene.name}: {len(load.failures)} failed, the first: {failure}",
            file=sys.stderr,
        )
    answered = len(load.latencies_s)
    return Figures(
        cpu_ms=1000 * used / max(1, answered),
        p50_ms=load.p50_ms() if answered else float("nan"),
        wall_s=load.wall_s,
        calls=answered,
        failed=len(load.failures),
        unrecorded=answered - (await gateway.recorded() - before),
        held=await asyncio.to_thread(engine.most_held) if scene.is_held else None,
    )


def allow_many_sockets() -> None:
    """Let this process and the servers that it starts have a socket for each call in flight."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def measure_ours(scene: Scene, tree: Path) -> Figures:
    with tempfile.TemporaryDirectory() as folder, FakeEngine() as engine:
        async with OurGateway(Path(folder), engine, tree) as gateway:
            await measure(gateway, engine, Scene(name="warm-up", in_flight=16, attempts=16, turns=scene.turns))
            return await measure(gateway, engine, scene)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--calls", type=int, help="2000, or 1000 held")
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose server, in the .venv of that tree")
    options = parser.parse_args()
    allow_many_sockets()
    calls, turns = options.calls or (1000 if options.held else 2000), 1 if options.held else 2
    scene = Scene(
        name="held" if options.held else "recorded",
        in_flight=calls if options.held else options.in_flight,
        attempts=calls // turns,
        turns=turns,
        is_held=options.held,
    )
    figures = asyncio.run(measure_ours(scene, options.tree.resolve()))
    print(figures)
    result(figures.calls - figures.unrecorded if options.held else figures.cpu_ms)


if __name__ == "__main__":
    main()
