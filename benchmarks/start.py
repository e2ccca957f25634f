"""What a start costs: from `lightningrl train RECIPE` to the agent's first answer from the model, wall and CPU seconds.

    python benchmarks/start.py                      this tree
    python benchmarks/start.py --against f58d0e3    this tree and an earlier commit, in turns: their ratio
    python benchmarks/start.py --against f58d0e3 --only run --steps 10     a whole run of so many steps, and the median step of it

CPU seconds are those of every process that the command started. `export` and `run` are measured until they end. Each tree
has made a short run before: one that starts for the first time compiles all that it imports, which takes as long again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from earlier import ENVIRONMENT, ROOT, checked_out

MARKED = """
from pathlib import Path

import agent

answer, run_query = agent.answer, agent.run_query


def marking(*arguments):
    Path({mark!r}).write_text("")
    return run_query(*arguments)


agent.run_query = marking  # it runs what the model has answered
"""
SETTINGS = ("--set", "agent=marked.py:answer", "--set", "validation.every=0")
PATIENCE_S = 900.0
PAUSE_S = 0.02


class Cost(NamedTuple):
    wall: float
    cpu: float


def descendants(pid: int) -> Iterator[tuple[int, float]]:
    """A process and all that it started, each with its CPU seconds and those of its children that have ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        yield pid, sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from descendants(int(child))


def start(tree: Path, example: Path) -> Cost:
    """Of `lightningrl train` on a copy of the example, by the tree's own environment; the run is killed at its first answer."""
    with tempfile.TemporaryDirectory(prefix="lightningrl-start-") as scratch:
        folder, mark = Path(scratch) / "example", Path(scratch) / "mark"
        subprocess.run(["cp", "-r", str(example), str(folder)], check=True)
        (folder / "marked.py").write_text(MARKED.format(mark=str(mark)))
        command = [str(tree / ".venv/bin/lightningrl"), "train", str(folder), "--run", f"{scratch}/run", *SETTINGS]
        began = time.perf_counter()
        with (Path(scratch) / "said").open("w+") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, cwd=scratch, env=ENVIRONMENT)
            try:
                while not mark.exists():
                    if process.poll() is not None or time.perf_counter() - began > PATIENCE_S:
                        said.seek(0)
                        raise SystemExit(f"{' '.join(command)}: ended or hung before its first answer\n{said.read()}")
                    time.sleep(PAUSE_S)
                wall = time.perf_counter() - began
                found = dict(descendants(process.pid))
            finally:
                for pid in [*dict(descendants(process.pid))]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()
    return Cost(wall, sum(found.values()))


def finished(command: list[str]) -> Cost:
    """Of a command that ends."""
    began, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(time.perf_counter() - began, used)


def export(tree: Path, run: Path) -> Cost:
    """Of `lightningrl export`."""
    with tempfile.TemporaryDirectory(prefix="lightningrl-start-") as scratch:
        return finished([str(tree / ".venv/bin/lightningrl"), "export", f"{scratch}/weights", "--run", str(run)])


def run(tree: Path, steps: int, seconds: list[float]) -> Cost:
    """Of a whole `lightningrl train examples/text_to_sql` of so many steps, validated before and after; its median step is added to
    `seconds`."""
    with tempfile.TemporaryDirectory(prefix="lightningrl-start-") as scratch:
        settings = ["--steps", str(steps), "--set", f"validation.every={steps}"]
        cost = finished(
            [str(tree / ".venv/bin/lightningrl"), "train", str(tree / "examples/text_to_sql"), "--run", f"{scratch}/run", *settings]
        )
        lines = [json.loads(line) for line in Path(scratch, "run/metrics.jsonl").read_text().splitlines()]
        seconds.append(statistics.median(line["seconds"] for line in lines if "seconds" in line))
    return cost


@contextlib.contextmanager
def short_run(tree: Path) -> Iterator[Path]:
    """A run of one step."""
    with tempfile.TemporaryDirectory(prefix="lightningrl-start-") as scratch:
        settings = ["--set", "loop.tasks_per_step=1", "--set", "loop.group_size=2", "--set", "validation.every=0", "--steps", "1"]
        train = [str(tree / ".venv/bin/lightningrl"), "train", str(tree / "examples/text_to_sql"), "--run", f"{scratch}/run", *settings]
        finished(train)
        yield Path(scratch) / "run"


def report(what: str, costs: dict[Path, list[Cost]]) -> None:
    """The least of each, and of a second tree the ratios."""
    for place, unit in enumerate(Cost._fields):
        least = [min(cost[place] for cost in of_tree) for of_tree in costs.values()]
        middle = [statistics.median(cost[place] for cost in of_tree) for of_tree in costs.values()]
        ratio = f"  {least[1]:6.2f} s there, {least[0] / least[1]:.2f} of it (medians {middle[0] / middle[1]:.2f})" if least[1:] else ""
        print(f"{what:<22} {unit:<4} {least[0]:6.2f} s{ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="a commit, or a checkout with its .venv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("train", "export", "run"))
    parser.add_argument("--steps", type=int, default=10, help="of `run`")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        trees = [ROOT, *([stack.enter_context(checked_out(options.against))] if options.against else [])]
        measures: dict[str, Callable[[Path], Cost]] = {"train": lambda tree: start(tree, tree / "examples/text_to_sql")}
        of_steps: dict[Path, list[float]] = {tree: [] for tree in trees}
        if options.only == "run":
            measures["run"] = lambda tree: run(tree, options.steps, of_steps[tree])
        runs = {tree: stack.enter_context(short_run(tree)) for tree in trees}
        if options.only in {None, "export"}:
            measures["export"] = lambda tree: export(tree, runs[tree])
        for what in [options.only] if options.only else measures:
            costs: dict[Path, list[Cost]] = {tree: [] for tree in trees}
            for number in range(options.rounds):
                for tree in trees if number % 2 else reversed(trees):
                    costs[tree].append(measures[what](tree))
            report(what, costs)
        if options.only == "run":
            now, *then = (statistics.median(found) for found in of_steps.values())
            print(f"{'its median step':<22} wall {now:6.2f} s" + (f"  {then[0]:6.2f} s there, {now / then[0]:.2f} of it" if then else ""))


if __name__ == "__main__":
    main()
