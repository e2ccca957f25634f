"""Writes docs/reference/commands.md: every command with its options, from the code that parses them.

python scripts/make_commands_page.py
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from lightningrl.commands import EXTRAS, build_command
from lightningrl.plugins import load_plugins

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
HEAD: Final = """# Commands

Made from the code by `scripts/make_commands_page.py`. `lightningrl NAME --help` prints the same.

Several commands take these:
"""
FEWEST_SHARING: Final = 3
"""Commands whose option of the same text is explained once."""


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """The page, commands in the order of `lightningrl --help`."""
    records = load_plugins().commands
    commands = {f"lightningrl {name}": build_command(records[name]) for name in EXTRAS if name in records}
    counts = Counter(item(option) for command in commands.values() for option in options(command))
    often = [text for text, count in counts.items() if count >= FEWEST_SHARING]
    names = Counter(text.partition(":")[0] for text in often)
    shared = frozenset(text for text in often if names[text.partition(":")[0]] == 1)
    parts = (part for path, command in commands.items() for part in describe(path, command, shared))
    return "\n".join([HEAD, *sorted(shared), "", *parts])


def options(command: Any) -> Iterator[Any]:
    """A command's arguments and options, its subcommands' included."""
    for part in getattr(command, "commands", {}).values():
        yield from options(part)
    yield from (option for option in command.params if option.name != "help")


def describe(path: str, command: Any, shared: frozenset[str]) -> Iterator[str]:
    text, *examples = re.split(r"\[bold\](.*?)\[/\]", command.help or "")
    shown = "\n```text\n" + "\n".join(examples[::2]) + "\n```\n" if examples else ""
    rest = plain(" ".join(examples[1::2]))
    head = plain(text).removesuffix(" Examples:")
    yield f"## `{path}`\n\n{head}\n{shown}" + (f"\n{rest}\n" if rest else "")
    for name, part in getattr(command, "commands", {}).items():
        yield from (text.replace("## ", "### ", 1) for text in describe(f"{path} {name}", part, shared))
    items = [item(option) for option in command.params if option.name != "help"]
    if items:
        names = ", ".join(text.partition(":")[0].removeprefix("- ") for text in items if text in shared)
        own = [text for text in items if text not in shared]
        yield "\n".join([*own, *([f"- As above: {names}."] if names else [])]) + "\n"


def item(option: Any) -> str:
    if option.param_type_name == "argument":
        names = option.metavar or option.name.upper()
    else:
        names = ", ".join(option.opts) + ("" if option.is_flag else f" {option.metavar or option.name.upper()}")
    default = option.default if isinstance(option.default, bool | int | float | str | Path) else None
    shown = "" if default in (None, False, "") or option.required else f" (`{default}`)"
    return f"- `{names}`{shown}: {plain(option.help)}"


def plain(text: str | None) -> str:
    """Help on one line, in Markdown."""
    words = re.sub(r"\[bold\](.*?)\[/\]", r"`\1`", " ".join((text or "").split()))
    return words.replace("\\[", "[").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
