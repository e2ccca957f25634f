"""Endurance: a long run's memory, descriptors and threads; many calls at once; kills. The first two take some minutes.

    python benchmarks/endurance.py                              all three
    python benchmarks/endurance.py rollouts --rollouts 20000    one run of so many, with two calls each
    python benchmarks/endurance.py held kills

rollouts  a server and two workers through a whole run; the server is looked at after each eighth
held      2,000 calls that the engine keeps until all are there
kills     `kill -9` of trainer, server and workers of one run, 200 times (tests/test_crash_train.py)
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from measuring import AGENT, ROOT, RUN_KEY, result, serving
from rollouts import STEP, run_step

from lightningrl_client.runtime.pool import WorkerPool

PARTS: Final = ("rollouts", "held", "kills")
LOOKS: Final = 8
TWO_CALLS: Final = (
    AGENT.replace("def answer", "def ask")
    + """

def answer(task):
    return ask({"question": f"{task['question']} Think of {ask(task)}"})
"""
)
KILLS: Final = ("tests/test_crash_train.py", "-k", "random", "--long", "-s", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Memory, descriptors and threads of a process at one moment."""

    megabytes: float
    """Resident memory, 10^6 bytes."""
    descriptors: int
    threads: int


def look_at(pid: int) -> Look:
    status = Path(f"/proc/{pid}/status").read_text()
    sizes = {name: int(number) for name, number in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}
    return Look(
        megabytes=sizes["VmRSS"] * 1024 / 1e6,
        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=sizes["Threads"],
    )


async def last(folder: Path, rollouts: int) -> None:
    """A run of so many rollouts; prints what server and workers have after each eighth of it."""
    (folder / "agent.py").write_text(TWO_CALLS)
    steps, calls = max(LOOKS, rollouts // STEP + bool(rollouts % STEP)), 0
    async with (
        serving(folder, reply=lambda _: "forty-two") as (server, client),
        WorkerPool(
            server.url, RUN_KEY, "agent.py:answer", workers=2, concurrency=8, base_dir=folder, log_folder=folder
        ) as pool,
    ):
        assert server.pid is not None
        await pool.wait_ready()
        print(f"{'rollouts':>9} {'calls':>7} {'a second':>9}   of the server: MB, descriptors, threads", flush=True)
        began = time.monotonic()
        looks: list[Look] = []
        for step in range(steps):
            calls += await run_step(client, step, [])
            if (step + 1) * LOOKS // steps > step * LOOKS // steps:
                looks.append(look_at(server.pid))
                now, done = looks[-1], (step + 1) * STEP
                speed = done / (time.monotonic() - began)
                print(
                    f"{done:9,} {calls:7,} {speed:9.1f}   {now.megabytes:6.0f} {now.descriptors:5} {now.threads:4}",
                    flush=True,
                )
    early, late = looks[LOOKS // 4 - 1], looks[-1]
    print(f"from a quarter of the run to its end: {late.megabytes - early.megabytes:+.0f} MB of the server")
    result(late.megabytes / early.megabytes, late.descriptors - early.descriptors, late.threads - early.threads)


def run_program(*words: str) -> None:
    if status := subprocess.run([sys.executable, *words], check=False, cwd=ROOT).returncode:
        sys.exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--calls", type=int, default=2_000, help="of `held`")
    options = parser.parse_args()
    parts = options.parts or PARTS
    if "rollouts" in parts:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(last(Path(folder), options.rollouts))
    if "held" in parts:
        run_program("benchmarks/recorded_calls.py", "--held", "--calls", str(options.calls))
    if "kills" in parts:
        run_program("-m", "pytest", *KILLS)


if __name__ == "__main__":
    main()
