"""CPU of a credit X-ray: every installed method that the record allows, over 1,000 recorded rollouts of 10 calls (target: seconds).

And of the viewer's server for its pages, at 10,000 rollouts (target: at most 50 ms, and 200 kB).

python benchmarks/xray_cpu.py [rollouts]
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import httpx

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from recorded_runs import make_recipe, record_run

from lightningrl.look.reader import open_run
from lightningrl.run import Run
from lightningrl.training.lab.xray import open_xray
from lightningrl.view.app import create_viewer
from lightningrl.view.page import ViewedRun
from lightningrl.view.runs import OneRun

PER_STEP, GROUP, CALLS = 12, 8, 10
TURNS = {"credit.use": "turns", "credit.options.gamma": 0.9, "intermediate_rewards.turn.use": "tool_status"}


async def ask_pages(run: Run, paths: list[str]) -> None:
    async with open_run(run.folder) as stored:
        viewed = ViewedRun(name="run", folder=run.folder, run=stored)
        transport = httpx.ASGITransport(create_viewer(OneRun(viewed), key="key"))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", follow_redirects=True, timeout=600) as client:
            await client.get("/?key=key")
            for path in paths:
                first = time.perf_counter()
                answer = await client.get(path)  # also imports and compiles what pages need
                waited = time.perf_counter() - first
                began = time.process_time()
                for _ in range(10):
                    answer = await client.get(path)
                cpu = (time.process_time() - began) / 10
                kilobytes = len(answer.content) / 1000
                print(f"{path:40} server CPU {cpu * 1e3:6.1f} ms   {kilobytes:6.1f} kB   first answer after {waited:5.2f} s")
        viewed.credit.close()


async def of_group(run: Run, group: str) -> float:
    async with open_xray(run.folder) as xray:
        await xray.of_group(group)
    async with open_xray(run.folder) as xray:  # nothing is kept from before
        began = time.process_time()
        await xray.of_group(group)
        return time.process_time() - began


def main() -> None:
    rollouts = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    steps = round(rollouts / PER_STEP / GROUP)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        recipe = make_recipe(folder, {**TURNS, "loop.tasks_per_step": PER_STEP, "loop.group_size": GROUP})
        asyncio.run(record_run(folder, recipe, steps=steps, calls=CALLS))
        run = Run(folder)
        began = time.process_time()
        found = run.xray()
        cpu = time.process_time() - began
        print(f"{found.rollout_count} rollouts, {found.calls} calls, {len(found.methods)} methods: {cpu:.2f} s of CPU, reading included")
        group = found.rollouts[0].group_id
        print(f"one group, in the X-ray's own process: {asyncio.run(of_group(run, group)) * 1e3:.0f} ms of CPU")
        asyncio.run(
            ask_pages(run, [f"/credit?group={group}", f"/credit?rollout={found.rollouts[0].rollout_id}", "/credit", "/credit?of=run"])
        )
        print(f"RESULT {cpu:.2f}")


if __name__ == "__main__":
    main()
