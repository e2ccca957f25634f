"""The client's command and its options; its work lies in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightningrl.commands import describe_command
from lightningrl.console import SetOption, WorkersOption, read_settings

__all__ = ["COMMANDS"]


def work(
    recipe: Annotated[Path, typer.Argument(help="The recipe whose agent these workers run.", metavar="RECIPE")],
    server: Annotated[str, typer.Option(help="URL of the Lightning Server.")],
    key: Annotated[
        str, typer.Option(help="The worker key that `train` prints (or the run's).", envvar="LIGHTNINGRL_KEY")
    ],
    workers: WorkersOption = None,
    settings: SetOption = None,
) -> None:
    """Run agents for a Lightning Server that runs elsewhere, until it is stopped: the recipe's workers, or those that
    --workers says."""
    from lightningrl_client.runtime.work import work_command

    work_command(recipe, server=server, key=key, settings=read_settings(settings, workers=workers))


COMMANDS = (describe_command(work),)
