"""An import, shown to a person: rollouts, calls by grade, and the reasons for no better one."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightningrl.console import escape
from lightningrl.errors import ConfigError
from lightningrl.keys import KEY_VARIABLE
from lightningrl.plugins import load_plugins
from lightningrl_traces.grades import Grade
from lightningrl_traces.importing import ImportReport, import_traces

__all__ = ["import_command"]

_REASONS = 6
_AGAINST = {Grade.RL: "not to tune on: ", Grade.SFT: "not rl-safe: ", Grade.JUDGE: "not sft-safe: "}
"""The use that the reasons of a grade speak against."""


def import_command(
    source: Path | None, into: Path, form: str | None, listen: str | None, reward: str | None = None
) -> None:
    console = Console()
    if (source is None) == (listen is None):
        raise ConfigError("name an export to import, or a port with --listen, and not both")
    if listen is not None and form is not None:
        raise ConfigError("--listen takes OTLP alone; remove --format")
    if source is not None:
        report = import_traces(source, into, form, load_plugins(), reward)
    else:
        report = _listen(str(listen), into, console, reward)
    if report.is_old:
        console.print(f"{escape(str(into))} holds this import already", highlight=False)
        return
    _print(report, console)


def _listen(address: str, into: Path, console: Console, reward: str | None) -> ImportReport:
    from lightningrl_traces.receiver import receive_traces

    def announce(url: str) -> None:
        console.print(f"listening: OTEL_EXPORTER_OTLP_ENDPOINT={url}", highlight=False, soft_wrap=True)
        if os.environ.get(KEY_VARIABLE):
            console.print(
                f'with the key:  OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer ${KEY_VARIABLE}"', highlight=False
            )
        console.print("Ctrl-C ends it and makes the run", highlight=False)

    return receive_traces(address, into, load_plugins(), announce, reward)


def _print(report: ImportReport, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("grade", "calls", "reasons"):
        table.add_column(name, justify="right" if name == "calls" else "left")
    for grade in Grade:
        counted = [(count, reason) for (of, reason), count in report.reasons.items() if of == grade]
        reasons = [f"{reason} ({count})" for count, reason in sorted(counted, key=lambda item: (-item[0], item[1]))]
        against = _AGAINST.get(grade, "") if reasons else ""
        table.add_row(grade.value, str(report.grades[grade]), against + ", ".join(reasons[:_REASONS]))
    calls = sum(report.grades.values())
    formats = ", ".join(report.formats)
    console.print(f"imported {report.rollouts} rollouts with {calls} calls from {formats}", highlight=False)
    console.print(table)
    for sentence, count in report.facts.items():
        console.print(f"{count} {sentence}", highlight=False)
    if report.scores:
        named = f"the score {report.reward!r}" if report.reward is not None else "none: name one with --reward NAME"
        console.print(f"reward: {named}; there are: {', '.join(report.scores)}", highlight=False, markup=False)
    console.print(f"\nlook: lightningrl view {escape(str(report.folder))}", highlight=False, soft_wrap=True)
