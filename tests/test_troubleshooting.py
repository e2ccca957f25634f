"""docs/troubleshooting.md has every message of the program, and its command lines are ones that the program takes."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from lightningrl.commands import CommandGroup, app, build_command
from lightningrl.recipe_keys import all_keys

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module("make_troubleshooting")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def messages(script: Any) -> Any:
    return script.collect()


def test_every_message_of_the_program_stands_on_the_page_below_its_cause(script: Any, messages: Any) -> None:
    assert script.homeless(messages, script.read_entries()) == []
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.unseen(messages, text) == [], "write it anew: python scripts/make_troubleshooting.py"
    assert text == script.page(messages, script.read_entries()), "write it anew: python scripts/make_troubleshooting.py"


@pytest.mark.parametrize(
    "words",
    [
        "⟨kind⟩ ⟨path⟩ is in use by process ⟨holder⟩",  # raise RunFolderError(f"…")
        "has no tool-call markup that we can read",  # a property of another module
        "no row carries a signal",  # logger.warning("%s: %s", where, sentence), through a method
        "in each of ⟨groups⟩ groups all rewards are equal",  # what a function returns
        "⟨field⟩ has the role ⟨role⟩; known are",  # Refusal.at
        "the agent's client answers from a cache",
        "a step of the learner ran out of memory",  # a finding of the doctor
        "unknown key ⟨key⟩",  # of pydantic's errors
        "cannot be read as tasks; tasks are a .jsonl file",  # a constant within
    ],
)
def test_a_message_is_collected_however_it_is_told(words: str, messages: Any) -> None:
    assert any(words in message.text for message in messages)


def test_a_new_message_has_no_entry_and_the_sentence_says_where_to_add_it(script: Any, tmp_path: Path) -> None:
    source = tmp_path / "packages" / "telepathy" / "src" / "lightningrl_telepathy"
    source.mkdir(parents=True)
    (source / "link.py").write_text(
        "class LinkError(RuntimeError): ...\n\n\n"
        "def refuse(sentence):\n    raise LinkError(sentence)\n\n\n"
        "def check(name, is_far):\n    where = 'too far away' if is_far else 'fast asleep'\n"
        "    refuse(f'no mind named {name!r} answers: it is {where}')\n"
    )
    collected = script.collect(tmp_path)
    assert [message.text for message in collected] == [
        "no mind named ⟨name⟩ answers: it is fast asleep",
        "no mind named ⟨name⟩ answers: it is too far away",
    ]
    (first, _) = script.homeless(collected, script.read_entries())
    assert first.startswith(
        "telepathy/link.py: 'no mind named ⟨name⟩ answers: it is fast asleep' has no entry; add its module"
    )
    assert "scripts/troubleshooting.toml" in first


def test_every_entry_has_messages_a_page_to_read_on_and_one_home(script: Any, messages: Any) -> None:
    entries = script.read_entries()
    used = {script.place(message, entries).title for message in messages}
    assert [entry.title for entry in entries if entry.title not in used] == []
    assert [entry.see for entry in entries if not (ROOT / "docs" / entry.see).is_file()] == []
    themes = [theme for theme, _ in groupby(entries, key=lambda entry: entry.theme)]
    assert len(themes) == len(set(themes)), "entries of a theme stand together"


@cache
def command_named(name: str) -> Any:
    group = typer.main.get_command(app)
    assert isinstance(group, CommandGroup)
    return build_command(group.records[name]) if name in group.records else None


def wrong_words(line: str) -> list[str]:
    """What the command line `lightningrl …` names that is no command, no option of it, or no key of a recipe."""
    words = shlex.split(line, comments=True)[1:]
    if words == ["--version"]:
        return []
    command = command_named(words[0])
    if command is None:
        return words[:1]
    if (children := getattr(command, "commands", None)) is not None:
        if words[1:2] and words[1] in children:
            command, words = children[words[1]], words[1:]
        elif not command.invoke_without_command:
            return words[:2]
    options = {"--help", "-h", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}
    wrong = [word for word in words[1:] if re.match(r"--|-\w\b", word) and word.partition("=")[0] not in options]
    settings = [after.partition("=")[0] for word, after in pairwise(words) if word == "--set"]
    return wrong + [key for key in settings if not is_key(key)]


def is_key(key: str) -> bool:
    """Is it a key of a recipe, or one below a table whose keys are the user's or a plugin's?"""
    first, _, rest = key.partition(".")
    if first == "learner":
        page = (ROOT / "docs/reference/recipe.md").read_text(encoding="utf-8")
        return re.search(rf"^- `{rest.rpartition('.')[2]}[ `]", page, re.MULTILINE) is not None
    return key in all_keys() or first in {"rewards", "policies", "roles", "backends", "credit", "tasks"}


def commands_of(text: str) -> Sequence[str]:
    blocks = re.findall(r"^ *```(?:text|bash)[^\n]*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if re.match(r" *lightningrl ", line)]


@pytest.mark.parametrize(
    "page",
    [ROOT / "docs" / "troubleshooting.md", *sorted((ROOT / "docs" / "how-to").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_command_lines_of_a_page_are_ones_that_the_program_takes(page: Path) -> None:
    lines = commands_of(page.read_text(encoding="utf-8"))
    assert [(line, wrong) for line in lines if (wrong := wrong_words(line.split(" | ")[0].split(" && ")[0]))] == []
