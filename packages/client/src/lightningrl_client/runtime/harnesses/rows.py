"""Rows of harnesses: how each is started and what it is given. Ours are data, in harnesses.toml; a recipe has its own.

agent = { harness = "pi" }                                        a row of the table
agent = { harness = { command = ["my-agent", "{input}"] } }       the same fields, written there
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from lightningrl.errors import ConfigError

__all__ = ["Harness", "Places", "find_harness", "read_table", "refuse_unknown"]

TABLE: Final = Path(__file__).with_name("harnesses.toml")
LEAST_CONTEXT: Final = 8_192
PLACES: Final = re.compile(r"\{(input|base_url|key|model|home|folder)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Values that stand in the texts of a row, for one rollout."""

    input: str
    base_url: str
    """OpenAI's, of the rollout: it ends in `/v1`."""
    key: str = field(repr=False)
    model: str
    home: str
    folder: str

    def fill(self, text: str) -> str:
        """Put the values into a text, once: what a task says is not read again."""
        return PLACES.sub(lambda place: str(getattr(self, place[1])), text)

    def argument(self, text: str) -> str:
        """A word of a command; a task that begins with a dash is no option."""
        return f" {self.input}" if text == "{input}" and self.input.startswith("-") else self.fill(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness:
    """A program that works on a folder, asking a model."""

    command: Sequence[str]
    """Words of the command, with `{input}`; started in the rollout's folder."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files by their paths below HOME."""
    stdin: str = ""
    """Text on its standard input: `"{input}"`."""
    exclude: Sequence[str] = ()
    """Patterns of its own files in the working folder, which are in no diff."""
    model: str = "policy"
    """Name that it is given for the policy."""
    name: str = ""
    npm: Sequence[str] = ()
    pip: Sequence[str] = ()
    prompt: int = 0
    """Tokens of its first prompt, about; 0 = not known."""

    @property
    def context(self) -> int:
        """Tokens of context that a policy needs for a short task: a power of two, 8,192 or more, of which the first
        prompt takes no more than half; 0 = not known."""
        return max(LEAST_CONTEXT, 1 << (2 * self.prompt - 1).bit_length()) if self.prompt else 0

    @property
    def packages(self) -> Sequence[str]:
        """Packages as they are installed, with versions."""
        return self.npm or self.pip

    @property
    def install(self) -> str:
        """The command that installs it; empty = not known."""
        if self.npm:
            return f"npm install -g {' '.join(self.npm)}"
        more = "".join(f" --with '{package}'" for package in self.pip[1:])
        return f"uv tool install {self.pip[0]}{more}" if self.pip else ""


def read_table() -> dict[str, Harness]:
    """Our rows, by name."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: Harness(name=name, **row) for name, row in rows.items()}


def find_harness(named: Any) -> Harness:
    """A row by its name, or one that the recipe writes. Raises ConfigError."""
    if isinstance(named, Mapping):
        refuse_unknown("agent.harness", named, [each.name for each in fields(Harness)])
        command = named.get("command")
        if not _is_texts(command) or not command:
            raise ConfigError(
                f'agent.harness.command is {command!r}; write its words: command = ["my-agent", "{{input}}"]'
            )
        for key in ("environment", "files"):
            table = named.get(key, {})
            if not isinstance(table, Mapping) or not _is_texts(list(table.values())):
                raise ConfigError(f"agent.harness.{key} is {table!r}; write a table of texts")
        return Harness(**{"name": Path(str(command[0])).name, **named})
    table = read_table()
    if named not in table:
        raise ConfigError(
            f"no harness named {named!r}; there are {', '.join(table)}; or write one of your own: "
            'harness = { command = ["my-agent", "{input}"] }'
        )
    return table[named]


def refuse_unknown(where: str, given: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise ConfigError for the first key that nobody reads."""
    for key in given:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(keys)}"
            raise ConfigError(f"unknown key {f'{where}.{key}'!r}; {advice}")


def text_of(task_input: Any) -> str:
    """The text of an input; JSON where it is none."""
    return task_input if isinstance(task_input, str) else json.dumps(task_input, ensure_ascii=False)


def _is_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) and value for value in values)
