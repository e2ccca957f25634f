"""Samples per second and what was learned, ours against TRL's GRPOTrainer on the CPU: same weights, tasks, reward,
budget; run about run.

    python benchmarks/peers/trainers.py                        both jobs, three seeds, 40 steps of 128 samples; an hour
    python benchmarks/peers/trainers.py --quick                one seed, 12 steps
    python benchmarks/peers/trainers.py --jobs single_call

    single_call   ours: an agent on the `openai` client, over HTTP, calls durable;  TRL: prompts and a reward function
    two_tools     ours: an agent that calls its tools itself;                      TRL: `environment_factory`

Counted from the first step's end to the last's: seconds on the clock, and CPU seconds of all processes (trainer,
server, workers), which other work on the machine changes less. Validations and checkpoints are outside. Accuracy is the
greedy policy's on held-out tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from environment import ROOT, environment
from rich.console import Console
from rich.table import Table

HERE: Final = Path(__file__).resolve().parent
STARTER: Final = ROOT / ".peers/two_tools_starter"
PEER: Final = ("torch==2.13.0", "trl==1.16.0", "jmespath")
JOBS: Final = {"single_call": "trl_queries.py", "two_tools": "trl_store.py"}
"""Each a folder with a recipe and what TRL runs."""
SAMPLES: Final = 128
"""Of a step: 16 tasks, 8 rollouts each."""
SIDES: Final = ("ours", "theirs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one run."""

    seed: int
    wall_s: float
    """Of a step."""
    cpu_s: float
    """Of a step, all processes."""
    to_first_step_s: float
    before: float
    """Accuracy before the first step."""
    after: float


def run(job: str, side: str, seed: int, steps: int, folder: Path) -> Figures:
    """Train once; the process and its children are watched from outside, both sides alike."""
    if side == "ours":
        command = [
            sys.executable,
            "-m",
            "lightningrl",
            "train",
            str(HERE / job / "recipe.toml"),
            "--run",
            str(folder),
            "--overwrite",
        ]
        command += ["--steps", str(steps), "--seed", str(seed), "--set", f"validation.every={steps}"]
        command += ["--set", f"loop.checkpoint_every={steps}"]
    else:
        command = [
            str(environment("trl", PEER)),
            str(HERE / job / JOBS[job]),
            str(folder),
            "--steps",
            str(steps),
            "--seed",
            str(seed),
        ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    log_path = folder.with_suffix(".log")
    began = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    marks: dict[int, tuple[float, float]] = {}  # step -> clock, CPU at its end
    try:
        while process.poll() is None:
            for line in read(folder / "metrics.jsonl"):
                if line["step"] and line["step"] not in marks:
                    marks[line["step"]] = (time.monotonic(), cpu_of_tree(process.pid))
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    lines = read(folder / "metrics.jsonl")
    scores = [line["validation/reward"] for line in lines if "validation/reward" in line]
    if process.returncode or len(scores) < 2 or len(marks) < 3:
        sys.exit(
            f"{side}, {job}: no whole run (status {process.returncode}):\n"
            f"{log_path.read_text(errors='replace')[-3000:]}"
        )
    first, last = min(marks), max(marks)
    wall, cpu = ((marks[last][place] - marks[first][place]) / (last - first) for place in (0, 1))
    return Figures(
        seed=seed, wall_s=wall, cpu_s=cpu, to_first_step_s=marks[first][0] - began, before=scores[0], after=scores[-1]
    )


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines so far."""
    try:
        return [json.loads(line) for line in path.read_bytes().rpartition(b"\n")[0].splitlines()]
    except FileNotFoundError:
        return []


def cpu_of_tree(pid: int) -> float:
    """CPU seconds of a process and of all that it started and that still run."""
    used = 0.0
    try:
        for process in (root := psutil.Process(pid), *root.children(recursive=True)):
            times = process.cpu_times()
            used += times.user + times.system
    except psutil.NoSuchProcess:
        pass
    return used


def show(by_job: dict[str, dict[str, list[Figures]]], steps: int) -> None:
    title = f"ours and {PEER[1]}, {steps} steps of {SAMPLES} samples, medians (of each seed) on this machine"
    columns = ("samples/s: ours", "theirs", "ratio", "CPU s/step: ours", "theirs", "ratio", "accuracy: ours", "theirs")
    table = Table("job", *columns, title=title, title_justify="left")
    for job, by in by_job.items():
        cells = []
        for name, gain in (("wall_s", True), ("cpu_s", False)):
            ours, theirs = (statistics.median(getattr(mine, name) for mine in by[side]) for side in SIDES)
            pairs = [
                (getattr(mine, name), getattr(other, name))
                for mine, other in zip(by["ours"], by["theirs"], strict=True)
            ]
            each = ", ".join(f"{(other / mine if gain else mine / other):.2f}" for mine, other in pairs)
            if gain:
                cells += [f"{SAMPLES / ours:.1f}", f"{SAMPLES / theirs:.1f}", f"{theirs / ours:.2f} ({each})"]
            else:
                cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f} ({each})"]
        cells += [
            f"{statistics.mean(run.before for run in by[side]):.3f} → "
            f"{statistics.mean(run.after for run in by[side]):.3f} "
            f"({', '.join(f'{mine.after:.3f}' for mine in by[side])})"
            for side in SIDES
        ]
        table.add_row(job, *cells)
    Console(width=200 if not sys.stdout.isatty() else None).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--quick", action="store_true", help="one seed, 12 steps")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs/peers", help="runs, their logs, and the figures of each run"
    )
    options = parser.parse_args()
    steps = options.steps or (12 if options.quick else 40)
    seeds: Sequence[int] = range(options.seeds or (1 if options.quick else 3))
    if "two_tools" in options.jobs and not STARTER.exists():
        print("making the starter of two_tools (once; minutes) …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, str(HERE / "two_tools/store_starter.py"), str(STARTER)], check=True)
    by_job: dict[str, dict[str, list[Figures]]] = {job: {side: [] for side in SIDES} for job in options.jobs}
    for seed in seeds:
        for job in options.jobs:
            for side in SIDES[:: -1 if seed % 2 else 1]:
                by_job[job][side].append(run(job, side, seed, steps, options.out.resolve() / f"{job}-{side}-{seed}"))
                print(f"{job}, {side}: {by_job[job][side][-1]}", file=sys.stderr, flush=True)
    record = {
        job: {side: [asdict(one) for one in figures] for side, figures in by.items()} for job, by in by_job.items()
    }
    (options.out / "trainers.json").write_text(json.dumps(record, indent=1))
    show(by_job, steps)


if __name__ == "__main__":
    main()
