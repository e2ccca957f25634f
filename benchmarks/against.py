"""Every benchmark of `make bench`, at an earlier commit and now, in turns on this machine. Above 1 = slower (or fewer) than it was.

    python benchmarks/against.py COMMIT --rounds 3 --only gateway_cpu rollout_overhead

The commit is checked out beside this tree and gets an environment of its own; its own scripts measure it, so what a script measures must be
the same in both.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from earlier import ROOT, checked_out
from rich.console import Console
from rich.progress import track
from rich.table import Table
from run_all import BENCHMARKS, measure


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
        figures: dict[str, list[tuple[float, float]]] = {one.script: [] for one in wanted}
        for number, one in track(rounds, "measuring", console=console):
            trees = (before, ROOT) if number % 2 else (ROOT, before)
            found = {tree: measure(tree, one, str(tree / ".venv" / "bin" / "python")) for tree in trees}
            then, now = found[before], found[ROOT]
            if isinstance(then, str) or isinstance(now, str):
                sys.exit(f"{one.script} failed:\n{then if isinstance(then, str) else now}")
            figures[one.script].append((then, now))
    title = f"{options.commit} and now, medians of {options.rounds} interleaved rounds on this machine"
    table = Table("what", options.commit, "now", "unit", "now ÷ then", "of each round", title=title, title_justify="left")
    for one in wanted:
        then, now = (statistics.median(pair[place] for pair in figures[one.script]) for place in (0, 1))
        ratios = ", ".join(f"{later / earlier:.2f}" for earlier, later in figures[one.script])
        table.add_row(one.what, f"{then:.4g}", f"{now:.4g}", one.unit, f"{now / then:.2f}", ratios)
    console.print(table)


if __name__ == "__main__":
    main()
