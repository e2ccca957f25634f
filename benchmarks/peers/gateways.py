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
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Self

import httpx
from environment import ROOT, environment
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(ROOT / "benchmarks"))

from fake_engine import FakeEngine
from lean_client import Attempt
from measuring import RUN_KEY
from recorded_calls import Figures, Gateway, OurGateway, Scene, allow_many_sockets, measure

PEER: Final = "agentlightning==1.0.2"
START_S: Final = 60.0


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
        self.pid = self._process.pid
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

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        self._process.terminate()
        await asyncio.to_thread(self._process.wait)
        self._log.close()

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


def scenes(*, quick: bool) -> list[Scene]:
    share = 4 if quick else 1
    held = (100, 500) if quick else (100, 500, 1000, 2000)  # of theirs the last takes five minutes
    return [
        Scene(name="64 in flight, attempts of 16 calls", in_flight=64, attempts=64, turns=16),
        Scene(name="64 in flight, each its attempt's first", in_flight=64, attempts=1024 // share, turns=1),
        Scene(name="one at a time, attempts of 16 calls", in_flight=1, attempts=16 // share, turns=16),
        *(Scene(name=f"{calls:,} in flight", in_flight=calls, attempts=calls, turns=1, is_held=True) for calls in held),
    ]


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
    options = parser.parse_args()
    allow_many_sockets()
    by_scene = asyncio.run(compare(scenes(quick=options.quick), options.rounds))
    show(by_scene, options.rounds)


if __name__ == "__main__":
    main()
