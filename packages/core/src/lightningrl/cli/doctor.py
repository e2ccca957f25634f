"""`lightningrl doctor`: what is wrong with a recipe, and what its run will take, before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightningrl.beside import run_beside
from lightningrl.cli import write_json
from lightningrl.cli.stopping import stoppable
from lightningrl.run import doctor

if TYPE_CHECKING:
    from lightningrl.doctor import Bill, Diagnosis

__all__ = ["doctor_command", "show"]

STYLES: Final = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def doctor_command(source: Path, *, as_json: bool, runs: Path, rehearse: float, settings: Mapping[str, Any]) -> int:
    """Returns the exit status: 1 where a check failed."""
    from lightningrl.doctor import Verdict

    with stoppable("stopped"), Console(stderr=True).status("starting") as status:
        trying = doctor(source, settings=settings, runs=runs, rehearse=rehearse, starting=lambda what: status.update(f"trying {what}"))
        diagnosis = run_beside(trying)
    if as_json:
        write_json(diagnosis.as_json())
    else:
        show(diagnosis, Console())
    return int(diagnosis.verdict is Verdict.FAIL)


def show(diagnosis: Diagnosis, console: Console) -> None:
    """The findings and the bill, as tables."""
    table = Table(
        Column("check", no_wrap=True), Column("", no_wrap=True), Column("what was seen", overflow="fold"), box=None, padding=(0, 2, 0, 0)
    )
    for row in diagnosis.rows:
        evidence = Text(row.finding.evidence)
        if row.finding.remedy:
            evidence.append(f"\n→ {row.finding.remedy}", style="dim")
        table.add_row(row.check, Text(row.finding.verdict, style=STYLES[row.finding.verdict]), evidence)
    console.print(table, highlight=False)
    if diagnosis.bill is not None:
        console.print()
        console.print(_bill(diagnosis.bill), highlight=False)


def _bill(bill: Bill) -> Table:
    table = Table(
        Column("the whole run", no_wrap=True),
        Column("", justify="right", no_wrap=True),
        Column("while it learns", justify="right", no_wrap=True),
        Column("how", overflow="fold"),
        box=None,
        padding=(0, 2, 0, 0),
    )
    for line in bill.lines:
        between = ""
        if line.low is not None and line.high is not None:
            between = f"{_amount(line.low, line.unit)} – {_amount(line.high, line.unit)}"
        table.add_row(line.what, _amount(line.amount, line.unit), between, Text(line.how, style="dim"))
    return table


def _amount(amount: float, unit: str) -> str:
    if unit == "bytes":
        return f"{amount / 1e9:.2f} GB" if amount >= 1e9 else f"{amount / 1e6:.1f} MB"
    return f"{amount:,.0f}" if amount >= 100 or amount == int(amount) else f"{amount:.1f}"
