"""`lightningrl certify`: did a run train what was sampled, with the probabilities that it was sampled with?"""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table

from lightningrl.console import escape, write_json
from lightningrl.sanitize import printable
from lightningrl_training.evaluation.certificate import Certificate
from lightningrl_training.run import Run

__all__ = ["certify_command"]

MARKS = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: "[yellow]-[/]   "}


def certify_command(run: Path, *, as_json: bool) -> None:
    certificate = Run(run).certify()
    if as_json:
        write_json({**msgspec.to_builtins(certificate), "is_passed": certificate.is_passed})
    else:
        _print(Console(), certificate)
    if not certificate.is_passed:
        raise typer.Exit(1)


def _print(console: Console, certificate: Certificate) -> None:
    for check in certificate.checks:
        console.print(
            f"{MARKS[check.is_passed]}  {_shown(check.name)}: {_shown(check.evidence)}", highlight=False, soft_wrap=True
        )
    for policy, parts in certificate.gaps.items():
        if parts:
            numbers = (
                Column(name, justify="right")
                for name in ("tokens", "mean", "99 of 100 below", "largest", "beyond the clip")
            )
            table = Table(Column(f"gap of {_shown(policy)}"), *numbers, box=None, padding=(0, 2, 0, 0))
            for part in parts:
                cells = (f"{value:.1e}" for value in (part.mean, part.p99, part.largest))
                table.add_row(part.part, str(part.tokens), *cells, f"{part.far:.2%}")
            console.print(table, highlight=False)
    console.print(f"{certificate.recomputed} of {certificate.tokens} sampled tokens recomputed", highlight=False)


def _shown(text: str) -> str:
    return escape(printable(text))
