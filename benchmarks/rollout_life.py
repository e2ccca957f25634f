"""What a rollout's whole life costs the server in a real run: ordered, leased, called, traced, reported, scored, trained, read back.

    python benchmarks/rollout_life.py                     this tree
    python benchmarks/rollout_life.py --tree FOLDER       another checkout with its own .venv, as well, in turns

`lightningrl train` runs for real: its server, workers, agent, engine and learner. Counted is user + system CPU of the server's process, all its
threads. A run of more steps less a run of fewer leaves out what starting costs.

    one call         what `lightningrl init` writes: an agent that makes one call
    text_to_sql      the LangGraph agent of examples/text_to_sql: about four calls, their spans, and what it reports
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightningrl.server.launcher import cpu_seconds

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A recipe, and how many rollouts a step of it takes."""

    name: str
    recipe: str | None
    """In the tree; None = what `lightningrl init` writes."""
    rollouts: int
    fewer: int
    more: int
    """Steps."""

    @property
    def settings(self) -> list[str]:
        sizes = {"loop.tasks_per_step": self.rollouts // 8, "loop.group_size": 8, "loop.checkpoint_every": 1000, "validation.every": 0}
        return [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")]


JOBS = (
    Job(name="one call", recipe=None, rollouts=512, fewer=1, more=4),
    Job(name="text_to_sql", recipe="examples/text_to_sql", rollouts=128, fewer=1, more=4),
)


def server_of(trainer: int) -> int | None:
    """The server's process among the trainer's children."""
    try:
        children = Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split()
        return next((int(one) for one in children if "lightningrl.server" in Path(f"/proc/{one}/cmdline").read_text()), None)
    except OSError:
        return None


def server_cpu(tree: Path, job: Job, steps: int) -> float:
    """CPU seconds that the server of a run of `steps` has used when it ends."""
    bin_ = tree / ".venv" / "bin"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{bin_}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory(prefix="lightningrl-life-") as folder:
        if job.recipe is None:
            subprocess.run([str(bin_ / "lightningrl"), "init", "first"], cwd=folder, env=environment, check=True, capture_output=True)
        recipe = "first" if job.recipe is None else str(tree / job.recipe)
        command = [str(bin_ / "lightningrl"), "train", recipe, "--run", f"{folder}/run", "--steps", str(steps), *job.settings]
        with (Path(folder) / "said.txt").open("w+") as said:
            trainer = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT)
            used, server = 0.0, None
            while trainer.poll() is None:
                server = server or server_of(trainer.pid)
                used = (cpu_seconds(server) if server else None) or used
                time.sleep(POLL_S)
            if trainer.returncode:
                said.seek(0)
                raise SystemExit(f"{' '.join(command)}\n{said.read()}")
    return used


def per_rollout(tree: Path, job: Job) -> float:
    """Milliseconds."""
    fewer, more = (server_cpu(tree, job, steps) for steps in (job.fewer, job.more))
    return 1000 * (more - fewer) / ((job.more - job.fewer) * job.rollouts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="an earlier commit's checkout, installed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=[job.name for job in JOBS])
    options = parser.parse_args()
    trees = [ROOT] if options.tree is None else [ROOT, options.tree.resolve()]
    table = Table("server CPU of a rollout", "now, ms", *(["then, ms", "now ÷ then"] if options.tree else []))
    for job in JOBS:
        if options.only in (None, job.name):
            found = {tree: statistics.median(per_rollout(tree, job) for _ in range(options.rounds)) for tree in trees}
            ratio = [] if options.tree is None else [f"{found[trees[1]]:.1f}", f"{found[ROOT] / found[trees[1]]:.2f}"]
            table.add_row(job.name, f"{found[ROOT]:.1f}", *ratio)
            print(f"RESULT {found[ROOT]:.3f}", flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
