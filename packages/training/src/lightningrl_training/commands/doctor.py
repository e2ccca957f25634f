"""`lightningrl doctor`: what is wrong with a recipe, and what its run will take, before anything is trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightningrl.console import RunsOption, write_json
from lightningrl_client.commands import RecipeArgument, SetOption, read_settings
from lightningrl_training.commands.printing import make_table, show_warnings
from lightningrl_training.commands.stopping import show_phases, stoppable

if TYPE_CHECKING:
    from lightningrl_training.doctor import Bill, Diagnosis

__all__ = ["doctor", "show"]

UNBROKEN: Final = 100_000
"""Columns of a page whose lines are as long as they are."""
STYLES: Final = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    recipe: RecipeArgument,
    as_json: Annotated[bool, typer.Option("--json", help="All findings and the bill as one JSON object.")] = False,
    is_brief: Annotated[bool, typer.Option("--brief", help="Warnings, failures and the bill alone.")] = False,
    rehearse: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="For steps after the first, which show how rollouts change as the policy learns; 0 = none.",
        ),
    ] = 40.0,
    runs: RunsOption = Path("runs"),
    settings: SetOption = None,
) -> None:
    """Look before you train: run the agent a few times, take some learning steps on a copy of the weights, say what is
    wrong and what the whole run will cost.

    Each check says pass, warn or fail, by what it was seen and what to do. The bill is of tokens, minutes, memory and
    disk. Nothing is left behind. Exit status 1 where a check failed.

    Examples:
      [bold]lightningrl doctor examples/text_to_sql[/]
      [bold]lightningrl doctor my_recipe.toml --set loop.steps=500 --json[/]
    """
    from lightningrl_training.doctor import Verdict
    from lightningrl_training.run import doctor as diagnose
    from lightningrl_training.run_sync import run_sync

    chosen = read_settings(settings)
    show_warnings()
    with stoppable("stopped"), show_phases() as show_phase:

        def starting(what: str) -> None:
            show_phase(f"trying {what}")

        diagnosis = run_sync(diagnose(recipe, settings=chosen, runs=runs, rehearse=rehearse, starting=starting))
    if as_json:
        write_json(diagnosis.as_json())
    else:
        show(diagnosis, console_for_tables(), is_brief=is_brief)
    if diagnosis.verdict is Verdict.FAIL:
        raise typer.Exit(1)


def console_for_tables() -> Console:
    """A terminal as wide as it is; elsewhere, where nobody says COLUMNS, one that breaks no line."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=UNBROKEN)


def show(diagnosis: Diagnosis, console: Console, *, is_brief: bool = False) -> None:
    """The findings and the bill, as tables; in brief, of the findings those that warn or fail."""
    check, verdict = (Column(name, no_wrap=True) for name in ("check", ""))
    table = make_table(check, verdict, Column("what was seen", overflow="fold"))
    for row in diagnosis.rows:
        if is_brief and row.finding.verdict == "pass":
            continue
        evidence = Text(row.finding.evidence)
        if row.finding.remedy:
            evidence.append(f"\n→ {row.finding.remedy}", style="dim")
        table.add_row(row.check, Text(row.finding.verdict, style=STYLES[row.finding.verdict]), evidence)
    _print(console, table if table.row_count else Text(f"all {len(diagnosis.rows)} checks pass"))
    if diagnosis.bill is not None:
        console.print()
        _print(console, _bill(diagnosis.bill))


def _print(console: Console, part: Table | Text) -> None:
    """Without the spaces that fill a table's lines, which would make each of them as long as the longest."""
    with console.capture() as printed:
        console.print(part, highlight=False)
    for line in printed.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def _bill(bill: Bill) -> Table:
    amounts = (Column(name, justify="right", no_wrap=True) for name in ("", "while it learns"))
    table = make_table(Column("the whole run", no_wrap=True), *amounts, Column("how", overflow="fold"))
    for line in bill.lines:
        ends = () if line.low is None or line.high is None else (line.low, line.high)
        between = " – ".join(_amount(end, line.unit) for end in ends)
        table.add_row(line.what, _amount(line.amount, line.unit), between, Text(line.how, style="dim"))
    return table


def _amount(amount: float, unit: str) -> str:
    if unit == "bytes":
        return f"{amount / 1e9:.2f} GB" if amount >= 1e9 else f"{amount / 1e6:.1f} MB"
    return f"{amount:,.0f}" if amount >= 100 or amount == int(amount) else f"{amount:.1f}"
