"""Gateway calls in flight: N calls are held as during a weight update, then released; all must be answered and recorded.

    python benchmarks/gateway_in_flight.py --calls 1000

The server runs in a process of its own; the engine (over the engine link) and the client share this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time

from gateway_cpu import RUN_KEY, serve

TARGET = 1000


async def hold_all(port: int, attempts: list[tuple[str, str]]) -> dict[str, float]:
    import httpx

    from lightningrl.engines.link import EngineLink
    from lightningrl.testing.scripted_engine import ScriptedEngine
    from lightningrl.testing.tokenizers import tiny_tokenizer

    engine = ScriptedEngine(tiny_tokenizer(), chunk_tokens=64)
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    limits = httpx.Limits(max_connections=None)
    async with (
        EngineLink(engine, f"http://127.0.0.1:{port}", RUN_KEY) as link,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=httpx.Timeout(300)) as client,
    ):
        await link.hold()

        async def call(path: str, key: str) -> int:
            answer = await client.post(f"{path}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
            return answer.status_code

        calls = [asyncio.create_task(call(*one)) for one in attempts]
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
    return {"held": held, "failed": sum(status != 200 for status in statuses), "release_s": round(time.perf_counter() - released, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=TARGET)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe()
        server = context.Process(target=serve, args=(theirs, folder, options.calls, None), daemon=True)
        server.start()
        port, attempts = ours.recv()
        result = asyncio.run(hold_all(port, attempts))
        ours.send("stop")
        result["recorded"] = ours.recv()["calls"]
        server.join()
    print(json.dumps({**result, "target": TARGET}))
    print(f"RESULT {min(result['held'], result['recorded']) - result['failed']:.0f}")


if __name__ == "__main__":
    main()
