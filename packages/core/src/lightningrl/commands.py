"""The command line: hosts the commands that installed packages bring by the hook `lightningrl_commands`.

lightningrl NAME …  ─►  CommandGroup: name and summary of each command  ─►  the record's factory  ─►  options, work
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from lightningrl.errors import ConfigError, Interruption, LightningError, PluginError, RunFolderError
from lightningrl.plugins import Plugin, load_plugins

__all__ = ["EXTRAS", "app", "describe_command", "main", "missing_hint", "run_command"]

HELP: Final = {"help_option_names": ["-h", "--help"]}
EXTRAS: Final = {
    **dict.fromkeys(("init", "try", "doctor", "redteam", "train", "sweep", "serve"), "torch"),
    "work": "worker",
    **dict.fromkeys(("branch", "eval", "certify"), "torch"),
    **dict.fromkeys(("view", "report"), "view"),
    **dict.fromkeys(("xray", "rescore"), "torch"),
    "plugins": "",
    **dict.fromkeys(("export", "runs"), "torch"),
    **dict.fromkeys(("rollouts", "export-rollouts"), "view"),
    **dict.fromkeys(("import-traces", "curate"), "traces"),
    **dict.fromkeys(("tune", "recipe"), "torch"),
    "new": "",
}
"""Our commands in the order of the help, and the extra that brings each; core's own need none."""
FOREIGN_PANEL: Final = "Commands of other packages"
PACKAGES: Final = {
    "plot": {"matplotlib"},
    "server": {"httptools", "jinja2", "jsonschema", "prometheus_client", "renderers", "sqlalchemy", "starlette"}
    | {"tokenizers", "transformers", "uvicorn", "uvloop", "websockets"},
}
"""Packages of others that an extra brings, by the names of import."""


def main() -> None:
    """Entry point."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lightningrl.console import accept_any_text

    accept_any_text()
    run_command(app)


def run_command(command: Callable[[], object]) -> None:
    """Run it. Errors of ours end with one sentence and their exit code; others keep their traceback."""
    try:
        try:
            try:
                command()
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except ModuleNotFoundError as error:
            if (hint := missing_hint(error.name or "")) is None:
                raise
            raise ConfigError(hint) from error
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written as Python ends
            raise RunFolderError(
                "no space is left for what it writes or prints; free some space, then run again"
            ) from error
    except LightningError as error:
        from rich.console import Console

        from lightningrl.console import escape

        prefix = "" if isinstance(error, Interruption) else "[bold red]error:[/] "
        for sentence in error.args:
            Console(stderr=True).print(f"{prefix}{escape(str(sentence))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def missing_hint(module: str) -> str | None:
    """The command that installs a module a bare `lightningrl` lacks; None where no extra of ours brings it."""
    package = module.partition(".")[0]
    for extra, packages in PACKAGES.items():
        if package in packages:
            return f"{package!r} is not installed; it comes with: pip install 'lightningrl[{extra}]'"
    return None


def describe_command(command: Callable[..., Any] | typer.Typer, name: str | None = None) -> Plugin:
    """Describe a function or a `typer.Typer` by its help's first paragraph, for `lightningrl_commands`."""
    if isinstance(command, typer.Typer):
        name, text = name or command.info.name, command.info.help
    else:
        name, text = name or command.__name__, command.__doc__
    if not name or not isinstance(text, str):
        raise TypeError(f"command {command!r} needs a name and a help text")
    return Plugin(
        name=name, summary=" ".join(inspect.cleandoc(text).partition("\n\n")[0].split()), factory=lambda: command
    )


class CommandGroup(TyperGroup):
    """All installed commands. Listing them builds none; a broken plugin is named, and the other commands work."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.records = load_plugins(report=warn).commands
        names = [*(name for name in EXTRAS if name in self.records), *sorted(set(self.records) - set(EXTRAS))]
        self.commands = {name: summary_of(self.records[name]) for name in names}
        missing = [name for name in EXTRAS if name not in self.records and EXTRAS[name]]
        groups = (
            (extra, [name for name in missing if EXTRAS[name] == extra])
            for extra in ("torch", "worker", "view", "traces")
        )
        lines = [f"{', '.join(names)}: pip install 'lightningrl\\[{extra}]'" for extra, names in groups if names]
        self.epilog = "\n\n".join(("Not installed:", *lines)) if lines else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Build the command that is run. Raises ConfigError for one of ours whose package is not installed."""
        name = args[0]
        if name not in self.records and name in EXTRAS and not ctx.resilient_parsing:
            raise ConfigError(
                f"command {name!r} is not installed; it comes with: pip install 'lightningrl[{EXTRAS[name]}]'"
            )
        chosen, command, rest = super().resolve_command(ctx, args)
        return chosen, build_command(self.records[chosen]) if chosen else command, rest


def warn(error: PluginError) -> None:
    """Show on standard error what is wrong with a plugin."""
    typer.echo(f"warning: {error}", err=True)


def summary_of(record: Plugin) -> Any:
    """Stand for a command in lists, before it is built."""
    part = typer.Typer()
    panel = None if record.name in EXTRAS else FOREIGN_PANEL
    part.command(record.name, help=record.summary, rich_help_panel=panel)(lambda: None)
    return typer.main.get_command(part)


def build_command(record: Plugin) -> Any:
    made = record.build()
    if isinstance(made, typer.Typer):
        command: Any = typer.main.get_group(made)
        command.name = record.name
        return command
    part = typer.Typer(add_completion=False)
    part.command(record.name)(made)
    return typer.main.get_command(part)


def say_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"lightningrl {version('lightningrl')}")
        raise typer.Exit


app = typer.Typer(
    name="lightningrl",
    cls=CommandGroup,
    no_args_is_help=True,
    context_settings=HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Say which version this is.", callback=say_version, is_eager=True)
    ] = False,
) -> None:
    """Train the language model inside any agent with reinforcement learning; the agent's code does not change."""
