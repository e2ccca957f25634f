"""Commands of traces and their options; the work of each lies in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightningrl.commands import describe_command
from lightningrl_traces.curation.command import curate

__all__ = ["COMMANDS"]


def import_traces(
    source: Annotated[
        Path | None,
        typer.Argument(help="An export of traces, or a folder of them.", metavar="[SOURCE]", show_default=False),
    ] = None,
    *,
    into: Annotated[Path, typer.Option("--into", help="The run folder to make, new or empty.", metavar="FOLDER")],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Format of the files, where their beginning does not tell it; `lightningrl plugins` lists them.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            help="Take OTLP over HTTP at this port, in place of SOURCE, until Ctrl-C makes the run.",
            metavar="[HOST:]PORT",
            show_default=False,
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            help="The score that is the reward; default: the only one that the traces have.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Import traces of an agent in production as a run, with a grade and reasons for each call.

    OTLP (OpenInference, GenAI, Traceloop), Phoenix, Langfuse, LangSmith, ATIF, OpenEnv, logs of Claude Code and Codex,
    chat messages. Secrets and personal data are masked. What is killed goes on by the same command.

    Example:
      [bold]lightningrl import-traces export.jsonl --into runs/production[/]
      [bold]lightningrl import-traces --listen 4318 --into runs/production[/]
    """
    from lightningrl_traces.reporting import import_command

    import_command(source, into, form, listen, reward)


COMMANDS = (describe_command(import_traces, "import-traces"), describe_command(curate))
