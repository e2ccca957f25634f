"""The client's command, and the options of all commands that take a recipe; its work lies in a module of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lightningrl.commands import describe_command
from lightningrl.errors import ConfigError

__all__ = [
    "COMMANDS",
    "RECIPE_HELP",
    "OptionalRecipeArgument",
    "RecipeArgument",
    "SetOption",
    "WorkersOption",
    "parse_workers",
    "read_settings",
]

RECIPE_HELP: Final = "A recipe (.toml or .py), or a folder with a recipe.toml."
RecipeArgument = Annotated[Path, typer.Argument(help=RECIPE_HELP, metavar="RECIPE")]
OptionalRecipeArgument = Annotated[Path | None, typer.Argument(help=RECIPE_HELP, metavar="RECIPE")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override one key of the recipe, e.g. --set loop.steps=20. May be repeated.", metavar="KEY=VALUE"
    ),
]
WorkersOption = Annotated[
    str | None,
    typer.Option(
        help="How many processes run the agent, and where: [bold]4[/] (runtime.workers), [bold]ray[/] = over a Ray "
        "cluster (runtime.launcher), [bold]ray:16[/] = both.",
        metavar="N|WHERE|WHERE:N",
        show_default=False,
    ),
]


def read_settings(
    texts: Sequence[str] | None, shortcuts: Mapping[str, Any] | None = None, *, workers: str | None = None
) -> dict[str, Any]:
    """Settings by key, of `--set KEY=VALUE`, options of one (None = not given), `--workers`. Raises ConfigError."""
    from lightningrl_client.recipe_file import parse_setting

    given = {key: value for key, value in (shortcuts or {}).items() if value is not None}
    return {**dict(map(parse_setting, texts or ())), **given, **parse_workers(workers)}


def parse_workers(text: str | None) -> dict[str, Any]:
    """Turn `"4"`, `"ray"` or `"ray:16"` into settings of the recipe. Raises ConfigError."""
    if text is None:
        return {}
    match = re.fullmatch(r"(?P<count>\d+)|(?P<where>[A-Za-z][\w-]*)(?::(?P<many>\d+))?", text.strip())
    if match is None:
        raise ConfigError(f"--workers {text!r} is neither a number nor a place; write for example 4, ray or ray:16")
    where, count = match["where"], match["count"] or match["many"]
    settings: dict[str, Any] = {"runtime.launcher": where} if where else {}
    return {**settings, "runtime.workers": int(count)} if count else settings


def work(
    recipe: Annotated[Path, typer.Argument(help="The recipe whose agent these workers run.", metavar="RECIPE")],
    server: Annotated[str, typer.Option(help="URL of the Lightning Server.")],
    key: Annotated[
        str, typer.Option(help="The worker key that `train` prints (or the run's).", envvar="LIGHTNINGRL_KEY")
    ],
    workers: WorkersOption = None,
    settings: SetOption = None,
) -> None:
    """Run agents for a Lightning Server that runs elsewhere, until stopped: the recipe's workers, or --workers'."""
    from lightningrl_client.runtime.recipe_pool import work_command

    work_command(recipe, server=server, key=key, settings=read_settings(settings, workers=workers))


COMMANDS = (describe_command(work),)
