"""The doctor's bill beside what a run then took, and its findings on recipes that are well.

    python benchmarks/doctor_bill.py                     each shipped recipe: the doctor, the whole run, and real / bill
    python benchmarks/doctor_bill.py --steps 6           the same of runs of so many steps
    python benchmarks/doctor_bill.py --steps 4 --still   the same, learning nothing
    python benchmarks/doctor_bill.py --set loop.seed=7 --set learner.learning_rate=1e-4     … with settings of its own
    python benchmarks/doctor_bill.py --alarms 3          each shipped recipe with 3 seeds: complaints (none is due)

A figure that is out of the range of the bill has a `!`. Minutes depend on who else uses the machine in that minute; CPU
minutes hardly do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightningrl_viewer.reading.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("text_to_sql", "rag", "math_tools", "two_policies", "from_scratch", "node_agent")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "none"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What a command took, and said."""

    output: str
    status: int
    minutes: float
    cpu_minutes: float


def command(*arguments: str) -> Taken:
    before, began = cpu_seconds(), time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "lightningrl", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    minutes, cpu_minutes = (time.monotonic() - began) / 60, (cpu_seconds() - before) / 60
    if not ran.stdout.strip():
        sys.stderr.write(ran.stderr)
    return Taken(output=ran.stdout, status=ran.returncode, minutes=minutes, cpu_minutes=cpu_minutes)


def cpu_seconds() -> float:
    """Of all commands that have ended, with their processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(recipe: str, steps: int | None, given: Sequence[str]) -> bool:
    """One line: real / bill, and `!` where it lies out of the bill's range. Returns whether none does."""
    settings = [f"--set={setting}" for setting in given]
    if steps is not None:
        settings = [f"--set=loop.steps={steps}", f"--set=validation.every={steps}", *settings]
    looked = command("doctor", f"examples/{recipe}", "--json", *settings)
    bill = json.loads(looked.output)["bill"]
    folder = Path(tempfile.mkdtemp(prefix="lightningrl-bill-"))
    ran = command("train", f"examples/{recipe}", "--run", str(folder / "run"), *settings)
    try:
        real = totals(folder / "run", ran)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = {line["what"].lower().replace(" ", "_"): line for line in bill["lines"]}
    parts, is_covered = [], True
    for name, value in real.items():
        line = lines.get(name) or {"low": None}
        ranged = line["low"] is not None
        within = not ranged or line["low"] <= value <= line["high"]
        is_covered = is_covered and (within or "minutes" in name)
        between = (
            f" ({line['low'] / line['amount']:.2f}–{line['high'] / line['amount']:.2f})"
            if ranged and line["amount"]
            else ""
        )
        parts.append(f"{name} {value / bill[name]:.2f}{between}{'' if within else '!'}")
    print(
        f"{recipe:13} {'  '.join(parts)}  (doctor {60 * looked.minutes:.0f} s, {60 * looked.cpu_minutes:.0f} CPU s)",
        flush=True,
    )
    return is_covered


def totals(run: Path, ran: Taken) -> dict[str, float]:
    rows: list[dict[str, Any]] = list(read_metrics(run / "metrics.jsonl"))
    tokens = {
        name: sum(row.get(name, 0.0) + row.get(f"validation/{name}", 0.0) for row in rows)
        for name in ("prompt_tokens", "completion_tokens")
    }
    trained = sum(row.get("trained_tokens", 0.0) for row in rows)
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    steps = max(row["step"] for row in rows)
    return {
        "steps": steps,
        **tokens,
        "trained_tokens": trained,
        "minutes": ran.minutes,
        "cpu_minutes": ran.cpu_minutes,
        "disk_bytes": size,
    }


def alarms(recipe: str, seeds: int) -> int:
    """How many checks complained."""
    count = 0
    for seed in range(seeds):
        looked = command("doctor", f"examples/{recipe}", "--json", f"--set=loop.seed={seed}")
        wrong = [row for row in json.loads(looked.output)["checks"] if row["verdict"] != "pass"]
        count += len(wrong)
        print(
            f"{recipe:13} seed {seed}: {len(wrong)} complaints, "
            f"{60 * looked.minutes:.0f} s, {60 * looked.cpu_minutes:.0f} CPU s",
            flush=True,
        )
        for row in wrong:
            print(f"    {row['check']}: {row['verdict']}: {row['evidence']}", flush=True)
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of each run, instead of the recipe's")
    parser.add_argument("--still", action="store_true")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--alarms", type=int, default=0, metavar="SEEDS")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    asked = parser.parse_args()
    if asked.alarms:
        return int(sum(alarms(recipe, asked.alarms) for recipe in asked.recipes) > 0)
    given = [*asked.settings, *(["learner.learning_rate=1e-9"] if asked.still else [])]
    covered = [compare(recipe, asked.steps, given) for recipe in asked.recipes]
    print(f"tokens within the bill's range: {sum(covered)} of {len(covered)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
