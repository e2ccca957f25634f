"""Core's own commands: `lightningrl new` starts a plugin, `lightningrl plugins` lists what is installed."""

import shlex
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

from lightningrl.commands import EXTRAS, describe_command
from lightningrl.plugins import COMMANDS, YIELDING, Plugin, hookimpl, load_plugins
from lightningrl.scaffold import TEMPLATES, new_package

__all__ = ["lightningrl_commands"]

KINDS: Final = tomllib.loads((TEMPLATES / "kinds.toml").read_text(encoding="utf-8"))
"""Kinds of plugins with a template: what it makes, and what its name is."""

new = typer.Typer(
    name="new",
    no_args_is_help=True,
    help="Start a plugin of your own, from a template that passes its conformance suite.",
)


def add_kind(kind: str, summary: str, name_help: str) -> None:
    """Add `lightningrl new KIND`."""

    @new.command(kind, help=summary)
    def make(
        name: Annotated[str, typer.Argument(help=name_help)],
        folder: Annotated[
            Path | None,
            typer.Option(help="Where to put the package; by default a folder named like it.", show_default=False),
        ] = None,
    ) -> None:
        from rich.console import Console

        made = new_package(kind, name, folder)
        install = shlex.quote(f"{'' if made.is_absolute() else './'}{made}[test]")
        tests = f"pip install -e {install} && pytest {shlex.quote(str(made))}"
        next_ = f"next: make it your own, then run its tests:  {tests}"
        Console().print(f"made {made}\n{next_}", highlight=False, markup=False, soft_wrap=True)


for _kind, (_summary, _name) in KINDS.items():
    add_kind(_kind, _summary, _name)


def plugins() -> None:
    """List what is installed: adapters, trainer backends, rewards, credit assigners, commands."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(
        Column("kind", no_wrap=True),
        Column("name", no_wrap=True),
        Column("what it is", ratio=1),
        title="Installed plugins",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        expand=True,
    )
    manager = load_plugins()
    for hook, kind in YIELDING.items():
        for record in manager.records(hook).values():
            if hook == COMMANDS and record.name in EXTRAS:  # `lightningrl --help` lists ours
                continue
            declared = "" if record.capabilities is None else f" (declares: {record.capabilities})"
            table.add_row(
                kind, record.name, Text.assemble(record.summary, declared, (f"  from {record.distribution}", "dim"))
            )
    Console().print(table)


@hookimpl
def lightningrl_commands() -> Iterable[Plugin]:
    yield describe_command(plugins)
    yield describe_command(new)
