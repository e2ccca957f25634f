"""Sentences and tables as commands print them: a sentence is one line, which can be copied and searched."""

from __future__ import annotations

import logging

from rich.console import Console, RenderableType
from rich.table import Column, Table

from lightningrl.console import escape
from lightningrl.sanitize import printable

__all__ = ["Page", "make_table", "show_warnings", "shown"]


class Page(Console):
    """A console that breaks no sentence and colours none by guessing."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True)

    def table(self, table: RenderableType) -> None:
        """Print a table, as wide as the terminal at most."""
        self.print(table, soft_wrap=False)


def make_table(*columns: Column | str, numbers: tuple[str, ...] = (), gap: int = 2) -> Table:
    """Make a table without lines. `numbers`: names of columns after the others, whose cells stand at the right."""
    return Table(*columns, *(Column(name, justify="right") for name in numbers), box=None, padding=(0, gap, 0, 0))


def show_warnings(console: Console | None = None) -> None:
    """Print logged warnings, by default to stderr. To be called before an agent is imported: some libraries set up
    logging as they are imported, and would print a line for each of our requests."""
    from rich.logging import RichHandler

    handler = RichHandler(console=console or Console(stderr=True), show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])


def shown(text: str) -> str:
    """Text of a user or a policy, in a sentence with markup."""
    return escape(printable(text))
