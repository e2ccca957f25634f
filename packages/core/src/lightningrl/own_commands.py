"""Core's own commands: `lightningrl new` starts a plugin, `lightningrl plugins` lists what is installed."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

from lightningrl.commands import EXTRAS, describe_command
from lightningrl.plugins import COMMANDS, YIELDING, Plugin, hookimpl, load_plugins

__all__ = ["lightningrl_commands"]

KINDS: Final = {
    "adapter": (
        "An adapter for an agent framework, here a toy one: roles, spans and tools.",
        "Name of the framework, e.g. haystack.",
    ),
    "backend": (
        "A trainer backend, here a policy of one table in numpy: engine, learner, checkpoints, export.",
        "Its name in recipes, e.g. mlx.",
    ),
    "command": (
        "A command of `lightningrl`, here one that counts runs.",
        "Its name on the command line, e.g. count-runs.",
    ),
    "credit": (
        "A credit assigner: how a rollout's return is spread over its calls.",
        "Its name in recipes, e.g. last_call.",
    ),
    "dialect": (
        "An API that agents speak, here JSON with one endpoint, plain and streaming.",
        "Name of the API, e.g. ollama.",
    ),
    "page": ("A page of the viewer, here a table of tasks.", "Its path in the viewer, e.g. tasks."),
    "reward": ("A terminal reward: a number for what a rollout came to.", "Its name in recipes, e.g. brevity."),
}
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

        from lightningrl.scaffold import new_package

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
