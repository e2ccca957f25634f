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
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from environment import ROOT, environment
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(ROOT / "benchmarks"))

from measuring import cpu_by_process, lightningrl, metrics_of, watch_steps

HERE: Final = Path(__file__).resolve().parent
STARTER: Final = ROOT / ".peers/two_tools_starter"
PEER: Final = ("torch==2.13.0", "trl==1.16.0", "jmespath")
JOBS: Final = ("single_call", "two_tools")
"""Each a folder with a recipe, and a function of `trl_jobs.py`."""
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
    words = ["--steps", str(steps), "--seed", str(seed)]
    if side == "ours":
        command = lightningrl("train", str(HERE / job / "recipe.toml"), "--run", str(folder), "--overwrite", *words)
        command += ["--set", f"validation.every={steps}", "--set", f"loop.checkpoint_every={steps}"]
    else:
        command = [str(environment("trl", PEER)), str(HERE / "trl_jobs.py"), job, str(folder), *words]
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    began = time.monotonic()
    looks = watch_steps(command, folder, cpu_by_process)
    marks = {step: (clock, sum(used.values())) for step, (clock, used) in looks.items()}
    scores = [line["validation/reward"] for line in metrics_of(folder) if "validation/reward" in line]
    first, last = min(marks), max(marks)
    wall, cpu = ((marks[last][place] - marks[first][place]) / (last - first) for place in (0, 1))
    return Figures(
        seed=seed, wall_s=wall, cpu_s=cpu, to_first_step_s=marks[first][0] - began, before=scores[0], after=scores[-1]
    )


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
    parser.add_argument("--out", type=Path, default=ROOT / "runs/peers", help="runs and their logs")
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
    show(by_job, steps)


if __name__ == "__main__":
    main()
