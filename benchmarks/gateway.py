"""Gateway CPU per recorded, durable call: real HTTP, real SQLite, an engine over the real engine link, each in its own
process.

    python benchmarks/gateway.py --calls 2000 --concurrency 32
    python benchmarks/gateway.py --in-flight --calls 1000

    client process ── HTTP ──► server process (gateway + store) ◄── WebSocket ── engine process

Counted: user + system CPU of the server process, all its threads, between the first and the last call. Half of the
calls start a conversation (eight rollouts share a prompt, as a group does), half continue one.

`--in-flight`: so many calls are held as during a weight update, then released; all must be answered and recorded. The
engine and the client share this process then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measuring import RUN_KEY, result


def serve(pipe: Connection, folder: str, rollouts: int, profile: str | None) -> None:
    """The server process: gateway, store, engine link."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from lightningrl.types import RolloutSpec, Task
    from lightningrl_server.engines.registry import EngineRegistry
    from lightningrl_server.engines.socket import engine_route
    from lightningrl_server.gateway.app import create_gateway
    from lightningrl_server.rendering.renderer import PolicyRenderer
    from lightningrl_server.store import SqlStore
    from lightningrl_testing.tokenizers import tiny_tokenizer

    async def main() -> None:
        store = await SqlStore.open(f"sqlite:///{folder}/store.sqlite")
        engines = EngineRegistry(wait_s=60)
        gateway = create_gateway(store, engines, {"policy": PolicyRenderer(tiny_tokenizer())})
        specs = [
            RolloutSpec(id=f"r{i}", task=Task(id=f"t{i // 8}", input="x"), group_id=f"g{i // 8}")
            for i in range(rollouts)
        ]
        await store.create_rollouts(specs)
        leases = [await store.lease("bench", lease_s=3600) for _ in specs]

        async def mark(request: Request) -> JSONResponse:
            cpu = time.process_time()
            if profile:
                (profiler.enable if request.path_params["name"] == "start" else profiler.disable)()
            return JSONResponse({"cpu_s": cpu, "loop_s": time.thread_time(), "torch": "torch" in sys.modules})

        async def in_flight(request: Request) -> JSONResponse:
            return JSONResponse({"in_flight": sum(policy.in_flight for policy in engines.status())})

        import cProfile

        profiler = cProfile.Profile(time.thread_time)
        app = Starlette(
            routes=[
                *gateway.routes,
                engine_route(engines, RUN_KEY),
                Route("/mark/{name}", mark),
                Route("/in_flight", in_flight),
            ]
        )
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        config: Any = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http="httptools",
            ws="websockets-sansio",
            ws_per_message_deflate=False,
            timeout_keep_alive=600,
        )
        server = uvicorn.Server(config)
        pipe.send((listener.getsockname()[1], [(lease.base_path, lease.key) for lease in leases if lease is not None]))

        async def stop() -> None:
            await asyncio.to_thread(pipe.recv)
            server.should_exit = True

        stopping = asyncio.create_task(stop())
        await server.serve([listener])
        await stopping
        counts = await store.counts()
        pipe.send({"calls": counts.calls, "breaks": counts.breaks})
        await store.close()
        if profile:
            profiler.dump_stats(profile)

    import uvloop

    uvloop.run(main())


def run_engine(port: int, tokens: int) -> None:
    """The engine process: answers at once, with `tokens` tokens each time."""
    from lightningrl_server.engines.link import EngineLink
    from lightningrl_testing.scripted_engine import ScriptedEngine
    from lightningrl_testing.tokenizers import tiny_tokenizer

    async def main() -> None:
        text = ("SELECT name FROM singer WHERE age > 20 " * 20)[: tokens - 1]
        engine = ScriptedEngine(tiny_tokenizer(), reply=lambda _: text, chunk_tokens=tokens)
        async with EngineLink(engine, f"http://127.0.0.1:{port}", RUN_KEY):
            await asyncio.Event().wait()

    asyncio.run(main())


async def call_all(
    port: int, attempts: list[tuple[str, str]], turns: int, concurrency: int, prompt_chars: int, stream: bool
) -> dict[str, float]:
    """The client: every attempt is a conversation of `turns` calls."""
    import httpx

    gate = asyncio.Semaphore(concurrency)
    latencies: list[float] = []
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=120) as client:

        async def converse(number: int, path: str, key: str) -> None:
            schema = (f"Table {number // 8}: singer(id, name, age, country), concert(id, singer_id, year). " * 40)[
                :prompt_chars
            ]
            messages = [{"role": "system", "content": schema}, {"role": "user", "content": "Who is older than 20?"}]
            async with gate:
                for _ in range(turns):
                    started = time.perf_counter()
                    body = {"model": "gpt-4o", "messages": messages, "stream": stream}
                    answer = await client.post(
                        f"{path}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
                    )
                    answer.raise_for_status()
                    latencies.append(time.perf_counter() - started)
                    if not stream:
                        messages += [
                            answer.json()["choices"][0]["message"],
                            {"role": "user", "content": "An error; write it again."},
                        ]

        warm, rest = attempts[:16], attempts[16:]
        await asyncio.gather(*(converse(i, *attempt) for i, attempt in enumerate(warm)))
        latencies.clear()
        start = (await client.get("/mark/start")).json()
        began = time.perf_counter()
        await asyncio.gather(*(converse(i + 16, *attempt) for i, attempt in enumerate(rest)))
        wall = time.perf_counter() - began
        end = (await client.get("/mark/end")).json()
    calls = len(latencies)
    latencies.sort()
    assert not end["torch"], "the server process imported torch"
    return {
        "calls": calls,
        "cpu_ms_per_call": 1000 * (end["cpu_s"] - start["cpu_s"]) / calls,
        "loop_thread_ms_per_call": 1000 * (end["loop_s"] - start["loop_s"]) / calls,
        "calls_per_s": calls / wall,
        "p50_ms": 1000 * latencies[calls // 2],
        "p99_ms": 1000 * latencies[int(calls * 0.99)],
    }


async def hold_all(port: int, attempts: list[tuple[str, str]]) -> dict[str, float]:
    """Calls held by the engine's link, all at once, then released."""
    import httpx

    from lightningrl_server.engines.link import EngineLink
    from lightningrl_testing.scripted_engine import ScriptedEngine
    from lightningrl_testing.tokenizers import tiny_tokenizer

    engine = ScriptedEngine(tiny_tokenizer(), chunk_tokens=64)
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    limits = httpx.Limits(max_connections=None)
    async with (
        EngineLink(engine, f"http://127.0.0.1:{port}", RUN_KEY) as link,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=httpx.Timeout(300)) as client,
    ):
        await link.hold()

        async def call(path: str, key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await client.post(f"{path}/chat/completions", json=body, headers=headers)).status_code

        calls = [asyncio.create_task(call(*attempt)) for attempt in attempts]
        held = 0
        began = time.perf_counter()
        while held < len(calls) and time.perf_counter() - began < 120:
            await asyncio.sleep(0.2)
            held = int((await client.get("/in_flight")).json()["in_flight"])
        assert not any(task.done() for task in calls), "a call was answered while the engine was held"
        assert not engine.requests, "the engine was asked while it was held"
        engine.version = 1
        released = time.perf_counter()
        await link.release()
        statuses = await asyncio.gather(*calls)
    seconds = round(time.perf_counter() - released, 2)
    return {"held": held, "failed": sum(status != 200 for status in statuses), "release_s": seconds}


@contextmanager
def server_process(
    folder: str, rollouts: int, profile: str | None
) -> Iterator[tuple[int, list[tuple[str, str]], Connection]]:
    """The server's port, its attempts (path and key), and the pipe that ends it and then says what was recorded."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, folder, rollouts, profile), daemon=True)
    server.start()
    yield *ours.recv(), ours
    server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", action="store_true")
    parser.add_argument("--calls", type=int, help="2000, or 1000 in flight")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100, help="completion tokens per call")
    parser.add_argument("--prompt-chars", type=int, default=600, help="one token each in the tiny tokenizer")
    parser.add_argument("--stream", action="store_true", help="stream every call (each then starts a conversation)")
    parser.add_argument("--profile", help="write the server's cProfile here (the numbers then mean little)")
    options = parser.parse_args()
    rollouts = options.calls or 1000 if options.in_flight else (options.calls or 2000) // options.turns + 16
    numbers: dict[str, Any]
    with (
        tempfile.TemporaryDirectory() as folder,
        server_process(folder, rollouts, options.profile) as (port, attempts, pipe),
    ):
        if options.in_flight:
            numbers = asyncio.run(hold_all(port, attempts))
            pipe.send("stop")
            numbers["recorded"] = pipe.recv()["calls"]
            figure = min(numbers["held"], numbers["recorded"]) - numbers["failed"]
        else:
            engine = multiprocessing.get_context("spawn").Process(
                target=run_engine, args=(port, options.tokens), daemon=True
            )
            engine.start()
            numbers = asyncio.run(
                call_all(port, attempts, options.turns, options.concurrency, options.prompt_chars, options.stream)
            )
            engine.terminate()
            pipe.send("stop")
            numbers |= pipe.recv()
            numbers["bytes_per_call"] = (Path(folder) / "store.sqlite").stat().st_size // numbers["calls"]
            figure = numbers["cpu_ms_per_call"]
    print(json.dumps({name: round(value, 3) for name, value in numbers.items()}))
    result(figure)


if __name__ == "__main__":
    main()
