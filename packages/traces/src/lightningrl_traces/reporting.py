"""An import, shown to a person: rollouts, calls by grade, and the reasons for no better one."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightningrl.console import escape
from lightningrl.plugins import load_plugins
from lightningrl_traces.grades import Grade
from lightningrl_traces.importing import import_traces

__all__ = ["import_command"]

_REASONS = 6


def import_command(source: Path, into: Path, form: str | None) -> None:
    report = import_traces(source, into, form, load_plugins())
    console = Console()
    if report.is_old:
        console.print(f"{escape(str(into))} holds this import already", highlight=False)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("grade", "calls", "reasons"):
        table.add_column(name, justify="right" if name == "calls" else "left")
    for grade in Grade:
        counted = [(count, reason) for (of, reason), count in report.reasons.items() if of == grade]
        reasons = [f"{reason} ({count})" for count, reason in sorted(counted, key=lambda item: (-item[0], item[1]))]
        table.add_row(grade.value, str(report.grades[grade]), ", ".join(reasons[:_REASONS]))
    calls = sum(report.grades.values())
    formats = ", ".join(report.formats)
    console.print(f"imported {report.rollouts} rollouts with {calls} calls from {formats}", highlight=False)
    console.print(table)
    for sentence, count in report.facts.items():
        console.print(f"{count} {sentence}", highlight=False)
    console.print(f"\nlook: lightningrl view {escape(str(into))}", highlight=False, soft_wrap=True)
