"""Every benchmark of `make bench`, at an earlier commit and now, in turns on this machine. Above 1 = slower (or fewer) than it was.

    python benchmarks/against.py COMMIT --rounds 3 --only gateway_cpu rollout_overhead

The commit is checked out beside this tree and gets an environment of its own; its own scripts measure it, so what a script measures must be
the same in both. A script that it does not have yet is this tree's, run in the commit's environment; where that cannot measure it, the
benchmark is left out with a sentence.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from earlier import ROOT, checked_out
from rich.console import Console
from rich.progress import track
from rich.table import Table
from run_all import BENCHMARKS, Benchmark, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="scripts, without .py")
    options = parser.parse_args()
    wanted = [one for one in BENCHMARKS if options.only is None or one.script.removesuffix(".py") in options.only]
    rounds = [(number, one) for number in range(options.rounds) for one in wanted]
    console = Console()
    with checked_out(options.commit) as before:
        figures: dict[Benchmark, list[tuple[float, float]]] = {one: [] for one in wanted}
        for number, one in track(rounds, "measuring", console=console):
            if one not in figures:
                continue
            trees = (before, ROOT) if number % 2 else (ROOT, before)
            found = {tree: measure(tree, one, str(tree / ".venv" / "bin" / "python")) for tree in trees}
            then, now = found[before], found[ROOT]
            if isinstance(now, str):
                sys.exit(f"{one.script} failed:\n{now}")
            if isinstance(then, str):
                last = (then.strip().splitlines() or ["it said nothing"])[-1]
                console.print(f"left out: {one.what}: {options.commit} cannot be measured by {one.script} ({last})", markup=False)
                del figures[one]
                continue
            figures[one].append((then, now))
    title = f"{options.commit} and now, medians of {options.rounds} interleaved rounds on this machine"
    table = Table("what", options.commit, "now", "unit", "now ÷ then", "of each round", title=title, title_justify="left")
    for one, pairs in figures.items():
        then, now = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
        ratios = ", ".join(f"{later / earlier:.2f}" for earlier, later in pairs)
        table.add_row(one.what, f"{then:.4g}", f"{now:.4g}", one.unit, f"{now / then:.2f}", ratios)
    console.print(table)


if __name__ == "__main__":
    main()
