"""Parts that commands share: options with one meaning everywhere, signals that stop them, JSON, and text that any
terminal can show."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "NewestRunOption",
    "RecipeArgument",
    "RunArgument",
    "RunsOption",
    "SetOption",
    "WorkersOption",
    "accept_any_text",
    "cancel_on_signals",
    "escape",
    "parse_workers",
    "read_settings",
    "write_json",
]

RECIPE_HELP = "A recipe (.toml or .py), or a folder with a recipe.toml."
RecipeArgument = Annotated[Path, typer.Argument(help=RECIPE_HELP, metavar="RECIPE")]
RunArgument = Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN")]
NewestRunOption = Annotated[
    Path | None, typer.Option("--run", help="The run folder; by default the newest below --runs.", show_default=False)
]
RunsOption = Annotated[Path, typer.Option("--runs", help="Where run folders lie.")]
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
    """Settings by dotted key, of `--set KEY=VALUE`, of options that stand for one key (None = not given), and of
    `--workers`. Raises ConfigError."""
    from lightningrl.recipe_file import parse_setting

    settings = dict(parse_setting(text) for text in texts or ())
    settings.update({key: value for key, value in (shortcuts or {}).items() if value is not None})
    return {**settings, **parse_workers(workers)}


def parse_workers(text: str | None) -> dict[str, Any]:
    """Turn `"4"`, `"ray"` or `"ray:16"` into settings of the recipe. Raises ConfigError."""
    if text is None:
        return {}
    match = re.fullmatch(r"(?P<count>\d+)|(?P<where>[A-Za-z][\w-]*)(?::(?P<many>\d+))?", text.strip())
    if match is None:
        from lightningrl.errors import ConfigError

        raise ConfigError(f"--workers {text!r} is neither a number nor a place; write for example 4, ray or ray:16")
    where, count = match["where"], match["count"] or match["many"]
    settings: dict[str, Any] = {"runtime.launcher": where} if where else {}
    return {**settings, "runtime.workers": int(count)} if count else settings


def cancel_on_signals(announce: Callable[[], object] = lambda: None) -> None:
    """Cancel the task that calls this when the process is told to stop; `announce` is called the first time."""
    task = asyncio.current_task()
    assert task is not None
    signals: list[int] = []

    def stop(number: int) -> None:
        if not signals:
            announce()
        signals.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)


def accept_any_text() -> None:
    r"""Make standard output and error write `?` for a character that their encoding lacks, instead of raising. A stream
    with another rule, as standard error's `\\u2192`, keeps it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def escape(text: str) -> str:
    """Escape rich markup, so that text is shown as it is."""
    from rich.markup import escape as escape_markup

    return escape_markup(text)


def write_json(value: object) -> None:
    """Write one line of JSON to standard output; arrays of numpy as lists, numbers that are none as null."""
    import msgspec

    sys.stdout.buffer.write(msgspec.json.encode(value, enc_hook=lambda of_numpy: of_numpy.tolist()) + b"\n")
