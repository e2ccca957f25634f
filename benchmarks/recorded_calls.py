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
from types import TracebackType
from typing import Final, Protocol, Self

from fake_engine import ANSWER, FakeEngine
from lean_client import Attempt, bodies, send_all
from measuring import RUN_KEY, result

from lightningrl.types import RolloutSpec, Task
from lightningrl_client.control.client import ServerClient
from lightningrl_server.launcher import ServerProcess, cpu_seconds
from lightningrl_server.settings import PolicySettings, ServerSettings
from lightningrl_testing.tokenizers import tiny_tokenizer

__all__ = ["Figures", "Gateway", "OurGateway", "Scene", "allow_many_sockets", "measure"]

GROUP: Final = 8
"""Rollouts of a task."""


class Gateway(Protocol):
    """A running server that records calls."""

    @property
    def port(self) -> int: ...
    @property
    def pid(self) -> int: ...
    async def attempts(self, count: int) -> list[Attempt]:
        """New ones, each of a rollout of its own, ready to call."""
        ...

    async def recorded(self) -> int:
        """Calls kept so far."""
        ...


class OurGateway:
    """`lightningrl`'s server process, on a store on disk."""

    def __init__(self, folder: Path, engine: FakeEngine) -> None:
        tiny_tokenizer().save_pretrained(folder / "policy")
        policies = {"policy": PolicySettings(model=folder / "policy")}
        settings = ServerSettings(store_url=f"sqlite:///{folder}/store.sqlite", run_key=RUN_KEY, policies=policies)
        self._server = ServerProcess(settings, log_path=folder / "server.log")
        self._engine = engine
        self._made = 0

    async def __aenter__(self) -> Self:
        await self._server.start()
        self._client = ServerClient(self._server.url, RUN_KEY)
        await asyncio.to_thread(self._engine.link, self._server.url, RUN_KEY)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._engine.unlink)
        await self._client.close()
        await self._server.stop()

    @property
    def port(self) -> int:
        return int(self._server.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        assert self._server.pid is not None
        return self._server.pid

    async def attempts(self, count: int) -> list[Attempt]:
        numbers = range(self._made, self._made + count)
        self._made += count
        task = Task(id="t", input="x")
        await self._client.create_rollouts(
            [RolloutSpec(id=f"r{n}", task=task, group_id=f"g{n // GROUP}") for n in numbers]
        )
        leases = [await self._client.lease("bench", lease_s=86_000) for _ in numbers]
        return [Attempt(path=lease.base_path, key=lease.key) for lease in leases if lease is not None]

    async def recorded(self) -> int:
        return (await self._client.status()).counts.calls


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
    used = cpu_seconds(gateway.pid) or 0.0
    conversations = [
        (attempt, bodies(scene.turns, ANSWER, table=f"{number // GROUP}: singer"))
        for number, attempt in enumerate(attempts)
    ]
    load = await send_all(gateway.port, conversations, ANSWER, scene.in_flight)
    used = (cpu_seconds(gateway.pid) or 0.0) - used
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


async def measure_ours(scene: Scene) -> Figures:
    with tempfile.TemporaryDirectory() as folder, FakeEngine() as engine:
        async with OurGateway(Path(folder), engine) as gateway:
            await measure(gateway, engine, Scene(name="warm-up", in_flight=16, attempts=16, turns=scene.turns))
            return await measure(gateway, engine, scene)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--calls", type=int, help="2000, or 1000 held")
    parser.add_argument("--in-flight", type=int, default=32)
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
    figures = asyncio.run(measure_ours(scene))
    print(figures)
    result(figures.calls - figures.unrecorded if options.held else figures.cpu_ms)


if __name__ == "__main__":
    main()
