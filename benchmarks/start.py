"""What a start costs, of this tree or of another that has its `.venv` (`benchmarks/against.py COMMIT --only start
import`).

    python benchmarks/start.py train      from `lightningrl train RECIPE` to the agent's first answer from the model
    python benchmarks/start.py export     `lightningrl export` of a short run
    python benchmarks/start.py run        text-to-SQL in 10 steps, validated before and after; its median step
    python benchmarks/start.py import     `import lightningrl`, listing plugins, a server's start, the check of an agent
    python benchmarks/start.py step [RECIPE] --set runtime.concurrency=48
                                          CPU seconds of a training step by process: trainer (engine, learner, loop),
                                          server, workers

Seconds on the clock and CPU seconds of every process that the command started. The tree makes a short run before: one
that starts for the first time compiles all that it imports, which takes as long again. Each is the least of `--rounds`,
medians beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from measuring import (
    ENVIRONMENT,
    ROOT,
    SERVER,
    cpu_by_process,
    lightningrl,
    metrics_of,
    program_of,
    python_of,
    result,
    server_of,
    watch_steps,
)

EXAMPLE: Final = "examples/text_to_sql"
MARKED: Final = """
from pathlib import Path

import agent

answer, run_query = agent.answer, agent.run_query


def marking(*arguments):
    Path({mark!r}).write_text("")
    return run_query(*arguments)


agent.run_query = marking  # it runs what the model has answered
"""
PATIENCE_S: Final = 900.0
TIMED: Final = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"
AGENT_CHECK: Final = ("lightningrl_training.agent_check", "lightningrl.training.agent_check")
"""The program that imports an agent, by where a tree may have it."""
FIRST_STEP: Final = 3
"""The first step that `step` counts, and it leaves out the last."""


class Cost(NamedTuple):
    """Of one command."""

    wall: float
    cpu: float
    step: float = 0.0
    """Median seconds of a step."""


def train(tree: Path, scratch: Path) -> Cost:
    """`lightningrl train` on a copy of the example; the run is killed at its first answer."""
    folder, mark = scratch / "example", scratch / "mark"
    shutil.copytree(tree / EXAMPLE, folder)
    (folder / "marked.py").write_text(MARKED.format(mark=str(mark)))
    settings = ("--set", "agent=marked.py:answer", "--set", "validation.every=0")
    command = lightningrl("train", str(folder), "--run", str(scratch / "run"), *settings, tree=tree)
    began = time.perf_counter()
    with (scratch / "output").open("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=scratch, env=ENVIRONMENT)
        try:
            while not mark.exists():
                if process.poll() is not None or time.perf_counter() - began > PATIENCE_S:
                    output.seek(0)
                    raise SystemExit(f"{' '.join(command)}: ended or hung before its first answer\n{output.read()}")
                time.sleep(0.02)
            wall, used = time.perf_counter() - began, cpu_by_process(process.pid)
        finally:
            for pid in cpu_by_process(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    return Cost(wall, sum(used.values()))


def ended(command: list[str]) -> Cost:
    """A command that ends by itself."""
    began, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(time.perf_counter() - began, used)


def short_run(tree: Path, run: Path) -> None:
    """A run of one step."""
    settings = ("loop.tasks_per_step=1", "loop.group_size=2", "validation.every=0", "loop.steps=1")
    words = [f"--set={setting}" for setting in settings]
    ended(lightningrl("train", str(tree / EXAMPLE), "--run", str(run), *words, tree=tree))


def whole_run(tree: Path, scratch: Path, steps: int) -> Cost:
    """A run of so many steps, validated before and after."""
    words = ["--run", str(scratch / "run"), "--steps", str(steps), "--set", f"validation.every={steps}"]
    cost = ended(lightningrl("train", str(tree / EXAMPLE), *words, tree=tree))
    return cost._replace(step=statistics.median(seconds_of_steps(scratch / "run")))


def seconds_of_steps(run: Path) -> list[float]:
    """Seconds of each step so far."""
    return [line["seconds"] for line in metrics_of(run) if "seconds" in line]


# ---------------------------------------------------------------------- imports


def seconds_of(python: str, statement: str) -> float:
    ran = subprocess.run([python, "-c", TIMED.format(statement)], capture_output=True, text=True, check=True)
    return float(ran.stdout)


def server_cpu(tree: Path) -> float:
    """CPU seconds of a server process until it answers."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"store_url": f"sqlite:///{folder}/store.sqlite", "run_key": "a-key-of-this-run"}
        settings["policies"] = {"policy": {"model": str(tree / EXAMPLE / "starter")}}
        with server_of(tree, settings) as (server, _):
            return cpu_by_process(server.pid)[server.pid]


def check_cpu(python: str) -> float:
    """CPU seconds of the process that imports an agent, for one that imports nothing; NaN = the tree has none."""
    program = program_of(python, AGENT_CHECK)
    if program is None:
        return float("nan")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "agent.py").write_text("def answer(task): return task\n")
        return ended([python, "-m", program, "agent.py:answer", folder]).cpu


def imports(tree: Path, rounds: int) -> None:
    python = python_of(tree)
    listing = "from lightningrl.plugins import load_plugins; load_plugins()"
    measures: dict[str, Callable[[], float]] = {
        "import lightningrl": lambda: seconds_of(python, "import lightningrl"),
        "listing plugins": lambda: seconds_of(python, listing),
        "server until it answers, CPU": lambda: server_cpu(tree),
        "check of an agent, CPU": lambda: check_cpu(python),
    }
    seconds = {name: sorted(measure() for _ in range(rounds)) for name, measure in measures.items()}
    for name, times in seconds.items():
        print(f"{name:<32} {times[0]:6.3f} s, median {statistics.median(times):.3f} s")
    result(*(times[0] for times in seconds.values()))


# ---------------------------------------------------------------------- a step by process


def by_part(pid: int) -> dict[str, float]:
    """CPU seconds so far of the trainer, its server, its workers, and all others that it started."""
    seconds: dict[str, float] = defaultdict(float)
    for process, used in cpu_by_process(pid).items():
        with contextlib.suppress(OSError):  # it has ended
            line = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
            is_server, is_worker = (any(name in line.split("\0") for name in names) for names in (SERVER, WORKER))
            part = "trainer" if process == pid else "server" if is_server else "workers" if is_worker else "other"
            seconds[part] += used
    return seconds


WORKER: Final = ("lightningrl_client.runtime.worker", "lightningrl.runtime.worker")


def step(recipe: str, steps: int, given: list[str], scratch: Path) -> None:
    settings = [f"--set={setting}" for setting in ("validation.every=0", *given)]
    run = scratch / "run"
    command = lightningrl("train", recipe, "--run", str(run), "--steps", str(steps), *settings)
    marks = watch_steps(command, run, by_part)
    first, last = FIRST_STEP, steps - 1
    (began, before), (finished, after) = marks[first], marks[last]
    used = {part: (seconds - before.get(part, 0.0)) / (last - first) for part, seconds in after.items()}
    mean, middle = (finished - began) / (last - first), statistics.median(seconds_of_steps(run)[FIRST_STEP:])
    print(f"a step: {mean:.2f} s (median {middle:.2f} s), {sum(used.values()):.2f} CPU s: ", end="")
    print(", ".join(f"{part} {seconds:.2f}" for part, seconds in sorted(used.items(), key=lambda item: -item[1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "export", "run", "import", "step"))
    parser.add_argument("recipe", nargs="?", default=str(ROOT / EXAMPLE), help="of `step`")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--rounds", type=int, help="1 of `run`, 7 of `import`, else 3")
    parser.add_argument("--steps", type=int, help="of `run` (10) and of `step` (15)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of `step`")
    options = parser.parse_args()
    tree: Path = options.tree.resolve()
    if options.what == "import":
        imports(tree, options.rounds or 7)
        return
    with tempfile.TemporaryDirectory(prefix="lightningrl-start-") as name:
        folder = Path(name)
        if options.what == "step":
            if (options.steps or 15) < FIRST_STEP + 2:
                parser.error(
                    f"--steps {options.steps}: the first {FIRST_STEP} and the last are not counted; ask for more"
                )
            step(options.recipe, options.steps or 15, options.settings, folder)
            return
        short_run(tree, folder / "short")
        costs = []
        for number in range(options.rounds or (1 if options.what == "run" else 3)):
            scratch = folder / str(number)
            scratch.mkdir()
            if options.what == "train":
                costs.append(train(tree, scratch))
            elif options.what == "run":
                costs.append(whole_run(tree, scratch, options.steps or 10))
            else:
                words = ("export", str(scratch / "weights"), "--run", str(folder / "short"))
                costs.append(ended(lightningrl(*words, tree=tree)))
        columns = list(zip(*costs, strict=True))[: 3 if options.what == "run" else 2]
        for unit, column in zip(("wall", "CPU", "step"), columns, strict=False):
            print(f"{options.what:<8} {unit:<4} {min(column):6.2f} s, median {statistics.median(column):.2f} s")
        result(*(min(column) for column in columns))


if __name__ == "__main__":
    main()
