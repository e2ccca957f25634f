"""Where a training step's CPU goes: seconds of the trainer (engine, learner and loop), the server and the workers, by step.

    python benchmarks/step_cpu.py                                              examples/text_to_sql
    python benchmarks/step_cpu.py benchmarks/peers/two_tools/recipe.toml       another recipe (its starter: benchmarks/peers/trainers.py)
    python benchmarks/step_cpu.py --set runtime.concurrency=48

Workers run the agent: its framework, its HTTP client, its tools. Counted from the third step's end to the last but one's.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from earlier import ROOT
from start import descendants

from lightningrl.look.metrics import read_metrics

FIRST = 3
PARTS = {"lightningrl.server": "server", "lightningrl.runtime.worker": "workers"}
"""Of whose command lines; all else that it starts is `other`."""


def cpu_by_part(pid: int) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for one, seconds in descendants(pid):
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{one}/cmdline").read_bytes().decode(errors="replace").split("\0")
            found[next((name for module, name in PARTS.items() if module in words), "trainer" if one == pid else "other")] += seconds
    return found


def ended_steps(run: Path) -> list[float]:
    """Seconds of each so far."""
    path = run / "metrics.jsonl"
    return [line["seconds"] for line in read_metrics(path) if "seconds" in line] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=str(ROOT / "examples/text_to_sql"))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.steps < FIRST + 2:
        parser.error(f"--steps {options.steps}: the first {FIRST} and the last are not counted; ask for at least {FIRST + 2}")
    with tempfile.TemporaryDirectory(prefix="lightningrl-step-") as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "lightningrl", "train", options.recipe, "--run", str(run), "--steps", str(options.steps)]
        command += [f"--set={setting}" for setting in ("validation.every=0", *options.settings)]
        with (Path(scratch) / "output.txt").open("w+") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
            marks: dict[int, tuple[float, dict[str, float]]] = {}  # steps ended -> clock, CPU seconds
            while process.poll() is None:
                count = len(ended_steps(run))
                if FIRST <= count < options.steps and count not in marks:
                    marks[count] = time.monotonic(), cpu_by_part(process.pid)
                time.sleep(0.02)
            if process.returncode or len(marks) < 2:
                output.seek(0)
                sys.exit(f"{' '.join(command)}: no whole run\n{output.read()[-3000:]}")
        middle = statistics.median(ended_steps(run)[FIRST:])
    (first, (began, before)), (last, (ended, after)) = min(marks.items()), max(marks.items())
    steps = last - first
    used = {part: (seconds - before.get(part, 0.0)) / steps for part, seconds in after.items()}
    print(f"a step: {(ended - began) / steps:.2f} s (median {middle:.2f} s), {sum(used.values()):.2f} CPU s: ", end="")
    print(", ".join(f"{part} {seconds:.2f}" for part, seconds in sorted(used.items(), key=lambda one: -one[1])))


if __name__ == "__main__":
    main()
