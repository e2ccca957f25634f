"""`lightningrl redteam`: what earns on the rewards of a recipe although it should not, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import typer

from lightningrl.console import write_json
from lightningrl_training.commands.printing import Page, show_warnings, shown
from lightningrl_training.commands.stopping import progress_bar
from lightningrl_training.redteam.attack import attack_recipe
from lightningrl_training.redteam.attacks import RedTeamFinding, RedTeamReport, Severity
from lightningrl_training.run_sync import run_sync

__all__ = ["redteam_command"]

STYLES: Final = {Severity.HIGH: "bold red", Severity.MEDIUM: "yellow", Severity.NOTE: "dim"}


def redteam_command(source: Path, *, as_json: bool, **options: Any) -> None:
    """`options`: of `attack_recipe`."""
    show_warnings()
    with progress_bar("stopped; nothing was written") as show:
        report = run_sync(attack_recipe(source, show=show, **options))
    if as_json:
        write_json(report.as_json())
    else:
        _print(Page(), report)
    if report.is_bad:
        raise typer.Exit(1)


def _print(page: Page, report: RedTeamReport) -> None:
    page.print(f"{report.outputs} outputs were rewarded on {report.tasks} tasks")
    for reward, form in report.gold.items():
        page.print(shown(f"gold of {reward}: {form or 'unknown'}"))
    _print_findings(page, report.findings)
    if report.strict:
        page.print("\ntoo strict, perhaps (no exit status):")
        for finding in report.strict:
            page.print(shown(f"  {finding.sentence}, on {finding.tasks} of {finding.tried} tasks: {finding.output}"))
    for note in report.notes:
        page.print(shown(note))
    if not report.is_bad:
        page.print("no attack earned what it should not")


def _print_findings(page: Page, findings: Sequence[RedTeamFinding]) -> None:
    for finding in findings:
        where = f" ({finding.tasks} of {finding.tried} tasks)" if finding.tried else ""
        page.print(f"\n[{STYLES[finding.severity]}]{finding.severity}[/] {shown(finding.sentence)}{where}")
        gold = "" if finding.gold is None else f", gold {finding.gold:g}"
        earned = "" if finding.earned is None else f" earned {finding.earned:g}{gold}:"
        if finding.output or earned:
            page.print(shown(f"  task {finding.task}{earned} {finding.output}"))
        page.print(f"  → {shown(finding.advice)}")
