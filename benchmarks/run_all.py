"""`make bench`: every benchmark of DESIGN's table, one after the other, with its target beside it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from earlier import ENVIRONMENT
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A script that prints `RESULT <number>` lines."""

    what: str
    script: str
    target: float
    unit: str
    at_least: bool = False
    options: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark(what="gateway CPU per recorded, durable call", script="gateway_cpu.py", target=1.5, unit="ms"),
    Benchmark(what="calls in flight, none failing", script="gateway_in_flight.py", target=1000, unit="calls", at_least=True),
    Benchmark(what="trace → samples, 50 turns", script="trace_to_samples.py", target=3.0, unit="ms CPU"),
    Benchmark(what="credit of 128 rollouts × 8 turns, the dearest that asks nobody", script="credit_cpu.py", target=50.0, unit="ms CPU"),
    Benchmark(what="stored bytes, 50 turns", script="store_bytes.py", target=80_000, unit="bytes"),
    Benchmark(what="one-call rollout beyond the agent's own time", script="rollout_overhead.py", target=0.1, unit="s"),
    Benchmark(what="server CPU of a one-call rollout's whole life", script="rollout_life.py", target=1.75, unit="ms"),
    Benchmark(
        what="server CPU of a text-to-SQL rollout with its spans",
        script="rollout_life.py",
        target=3.2,
        unit="ms",
        options=("--agent", "text_to_sql"),
    ),
    Benchmark(what="import lightningrl", script="import_time.py", target=0.3, unit="s"),
)


def measure(tree: Path, benchmark: Benchmark, python: str) -> float | str:
    """What the benchmark of a tree of ours says; where it failed, all that it said. A tree that is older than the script is measured by
    this tree's."""
    own = tree / "benchmarks" / benchmark.script
    script = own if own.exists() else HERE / benchmark.script
    ran = subprocess.run(
        [python, str(script), *benchmark.options],
        capture_output=True,
        text=True,
        check=False,
        cwd=tree,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"},
    )
    found = re.findall(r"^RESULT ([-+.\deE]+)", ran.stdout, re.MULTILINE)
    return ran.stdout + ran.stderr if ran.returncode or not found else float(found[-1])


def main() -> None:
    console = Console()
    table = Table("what", "target", "measured", "met", title="Benchmarks (this machine, this run)", title_justify="left")
    for benchmark in BENCHMARKS:
        console.print(f"[dim]running {benchmark.script} …[/]")
        value = measure(HERE.parent, benchmark, sys.executable)
        if isinstance(value, str):
            console.print(value, markup=False, highlight=False)
            table.add_row(benchmark.what, f"{benchmark.target:g} {benchmark.unit}", "failed", "no")
            continue
        met = value >= benchmark.target if benchmark.at_least else value <= benchmark.target
        sign = "≥" if benchmark.at_least else "≤"
        table.add_row(
            benchmark.what, f"{sign} {benchmark.target:g} {benchmark.unit}", f"{value:.4g} {benchmark.unit}", "yes" if met else "no"
        )
    console.print(table)


if __name__ == "__main__":
    main()
