"""What a rollout costs beyond its agent: ordered, leased, run by a warm worker, recorded, reported, read back.

    python benchmarks/rollout_overhead.py --rollouts 100

    this process ─ orders ─► server process ◄─ lease, call, spans, result ─ worker process      (scripted engine in this process)

`end to end` is from the order to the trajectory, one rollout at a time. The agent's own time is the same agent in this process against a
server that answers at once. A second run keeps the queue full and shows the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

RUN_KEY = "benchmark-run-key"
AGENT = """
import openai

client = openai.OpenAI(api_key="sk-the-users-own")

def answer(task):
    reply = client.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": task["question"]}])
    return reply.choices[0].message.content
"""
ANSWER = b"""{"id": "1", "object": "chat.completion", "created": 0, "model": "m",
"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}"""


async def answer_at_once(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that answers every chat completion."""
    if scope["type"] == "http":
        await receive()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})


def measure_agent(agent_file: Path, times: int) -> float:
    """Median seconds of the agent alone."""
    import uvicorn

    from lightningrl.loading import load_callable

    server = uvicorn.Server(uvicorn.Config(answer_at_once, port=0, log_level="error", lifespan="off"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    os.environ["OPENAI_BASE_URL"] = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    answer = load_callable(str(agent_file) + ":answer")
    seconds = []
    for _ in range(times + 3):
        started = time.perf_counter()
        answer({"question": "6*7?"})
        seconds.append(time.perf_counter() - started)
    server.should_exit = True
    return statistics.median(seconds[3:])


async def measure_rollouts(folder: Path, rollouts: int, workers: int, adapters: tuple[str, ...]) -> tuple[list[float], list[float], float]:
    """Seconds end to end and inside the agent, per rollout; then the rate with a full queue."""
    from lightningrl.control.client import ServerClient
    from lightningrl.engines.link import EngineLink
    from lightningrl.runtime.pool import WorkerPool
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

    def order(number: int, kind: str) -> RolloutSpec:
        return RolloutSpec(id=f"{kind}-{number}", task=Task(id=f"t{number}", input={"question": f"{number}*7?"}), group_id="g")

    end_to_end: list[float] = []
    inside: list[float] = []
    async with (
        ServerProcess(settings) as server,
        EngineLink(ScriptedEngine(tokenizer), server.url, RUN_KEY),
        ServerClient(server.url, RUN_KEY) as client,
        WorkerPool(server.url, RUN_KEY, "agent.py:answer", workers=workers, adapters=adapters, base_dir=folder, log_folder=folder) as pool,
    ):
        await pool.wait_ready()
        for number in range(rollouts + 3):
            started = time.perf_counter()
            await client.create_rollouts([order(number, "single")])
            await client.wait([f"single-{number}"], 30)
            (trajectory,) = await client.trajectories([f"single-{number}"])
            end_to_end.append(time.perf_counter() - started)
            inside.append(trajectory.duration_s)
            assert trajectory.outcome == "succeeded", trajectory.error
            assert len(trajectory.transitions) == 1
        started = time.perf_counter()
        await client.create_rollouts([order(number, "many") for number in range(rollouts)])
        await client.wait([f"many-{number}" for number in range(rollouts)], 60, rollouts)
        rate = rollouts / (time.perf_counter() - started)
    return end_to_end[3:], inside[3:], rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--adapter", action="append", default=[], help="instrument the workers, e.g. langchain")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agent.py").write_text(AGENT)
        end_to_end, inside, rate = asyncio.run(measure_rollouts(folder, options.rollouts, options.workers, tuple(options.adapter)))
        alone = measure_agent(folder / "agent.py", options.rollouts)
    median = statistics.median(end_to_end)
    print(f"end to end       {median * 1e3:7.2f} ms median, {max(end_to_end) * 1e3:7.2f} ms worst of {len(end_to_end)}")
    print(f"inside the agent {statistics.median(inside) * 1e3:7.2f} ms median (its call through the gateway)")
    print(f"the agent alone  {alone * 1e3:7.2f} ms median")
    print(f"full queue       {rate:7.1f} rollouts/s with {options.workers} workers")
    print(f"RESULT {median - alone:.5f}")


if __name__ == "__main__":
    main()
