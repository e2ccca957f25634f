"""The ladder: RL alone against import -> curate -> tune -> RL, of an agent whose prompt shows too little.

    python scripts/ladder.py                    every row, seeds 0, 1 and 2, and the control of seed 0
    python scripts/ladder.py --seeds 0          one seed
    python scripts/ladder.py --rows traces      of these rows alone
    python scripts/ladder.py --report           the table of what earlier calls left in runs/ladder

The agent is examples/calculator_smollm2 with one example in its prompt (`one_example.py`), the policy SmolLM2-135M, the
tasks sums and products, the target a greedy validation of 0.8 on 80 held-out tasks.

alone     RL on 64 rollouts a step
traces    `[warm_start] traces`: twenty dialogues, imported and curated, then RL
teacher   `[warm_start] teacher`: a policy trained before with two examples in its prompt, asked 32 tasks, then RL
control   as `traces`, with a learning rate of 0 in RL

The dialogues stand for the logs of a larger model in production: chat messages as JSON lines, of twenty training tasks,
with the agent's own prompt and right actions, which a script writes. No held-out task is among them. The minutes are
those of the whole command, of loading and validations too, but not of training the teacher.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RUNS: Final = ROOT / "runs" / "ladder"
EXAMPLE: Final = ROOT / "examples" / "calculator_smollm2"
TEACHER: Final = RUNS / "teacher-weights"
IMPORTED: Final = RUNS / "imported"
ROWS: Final = ("alone", "traces", "teacher", "control")
TARGET: Final = 0.8
STEP: Final = 64
"""Rollouts of a step."""
DIALOGUES: Final = 20
"""Traces that are imported."""
ASKED: Final = 32
"""Tasks that the teacher is asked."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--steps", type=int, default=20, help="RL steps at most (20)")
    parser.add_argument("--report", action="store_true", help="run nothing; print what is there")
    arguments = parser.parse_args()
    if not arguments.report:
        RUNS.mkdir(parents=True, exist_ok=True)
        for seed in arguments.seeds:
            for row in arguments.rows:
                if row != "control" or seed == arguments.seeds[0]:
                    run_row(row, seed, arguments.steps)
    print(table())


def run_row(row: str, seed: int, steps: int) -> None:
    """Train a row in runs/ladder/ROW-SEED, unless it was trained."""
    folder = RUNS / f"{row}-{seed}"
    if (RUNS / f"{folder.name}.json").is_file():
        print(f"{folder.name}: there already; delete it and its .json to run it again", flush=True)
        return
    settings = [
        "agent=one_example.py:answer",
        f"loop.steps={2 if row == 'control' else steps}",
        f"loop.stop_at={TARGET}",
        "validation.every=1",
    ]
    tuning = ["tune.learning_rate=2e-5", "tune.epochs=3", "tune.batch=8"]
    if row in ("traces", "control"):
        import_dialogues()
        settings += [f"warm_start.traces={json.dumps(str(IMPORTED))}", *tuning]
    if row == "teacher":
        make_teacher()
        settings += [f"warm_start.teacher={json.dumps(str(TEACHER))}", f"warm_start.tasks={ASKED}", *tuning]
    if row == "control":
        settings += ["learner.learning_rate=0.0"]
    began = time.monotonic()
    train(folder, seed, settings)
    minutes = (time.monotonic() - began) / 60
    (RUNS / f"{folder.name}.json").write_text(json.dumps({"minutes": minutes}) + "\n", encoding="utf-8")


def make_teacher() -> None:
    """Train the example as it is, two examples in its prompt, until it is right, and export it."""
    if not TEACHER.is_dir():
        train(RUNS / "teacher", 7, ["loop.stop_at=0.9", "validation.every=1"])
        lightningrl("export", str(TEACHER), "--run", str(RUNS / "teacher"))


def import_dialogues() -> None:
    """Write the dialogues and import them."""
    if IMPORTED.is_dir():
        return
    export = RUNS / "dialogues.jsonl"
    lines = [json.dumps(row) + "\n" for _, row in zip(range(DIALOGUES), dialogues(), strict=False)]
    export.write_text("".join(lines), encoding="utf-8")
    lightningrl("import-traces", str(export), "--into", str(IMPORTED))


def dialogues() -> Iterator[dict[str, Any]]:
    """Yield dialogues of the training tasks, as chat messages: the agent's prompt, right actions, the calculator."""
    sys.path.insert(0, str(EXAMPLE))
    import agent
    import sums

    for task in sums.train():
        words = task["input"].removeprefix("What is ").removesuffix("?").split()
        expression = " ".join(sums.SIGNS.get(word, word) for word in words)
        turns = [
            ("system", agent.SYSTEM),
            *((shown["role"], shown["content"]) for shown in agent.SHOWN[:4]),
            ("user", task["input"]),
            ("assistant", json.dumps({"calculate": expression})),
            ("user", f"Calculator: {task['answer']}"),
            ("assistant", json.dumps({"answer": int(task["answer"])})),
        ]
        yield {"id": task["id"], "messages": [{"role": role, "content": text} for role, text in turns], "reward": 1.0}


def train(folder: Path, seed: int, settings: list[str]) -> None:
    """Train the example with these settings, or go on where a killed call left it."""
    options = [word for setting in settings for word in ("--set", setting)]
    how = ["--resume"] if (folder / "run.json").is_file() else ["--seed", str(seed), *options]
    lightningrl("train", str(EXAMPLE), "--run", str(folder), *how)


def lightningrl(*words: str) -> None:
    print("lightningrl", *words, flush=True)
    subprocess.run([str(Path(sys.executable).with_name("lightningrl")), *words], check=True, cwd=ROOT)


def table() -> str:
    """Return a line for each run, as markdown."""
    head = "| run | tuned on | before RL | after RL | RL rollouts to 0.8 | teacher's | minutes |"
    lines = [head, "|---" * 7 + "|"]
    for row in ROWS:
        lines += [
            describe(row, RUNS / f"{row}-{path.stem.rpartition('-')[2]}") for path in sorted(RUNS.glob(f"{row}-*.json"))
        ]
    return "\n".join(lines)


def describe(row: str, folder: Path) -> str:
    """Return a run's line: validations and rollouts, from its folder."""
    scores = [(line["step"], line["validation/reward"]) for line in read_lines(folder) if "validation/reward" in line]
    reached = next((step for step, score in scores if score >= TARGET), None)
    rollouts = f"never in {scores[-1][0] * STEP}" if reached is None else str(reached * STEP)
    rows_file = folder / "warm_start" / "tuning" / "tune" / "rows.json"
    rows = json.loads(rows_file.read_text(encoding="utf-8"))["training"] if rows_file.is_file() else "–"
    minutes = json.loads((RUNS / f"{folder.name}.json").read_text(encoding="utf-8"))["minutes"]
    asked = ASKED if row == "teacher" else 0
    return (
        f"| {folder.name} | {rows} rows | {scores[0][1]:.2f} | {scores[-1][1]:.2f} | {rollouts} | {asked} "
        f"| {minutes:.1f} |"
    )


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return a run's metrics, in their order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
