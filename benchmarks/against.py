"""Every figure of the table on this machine: beside its target, or at an earlier commit and now, in turns.

    python benchmarks/against.py                                    `make bench`
    python benchmarks/against.py COMMIT --rounds 3 --only gateway life start

The commit is checked out beside this tree and gets an environment of its own, with the packages that it has. Its own
scripts measure it, so what a script measures must be the same in both; what a start and a model call take is measured
from outside, by this tree's script: it starts the programs of each. A figure that the commit cannot give is left out
with a sentence; of a program that it does not have, "not there". Ratio above 1: more than before.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence

from measuring import BENCHMARKS, ROOT, Benchmark, checked_out, measure
from rich.console import Console
from rich.progress import track
from rich.table import Table

CONSOLE = Console()


def main() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="or the folder of a checkout with its .venv; none = this tree alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    options = parser.parse_args()
    chosen = [
        benchmark
        for benchmark in BENCHMARKS
        if (not benchmark.is_long if options.only is None else benchmark.name in options.only)
    ]
    CONSOLE.print(measure_now(chosen) if options.commit is None else compare(options.commit, options.rounds, chosen))


def measure_now(chosen: Sequence[Benchmark]) -> Table:
    """Table of what was measured, its target beside it."""
    title = "Benchmarks (this machine, this run)"
    table = Table("what", "target", "measured", "met", title=title, title_justify="left")
    for benchmark in chosen:
        CONSOLE.print(f"[dim]running {' '.join(benchmark.command)} …[/]")
        numbers = measure(ROOT, benchmark)
        if isinstance(numbers, str):
            CONSOLE.print(numbers, markup=False, highlight=False)
            table.add_row(benchmark.figures[0].what, "", "failed", "no")
            continue
        for figure, number in zip(benchmark.figures, numbers, strict=True):
            target, met = "", ""
            if figure.target is not None:
                target = f"{'≥' if figure.at_least else '≤'} {figure.target:g} {figure.unit}"
                met = "yes" if (number >= figure.target if figure.at_least else number <= figure.target) else "no"
            table.add_row(figure.what, target, f"{number:.4g} {figure.unit}", met)
    return table


def compare(commit: str, rounds: int, chosen: Sequence[Benchmark]) -> Table:
    """The commit's figures, those of now, and their ratio."""
    pairs: dict[str, list[tuple[list[float], list[float]]]] = {benchmark.name: [] for benchmark in chosen}
    with checked_out(commit) as before:
        turns = [(turn, benchmark) for turn in range(rounds) for benchmark in chosen]
        for turn, benchmark in track(turns, "measuring", console=CONSOLE):
            if benchmark.name not in pairs:
                continue
            order = (before, ROOT)[:: 1 if turn % 2 else -1]  # the first of a turn is the last of the next
            numbers = {tree: measure(tree, benchmark) for tree in order}
            then, now = numbers[before], numbers[ROOT]
            if isinstance(now, str):
                sys.exit(f"{' '.join(benchmark.command)} failed:\n{now}")
            if isinstance(then, str):
                last = (then.strip().splitlines() or ["it printed nothing"])[-1]
                CONSOLE.print(f"left out: {benchmark.name}: {commit} cannot be measured ({last})", markup=False)
                del pairs[benchmark.name]
                continue
            pairs[benchmark.name].append((then, now))
    title = f"{commit} and now, medians of {rounds} interleaved rounds on this machine"
    table = Table("what", commit, "now", "unit", "now ÷ then", "of each round", title=title, title_justify="left")
    for benchmark in chosen:
        for place, figure in enumerate(benchmark.figures if benchmark.name in pairs else ()):
            thens, nows = ([pair[side][place] for pair in pairs[benchmark.name]] for side in (0, 1))
            earlier, later = statistics.median(thens), statistics.median(nows)
            if math.isnan(earlier):
                table.add_row(figure.what, "not there", f"{later:.4g}", figure.unit, "", "")
                continue
            ratios = ", ".join(f"{second / first:.2f}" for first, second in zip(thens, nows, strict=True))
            cells = f"{earlier:.4g}", f"{later:.4g}", figure.unit, f"{later / earlier:.2f}", ratios
            table.add_row(figure.what, *cells)
    return table


if __name__ == "__main__":
    main()
