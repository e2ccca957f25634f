"""Every figure of `make bench`, at an earlier commit and now, in turns on this machine. Above 1 = more than it was.

    python benchmarks/against.py COMMIT --rounds 3 --only gateway life start

The commit is checked out beside this tree and gets an environment of its own, with the packages that it has. Its own
scripts measure it, so what a script measures must be the same in both; what a start takes is measured from outside, by
this tree's script. A figure that the commit cannot give is left out with a sentence.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from measuring import BENCHMARKS, ROOT, checked_out, measure, order_of_turn
from rich.console import Console
from rich.progress import track
from rich.table import Table


def main() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="or the folder of a checkout with its .venv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    options = parser.parse_args()
    chosen = [
        benchmark
        for benchmark in BENCHMARKS
        if (not benchmark.is_long if options.only is None else benchmark.name in options.only)
    ]
    console = Console()
    pairs: dict[str, list[tuple[list[float], list[float]]]] = {benchmark.name: [] for benchmark in chosen}
    with checked_out(options.commit) as before:
        turns = [(turn, benchmark) for turn in range(options.rounds) for benchmark in chosen]
        for turn, benchmark in track(turns, "measuring", console=console):
            if benchmark.name not in pairs:
                continue
            numbers = {tree: measure(tree, benchmark) for tree in order_of_turn((before, ROOT), turn)}
            then, now = numbers[before], numbers[ROOT]
            if isinstance(now, str):
                sys.exit(f"{' '.join(benchmark.command)} failed:\n{now}")
            if isinstance(then, str):
                last = (then.strip().splitlines() or ["it printed nothing"])[-1]
                console.print(f"left out: {benchmark.name}: {options.commit} cannot be measured ({last})", markup=False)
                del pairs[benchmark.name]
                continue
            pairs[benchmark.name].append((then, now))
    title = f"{options.commit} and now, medians of {options.rounds} interleaved rounds on this machine"
    table = Table(
        "what", options.commit, "now", "unit", "now ÷ then", "of each round", title=title, title_justify="left"
    )
    for benchmark in chosen:
        for place, figure in enumerate(benchmark.figures if benchmark.name in pairs else ()):
            thens, nows = ([pair[side][place] for pair in pairs[benchmark.name]] for side in (0, 1))
            earlier, later = statistics.median(thens), statistics.median(nows)
            ratios = ", ".join(f"{second / first:.2f}" for first, second in zip(thens, nows, strict=True))
            cells = f"{earlier:.4g}", f"{later:.4g}", figure.unit, f"{later / earlier:.2f}", ratios
            table.add_row(figure.what, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
