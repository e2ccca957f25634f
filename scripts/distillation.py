"""Distils a policy into one that was not trained: `credit.use = "teacher"` on examples/from_scratch, with its control.

    python scripts/distillation.py              a teacher, then three seeds of each row; five minutes
    python scripts/distillation.py --seeds 0    one seed
    python scripts/distillation.py --report     the table of what earlier calls left in runs/distillation

teacher   ten steps by reward, exported                rows  distil   the teacher's log-probs alone
                                                             reward   as many rollouts, by reward
                                                             control  the teacher is the student's own start

Each row is a plain `lightningrl train` of 64 rollouts a step; figures are greedy validations, before the first step and
after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
RUNS: Final = ROOT / "runs" / "distillation"
EXAMPLE: Final = ROOT / "examples" / "from_scratch"
START: Final = ROOT / "examples" / "text_to_sql" / "starter"
TEACHER: Final = RUNS / "teacher-weights"
STEPS: Final = 3
ROWS: Final = {"distil": TEACHER, "reward": None, "control": START}
"""Rows by name, with the teacher of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", action="store_true", help="run nothing; print what is there")
    arguments = parser.parse_args()
    if not arguments.report:
        make_teacher()
        for seed in arguments.seeds:
            for row, teacher in ROWS.items():
                if row != "control" or seed == arguments.seeds[0]:
                    train(RUNS / f"{row}-{seed}", teacher, seed)
    print(table())


def make_teacher() -> None:
    """Train it by reward, and export it."""
    if TEACHER.is_dir():
        return
    train(RUNS / "teacher", None, 7, steps=10)
    lightningrl("export", str(TEACHER), "--run", str(RUNS / "teacher"), "--step", "newest")


def train(folder: Path, teacher: Path | None, seed: int, *, steps: int = STEPS) -> None:
    if folder.is_dir():
        print(f"{folder.name}: there already; delete {folder.relative_to(ROOT)} to run it again", flush=True)
        return
    settings = [f"loop.steps={steps}", "validation.every=1", f"learner.total_steps={steps}"]
    if teacher is not None:
        settings += [
            f"policies.teacher.model={json.dumps(str(teacher))}",
            "policies.teacher.trainable=false",
            "credit.use=teacher",
            "credit.options.teacher=teacher",
        ]
    options = [word for setting in settings for word in ("--set", setting)]
    lightningrl("train", str(EXAMPLE), "--run", str(folder), "--seed", str(seed), *options)


def lightningrl(*words: str) -> None:
    print("lightningrl", *words, flush=True)
    subprocess.run([str(Path(sys.executable).with_name("lightningrl")), *words], check=True, cwd=ROOT)


def table() -> str:
    """Return the validations of each run as markdown."""
    lines = [
        f"| row | start | {' | '.join(f'step {step}' for step in range(1, STEPS + 1))} |",
        "|---" * (STEPS + 2) + "|",
    ]
    for row in ROWS:
        for folder in sorted(RUNS.glob(f"{row}-[0-9]*")):
            cells = " | ".join(f"{reward:.2f}" for reward in read_curve(folder))
            lines.append(f"| {folder.name} | {cells} |")
    return "\n".join(lines)


def read_curve(folder: Path) -> list[float]:
    """Return a run's validations in their order."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["validation/reward"] for line in lines if "validation/reward" in line]


if __name__ == "__main__":
    main()
