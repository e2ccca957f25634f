"""`lightningrl redteam`: what earns on the rewards of a recipe although it should not, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from lightningrl.console import write_json
from lightningrl_client.commands import RecipeArgument, SetOption, read_settings
from lightningrl_training.commands.printing import Page, show_warnings, shown
from lightningrl_training.commands.stopping import progress_bar

if TYPE_CHECKING:
    from lightningrl_training.redteam.attacks import RedTeamFinding, RedTeamReport

__all__ = ["redteam"]

STYLES: Final = {"high": "bold red", "medium": "yellow", "note": "dim"}


def redteam(
    recipe: RecipeArgument,
    tasks: Annotated[
        int | None,
        typer.Option(help="So many tasks, at random; by default 32, of an async reward 3.", min=1, show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of their choice.")] = 0,
    seconds: Annotated[float, typer.Option(help="The most that it may take.", min=1.0)] = 120.0,
    gold: Annotated[
        str | None,
        typer.Option(
            help="A function from a task to its best output, file.py:name; by default the answers.", metavar="USE"
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="One mutator by name; may be repeated.", metavar="NAME")
    ] = None,
    search: Annotated[
        int, typer.Option(help="Look through so many rollouts of the recipe's own policy, too; it is loaded.", min=0)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    settings: SetOption = None,
) -> None:
    """Attack the rewards before a policy does: reward empty, wrong, forged and right outputs, and say which earn what
    they should not.

    Nothing is trained, and without --search no policy is loaded. Exit status 1 where something was found.

    Examples:
      [bold]lightningrl redteam examples/text_to_sql[/]
      [bold]lightningrl redteam my_recipe.toml --gold gold.py:best --tasks 100[/]
    """
    from lightningrl_training.redteam.attack import attack_recipe
    from lightningrl_training.run_sync import run_sync

    chosen = read_settings(settings)
    show_warnings()
    with progress_bar("stopped; nothing was written") as show:
        attack = attack_recipe(
            recipe,
            tasks=tasks,
            seed=seed,
            seconds=seconds,
            gold=gold,
            only=only or (),
            search=search,
            settings=chosen,
            show=show,
        )
        report = run_sync(attack)
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
