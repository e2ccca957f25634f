"""`make bench`: every figure of the table, one after the other, with its target beside it."""

from __future__ import annotations

from measuring import BENCHMARKS, ROOT, measure
from rich.console import Console
from rich.table import Table


def main() -> None:
    console = Console()
    table = Table(
        "what", "target", "measured", "met", title="Benchmarks (this machine, this run)", title_justify="left"
    )
    for benchmark in BENCHMARKS:
        if benchmark.is_long:
            continue
        console.print(f"[dim]running {' '.join(benchmark.command)} …[/]")
        numbers = measure(ROOT, benchmark)
        if isinstance(numbers, str):
            console.print(numbers, markup=False, highlight=False)
            table.add_row(benchmark.figures[0].what, "", "failed", "no")
            continue
        for figure, number in zip(benchmark.figures, numbers, strict=True):
            target, met = "", ""
            if figure.target is not None:
                target = f"{'≥' if figure.at_least else '≤'} {figure.target:g} {figure.unit}"
                met = "yes" if (number >= figure.target if figure.at_least else number <= figure.target) else "no"
            table.add_row(figure.what, target, f"{number:.4g} {figure.unit}", met)
    console.print(table)


if __name__ == "__main__":
    main()
