"""`lightningrl certify`: did a run train what was sampled, with the probabilities that it was sampled with?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lightningrl.console import RunArgument, write_json
from lightningrl_training.commands.printing import Page, make_table, shown

if TYPE_CHECKING:
    from lightningrl_training.evaluation.certificate import Certificate

__all__ = ["certify"]

MARKS = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: "[yellow]-[/]   "}


def certify(
    run: RunArgument, as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
) -> None:
    """Say whether a run trained what was sampled: each trained token sampled, once, after the same tokens, and as
    probable to the trainer as to the engine, by version, call and position. Ends with status 1 where it did not.

    Example:
      [bold]lightningrl certify runs/mine[/]
    """
    import msgspec

    from lightningrl_training.run import Run

    certificate = Run(run).certify()
    if as_json:
        write_json({**msgspec.to_builtins(certificate), "is_passed": certificate.is_passed})
    else:
        _print(Page(), certificate)
    if not certificate.is_passed:
        raise typer.Exit(1)


def _print(page: Page, certificate: Certificate) -> None:
    for check in certificate.checks:
        page.print(f"{MARKS[check.is_passed]}  {shown(check.name)}: {shown(check.evidence)}")
    for policy, parts in certificate.gaps.items():
        if parts:
            numbers = "tokens", "mean", "99 of 100 below", "largest", "beyond the clip"
            table = make_table(f"gap of {shown(policy)}", numbers=numbers)
            for part in parts:
                cells = (f"{value:.1e}" for value in (part.mean, part.p99, part.largest))
                table.add_row(part.part, str(part.tokens), *cells, f"{part.far:.2%}")
            page.table(table)
    page.print(f"{certificate.recomputed} of {certificate.tokens} sampled tokens recomputed")
    if certificate.trained_cut:
        page.print(
            f"{certificate.trained_cut / certificate.trained:.1%} of the trained tokens were sampled from a part of "
            "the softmax (top-p, top-k, a grammar): docs/reference/losses.md says what that does to the gradient"
        )
