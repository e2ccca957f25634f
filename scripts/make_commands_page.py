"""Writes docs/reference/commands.md: every command with its options, from the code that parses them.

python scripts/make_commands_page.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from lightningrl.commands import EXTRAS, build_command
from lightningrl.plugins import load_plugins

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
HEAD: Final = """# Commands

Made by `python scripts/make_commands_page.py` from the code; a test says when it is not current.
`lightningrl NAME --help` prints the same.
"""


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """The page, commands in the order of `lightningrl --help`."""
    records = load_plugins().commands
    commands = {f"lightningrl {name}": build_command(records[name]) for name in EXTRAS if name in records}
    parts = (part for path, command in commands.items() for part in describe(path, command))
    return "\n".join([HEAD, *parts])


def describe(path: str, command: Any) -> Iterator[str]:
    text, *examples = re.split(r"\[bold\](.*?)\[/\]", command.help or "")
    shown = "```text\n" + "\n".join(examples[::2]) + "\n```\n" if examples else ""
    rest = plain(" ".join(examples[1::2]))
    yield f"## `{path}`\n\n{plain(text).removesuffix(' Examples:')}\n\n{shown}" + (f"\n{rest}\n" if rest else "")
    for name, part in getattr(command, "commands", {}).items():
        yield from (text.replace("## ", "### ", 1) for text in describe(f"{path} {name}", part))
    rows = [row(option) for option in command.params if option.name != "help"]
    if rows:
        yield "| | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def row(option: Any) -> str:
    if option.param_type_name == "argument":
        names = f"`{option.metavar or option.name.upper()}`"
    else:
        value = "" if option.is_flag else f" {(option.metavar or option.name.upper()).replace('|', chr(92) + '|')}"
        names = f"`{', '.join(option.opts)}{value}`"
    default = option.default if isinstance(option.default, bool | int | float | str | Path) else None
    shown = "" if default in (None, False, "") or option.required else f"`{default}`"
    return f"| {names} | {shown} | {plain(option.help)} |"


def plain(text: str | None) -> str:
    """Help on one line, in Markdown."""
    words = re.sub(r"\[bold\](.*?)\[/\]", r"`\1`", " ".join((text or "").split()))
    return words.replace("\\[", "[").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
