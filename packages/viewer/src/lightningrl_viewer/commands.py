"""The viewer's commands and their options; the work of each lies in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightningrl.commands import describe_command
from lightningrl.console import NewestRunOption, RunsOption

__all__ = ["COMMANDS"]


def view(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A run folder, or a folder of runs; by default the newest run below --runs.",
            metavar="RUN",
            show_default=False,
        ),
    ] = None,
    runs: RunsOption = Path("runs"),
    port: Annotated[
        int, typer.Option(help="Port to listen on, on this machine only; 0 = any free one.", min=0, max=65535)
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Take no tags and notes, and delete nothing: for others to look.")
    ] = False,
) -> None:
    """Look at a run in a browser, while it trains or afterwards: curve, alarms, rollouts, tokens, credit.

    A folder of runs also takes tags and notes, and deletes a run that you say yes to; else nothing is changed.

    Examples:
      [bold]lightningrl view[/]                 the newest run
      [bold]lightningrl view runs/mine[/]       one run, live or ended
      [bold]lightningrl view runs[/]            all of them, and how they compare
    """
    from lightningrl_viewer.app import view_command

    view_command(folder, runs=runs, port=port, browser=browser, may_write=not read_only)


def report(
    folder: Annotated[
        Path | None,
        typer.Argument(help="A run; by default the newest below --runs.", metavar="RUN", show_default=False),
    ] = None,
    html: Annotated[Path, typer.Option("--html", help="The file to write.", metavar="FILE")] = Path("report.html"),
    runs: RunsOption = Path("runs"),
) -> None:
    """Write a run's page, and the rollouts worth reading, as one HTML file that needs nothing else, for a colleague.

    Example:
      [bold]lightningrl report runs/mine --html mine.html[/]
    """
    from lightningrl_viewer.report import write_report

    write_report(folder, html=html, runs=runs)


def export_rollouts(
    folder: Annotated[
        Path | None,
        typer.Argument(help="A run; by default the newest below --runs.", metavar="RUN", show_default=False),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="atif: Agent Trajectory Interchange Format 1.7; openenv: TrainingTrace 1.",
            metavar="atif|openenv",
        ),
    ] = "atif",
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", help="The file to write, new; by default rollouts.FORMAT.jsonl.", metavar="FILE", show_default=False
        ),
    ] = None,
    mode: Annotated[str | None, typer.Option(help="Only train, or only validation.", show_default=False)] = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Write a run's rollouts in a format that other tools read, one a line: tokens, log-probabilities, masks, rewards.

    Example:
      [bold]lightningrl export-rollouts runs/mine --format atif --to mine.jsonl[/]
    """
    from lightningrl_runs.rollout_files import export_command

    export_command(folder, form=form, to=to, runs=runs, mode=mode)


def list_rollouts(
    run: NewestRunOption = None,
    runs: RunsOption = Path("runs"),
    step: Annotated[
        int | None,
        typer.Option(help="Only of this step, counted from 1; validation: after this step.", show_default=False),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only of the task with this id.", show_default=False)] = None,
    mode: Annotated[str | None, typer.Option(help="train or validation.", show_default=False)] = None,
    outcome: Annotated[
        str | None, typer.Option(help="Only with this outcome, e.g. agent_error.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="Show at most so many.", min=1)] = 20,
    sort: Annotated[
        str, typer.Option(help="newest first, or by reward, worst first.", metavar="newest|reward")
    ] = "newest",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List rollouts with their outcome, reward and calls."""
    from lightningrl_runs.listing import list_command

    list_command(
        run=run, runs=runs, step=step, task=task, mode=mode, outcome=outcome, limit=limit, sort=sort, as_json=as_json
    )


def show_rollout(
    rollout_id: Annotated[str, typer.Argument(help="A rollout's id, from `rollouts list`.", metavar="ROLLOUT")],
    run: NewestRunOption = None,
    runs: RunsOption = Path("runs"),
    full: Annotated[bool, typer.Option("--full", help="Each call's whole row, markup included.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The trace as one JSON object.")] = False,
) -> None:
    """Show one rollout: who said what, tokens in the colour of their credit, tools, other calls, rewards, outcome."""
    from lightningrl_runs.listing import show_command

    show_command(rollout_id, run=run, runs=runs, full=full, as_json=as_json)


rollouts = typer.Typer(
    name="rollouts",
    no_args_is_help=True,
    help="Look at the rollouts of a run: what was asked, called, answered, earned.",
)
rollouts.command("list")(list_rollouts)
rollouts.command("show")(show_rollout)

COMMANDS = (
    describe_command(view),
    describe_command(report),
    describe_command(rollouts),
    describe_command(export_rollouts, "export-rollouts"),
)
