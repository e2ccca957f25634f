"""Server CPU and waiting of a recorded call, ours against agent-lightning's: one fake engine, one lean client, in
turns.

    python benchmarks/peers/gateways.py                    three rounds; a quarter of an hour
    python benchmarks/peers/gateways.py --rounds 1 --quick

    lean client ─ HTTP ─┬─► lightningrl server (SQLite, durable)          ── engine link ─┬─► fake engine
                        └─► agent-lightning server (in memory)            ── HTTP ────────┘

Both servers are up all the time, each as its own documentation starts it (theirs with an access log); only one is
spoken to at a time. Counted is user + system CPU of the server's process between the first call and the last. Ours
renders and tokenises the prompt, which theirs leaves to the engine (not counted).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import httpx
from environment import ROOT, environment
from fake_engine import ANSWER, FakeEngine
from lean_client import Attempt, Load, bodies, send_all
from rich.console import Console
from rich.table import Table

from lightningrl.types import RolloutSpec, Task
from lightningrl_client.control.client import ServerClient
from lightningrl_server.launcher import ServerProcess, cpu_seconds
from lightningrl_server.settings import PolicySettings, ServerSettings
from lightningrl_testing.tokenizers import tiny_tokenizer

PEER: Final = "agentlightning==1.0.2"
RUN_KEY: Final = "benchmark-run-key"
START_S: Final = 60.0


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
        await self._client.create_rollouts([RolloutSpec(id=f"r{n}", task=task, group_id=f"g{n // 8}") for n in numbers])
        leases = [await self._client.lease("bench", lease_s=86_000) for _ in numbers]
        return [Attempt(path=lease.base_path, key=lease.key) for lease in leases if lease is not None]

    async def recorded(self) -> int:
        return (await self._client.status()).counts.calls


class AgentLightning:
    """Their server, as `python -m agentlightning.server` runs it; its store is a dictionary."""

    def __init__(self, folder: Path, engine: FakeEngine) -> None:
        self._python = environment("agentlightning", [PEER], least=(3, 12))
        self._log = (folder / "agentlightning.log").open("wb")
        self._engine = engine
        self._rollouts: list[str] = []

    async def __aenter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        settings = ["host=127.0.0.1", f"port={self.port}", f"key={RUN_KEY}", "default_proxy.model_name=policy"]
        command = [str(self._python), "-m", "agentlightning.server", *settings]
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, cwd=Path(self._log.name).parent
        )
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"authorization": f"Bearer {RUN_KEY}"},
            timeout=120,
            trust_env=False,
        )
        async with asyncio.timeout(START_S):
            while not await self._answers():
                await asyncio.sleep(0.1)
        await self._post("/api/models", [{"model": "policy", "endpoint": self._engine.url}])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()
        self._process.terminate()
        await asyncio.to_thread(self._process.wait)
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def attempts(self, count: int) -> list[Attempt]:
        names = [f"r{n}" for n in range(len(self._rollouts), len(self._rollouts) + count)]
        self._rollouts += names
        await self._post("/api/rollouts", [{"rollout_id": name, "input": {"data_id": "x"}} for name in names])
        return [Attempt(path=f"/proxy/rollout/{name}/attempt/0/mode/train/openai/v1", key=RUN_KEY) for name in names]

    async def recorded(self) -> int:
        """Theirs are read back whole: there is no count."""
        calls = 0
        for name in self._rollouts:
            events = (
                await self._http.get(f"/api/rollouts/{name}/events?event_type=model_request&format=triplet")
            ).json()
            calls += sum(
                len(event["data"]["response_log_probs"]) == len(event["data"]["response_token_ids"]) == 100
                for event in events
            )
        return calls

    async def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise SystemExit(f"agent-lightning's server ended:\n{Path(self._log.name).read_text()}")
        try:
            return (await self._http.get("/healthz")).is_success
        except httpx.TransportError:
            return False

    async def _post(self, path: str, body: Any) -> None:
        (await self._http.post(path, json=body)).raise_for_status()


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """How calls come."""

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


def scenes(*, quick: bool) -> list[Scene]:
    share = 4 if quick else 1
    held = (100, 500) if quick else (100, 500, 1000, 2000)  # of theirs the last takes five minutes
    return [
        Scene(name="64 in flight, attempts of 16 calls", in_flight=64, attempts=64, turns=16),
        Scene(name="64 in flight, each its attempt's first", in_flight=64, attempts=1024 // share, turns=1),
        Scene(name="one at a time, attempts of 16 calls", in_flight=1, attempts=16 // share, turns=16),
        *(Scene(name=f"{calls:,} in flight", in_flight=calls, attempts=calls, turns=1, is_held=True) for calls in held),
    ]


async def measure(gateway: Gateway, engine: FakeEngine, scene: Scene) -> Figures:
    attempts = await gateway.attempts(scene.attempts)
    before = await gateway.recorded()
    if scene.is_held:
        await asyncio.to_thread(engine.hold, scene.in_flight)
    used = cpu_seconds(gateway.pid) or 0.0
    load: Load = await send_all(gateway.port, attempts, bodies(scene.turns, ANSWER), ANSWER, scene.in_flight)
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


async def compare(wanted: Sequence[Scene], rounds: int) -> dict[str, dict[str, list[Figures]]]:
    """By scene and gateway, a figure for each round; who goes first changes."""
    figures: dict[str, dict[str, list[Figures]]] = {scene.name: {"ours": [], "theirs": []} for scene in wanted}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightningrl-peers-")))
        engine = stack.enter_context(FakeEngine())
        ours: Gateway = await stack.enter_async_context(OurGateway(folder, engine))
        theirs: Gateway = await stack.enter_async_context(AgentLightning(folder, engine))
        pairs = [("ours", ours), ("theirs", theirs)]
        for _, gateway in pairs:  # imports, connections, caches
            await measure(gateway, engine, Scene(name="warm-up", in_flight=8, attempts=16, turns=2))
        for number in range(rounds):
            for scene in wanted:
                if scene.is_held and number:
                    continue  # once will do: no ratio is taken of them
                for name, gateway in pairs[:: -1 if number % 2 else 1]:
                    figures[scene.name][name].append(await measure(gateway, engine, scene))
                    print(
                        f"round {number + 1}: {scene.name}: {name} {figures[scene.name][name][-1]}",
                        file=sys.stderr,
                        flush=True,
                    )
    return figures


def show(by_scene: dict[str, dict[str, list[Figures]]], rounds: int) -> None:
    def middle(figures: Sequence[Figures], name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in figures))

    title = f"ours and {PEER}, medians of {rounds} interleaved rounds on this machine"
    columns = (
        "CPU ms/call: ours",
        "theirs",
        "ratio",
        "p50 ms: ours",
        "theirs",
        "ratio",
        "failed, unrecorded: ours",
        "theirs",
    )
    table = Table("scene", *columns, "at the engine at once", title=title, title_justify="left")
    for scene, by in by_scene.items():
        cells = []
        for name in ("cpu_ms", "p50_ms"):
            ours, theirs = (middle(by[who], name) for who in ("ours", "theirs"))
            cells += [f"{ours:.3g}", f"{theirs:.3g}", f"{ours / theirs:.3f}"]
        cells += [
            f"{sum(one.failed for one in by[who])}, {sum(one.unrecorded for one in by[who])}"
            for who in ("ours", "theirs")
        ]
        held = [" ".join(str(one.held) for one in by[who] if one.held is not None) for who in ("ours", "theirs")]
        table.add_row(scene, *cells, f"ours {held[0]}; theirs {held[1]}" if held[0] else "")
    Console(width=200 if not sys.stdout.isatty() else None).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer calls, at most 500 held")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs/peers/gateways.json", help="the figures of every round"
    )
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (hard, hard)
    )  # a socket for each call in flight, here and in the servers
    by_scene = asyncio.run(compare(scenes(quick=options.quick), options.rounds))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        scene: {who: [asdict(one) for one in figures] for who, figures in by.items()} for scene, by in by_scene.items()
    }
    options.out.write_text(json.dumps(record, indent=1))
    show(by_scene, options.rounds)


if __name__ == "__main__":
    main()
