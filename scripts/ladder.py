"""The ladder: RL alone against import -> curate -> tune -> RL, of an agent whose prompt shows too little.

    python scripts/ladder.py word_problems                    every row, seeds 0, 1 and 2, and the control of seed 0
    python scripts/ladder.py word_problems --seeds 0          one seed
    python scripts/ladder.py sums --rows traces               of these rows alone
    python scripts/ladder.py sums --report                    the table of what earlier calls left in runs/ladder

The agent is examples/calculator_smollm2 with one example in its prompt (`one_example.py`), the policy SmolLM2-135M. The
target is a greedy validation on 80 held-out tasks: 0.8 of sums and products; 0.6 of word problems, as far as RL takes
them with two examples in the prompt.

alone     RL on 64 rollouts a step
traces    `[warm_start] traces`: dialogues, imported and curated, then RL
teacher   `[warm_start] teacher`: the policy that `traces` of the first seed has left, asked 32 tasks, then RL
control   as `traces`, with a learning rate of 0 in RL

The dialogues stand for the logs of a larger model in production: chat messages as JSON lines, of twenty or forty
training tasks, with the agent's own prompt and right actions, which a script writes. No held-out task is among them,
and no held-out sentence. The minutes are those of the whole command, of loading and validations too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
EXAMPLE: Final = ROOT / "examples" / "calculator_smollm2"
ROWS: Final = ("alone", "traces", "teacher", "control")
STEP: Final = 64
"""Rollouts of a step."""
ASKED: Final = 32
"""Tasks that the teacher is asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Tasks of the example, and what is wanted of them."""

    tasks: str
    """The module that draws them."""
    recipe: str
    target: float
    dialogues: int
    """Traces that are imported."""
    steps: int
    """RL steps at most."""
    every: int
    """Steps from one validation to the next."""
    calculation: Callable[[dict[str, Any]], str]
    """Calculation that solves a task."""

    @property
    def runs(self) -> Path:
        return ROOT / "runs" / "ladder" / self.tasks


def in_signs(task: dict[str, Any]) -> str:
    """Write a sum that is told in words."""
    words = task["input"].removeprefix("What is ").removesuffix("?").split()
    return " ".join({"plus": "+", "times": "*"}.get(word, word) for word in words)


def as_drawn(task: dict[str, Any]) -> str:
    """Read the calculation that a word problem was drawn with."""
    return str(task["metadata"]["calculation"])


JOBS: Final = {
    job.tasks: job
    for job in (
        Job(tasks="sums", recipe="recipe.toml", target=0.8, dialogues=20, steps=20, every=1, calculation=in_signs),
        Job(
            tasks="word_problems",
            recipe="word_problems.toml",
            target=0.6,
            dialogues=40,
            steps=20,
            every=2,
            calculation=as_drawn,
        ),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", choices=JOBS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--report", action="store_true", help="run nothing; print what is there")
    arguments = parser.parse_args()
    job = JOBS[arguments.tasks]
    if not arguments.report:
        job.runs.mkdir(parents=True, exist_ok=True)
        for seed in arguments.seeds:
            for row in arguments.rows:
                if row != "control" or seed == arguments.seeds[0]:
                    run_row(job, row, seed)
    print(table(job))


def run_row(job: Job, row: str, seed: int) -> None:
    """Train a row in runs/ladder/TASKS/ROW-SEED, unless it was trained."""
    folder = job.runs / f"{row}-{seed}"
    if (job.runs / f"{folder.name}.json").is_file():
        print(f"{folder.name}: there already; delete it and its .json to run it again", flush=True)
        return
    settings = [
        "agent=one_example.py:answer",
        f"loop.steps={job.every if row == 'control' else job.steps}",
        f"loop.stop_at={job.target}",
        f"validation.every={job.every}",
        "loop.keep_checkpoints=1",
    ]
    tuning = ["tune.learning_rate=2e-5", "tune.epochs=3", "tune.batch=8", f"tune.seed={seed}"]
    if row in ("traces", "control"):
        settings += [f"warm_start.traces={json.dumps(str(import_dialogues(job)))}", *tuning]
    if row == "teacher":
        settings += [f"warm_start.teacher={json.dumps(str(export_teacher(job)))}", f"warm_start.tasks={ASKED}", *tuning]
    if row == "control":
        settings += ["learner.learning_rate=0.0"]
    began = time.monotonic()
    train(job, folder, seed, settings)
    minutes = (time.monotonic() - began) / 60
    (job.runs / f"{folder.name}.json").write_text(json.dumps({"minutes": minutes}) + "\n", encoding="utf-8")


def export_teacher(job: Job) -> Path:
    """Export the policy of the first run of traces."""
    weights = job.runs / "teacher-weights"
    if not weights.is_dir():
        first = min(path.with_suffix("") for path in job.runs.glob("traces-*.json"))
        lightningrl("export", str(weights), "--run", str(first))
    return weights


def import_dialogues(job: Job) -> Path:
    """Write the dialogues and import them."""
    imported = job.runs / "imported"
    if not imported.is_dir():
        export = job.runs / "dialogues.jsonl"
        export.write_text("".join(json.dumps(row) + "\n" for row in dialogues(job)), encoding="utf-8")
        lightningrl("import-traces", str(export), "--into", str(imported))
    return imported


def dialogues(job: Job) -> Iterator[dict[str, Any]]:
    """Yield dialogues of training tasks, as chat messages: the agent's prompt, right actions, the calculator."""
    sys.path.insert(0, str(EXAMPLE))
    agent: Any = importlib.import_module("agent")
    drawn: Any = importlib.import_module(job.tasks)
    for task in islice(drawn.train(), job.dialogues):
        turns = [
            ("system", agent.SYSTEM),
            *((shown["role"], shown["content"]) for shown in agent.SHOWN[:4]),
            ("user", task["input"]),
            ("assistant", json.dumps({"calculate": job.calculation(task)})),
            ("user", f"Calculator: {task['answer']}"),
            ("assistant", json.dumps({"answer": int(task["answer"])})),
        ]
        yield {"id": task["id"], "messages": [{"role": role, "content": text} for role, text in turns], "reward": 1.0}


def train(job: Job, folder: Path, seed: int, settings: list[str]) -> None:
    """Train the example with these settings, or go on where a killed call left it."""
    options = [word for setting in settings for word in ("--set", setting)]
    how = ["--resume"] if (folder / "run.json").is_file() else ["--seed", str(seed), *options]
    try:
        lightningrl("train", str(EXAMPLE / job.recipe), "--run", str(folder), *how)
    except subprocess.CalledProcessError:  # so ends a run, too, that took all its steps and learned nothing
        if not (folder / "run.json").is_file() or read_lines(folder)[-1]["step"] < job.steps:
            raise


def lightningrl(*words: str) -> None:
    print("lightningrl", *words, flush=True)
    subprocess.run([str(Path(sys.executable).with_name("lightningrl")), *words], check=True, cwd=ROOT)


def table(job: Job) -> str:
    """Return a line for each run, as markdown."""
    head = f"| run | tuned on | before RL | after RL | RL rollouts to {job.target:g} | teacher's | minutes |"
    ended = {path.stem for path in job.runs.glob("*-*.json")}
    names = [name for row in ROWS for name in sorted(ended) if name.startswith(row)]
    return "\n".join([head, "|---" * 7 + "|", *(describe(job, name) for name in names)])


def describe(job: Job, name: str) -> str:
    """Return a run's line: validations and rollouts, from its folder."""
    folder = job.runs / name
    scores = [(line["step"], line["validation/reward"]) for line in read_lines(folder) if "validation/reward" in line]
    reached = next((step for step, score in scores if score >= job.target), None)
    rollouts = f"never in {scores[-1][0] * STEP}" if reached is None else str(reached * STEP)
    rows_file = folder / "warm_start" / "tuning" / "tune" / "rows.json"
    rows = json.loads(rows_file.read_text(encoding="utf-8"))["training"] if rows_file.is_file() else "–"
    minutes = json.loads((job.runs / f"{name}.json").read_text(encoding="utf-8"))["minutes"]
    asked = ASKED if name.startswith("teacher") else 0
    return f"| {name} | {rows} rows | {scores[0][1]:.2f} | {scores[-1][1]:.2f} | {rollouts} | {asked} | {minutes:.1f} |"


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return a run's metrics, in their order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
