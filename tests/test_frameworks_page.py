"""docs/reference/frameworks.md says of each framework what tests/frameworks pins and expects, and nothing else; nothing is
installed for that."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
AGENTS = ROOT / "tests" / "frameworks"
EXPECTED = tomllib.loads((AGENTS / "expected.toml").read_text())
EXAMPLES = tomllib.loads((AGENTS / "examples.toml").read_text())
OURS, THEIRS = (
    [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in part.splitlines()
        if line.startswith("| ") and not line.startswith("| framework")
    ]
    for part in (ROOT / "docs" / "reference" / "frameworks.md").read_text().split("\n## Their own examples\n")
)


def pin_of(name: str) -> str:
    (file,) = AGENTS.glob(f"{name}_agent.*")
    found = re.search(r"^(?:#|//) dependencies = (\[.*\])$", file.read_text(), re.MULTILINE)
    assert found is not None, f"{file.name} pins nothing"
    return version_of(json.loads(found[1])[0])


def version_of(package: str) -> str:
    name, version = re.fullmatch(r"(@?[^=@]+)(?:==|@)(.+)", package).groups()  # type: ignore[union-attr]
    return f"{name.partition('[')[0]} {version}"


@pytest.mark.parametrize("name", EXPECTED)
def test_the_row_of_a_framework_says_what_its_agent_shows(name: str) -> None:
    (row,) = [row for row in OURS if row[1] == pin_of(name)]
    assert_says(row[3], row[4], EXPECTED[name])


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_row_of_an_example_says_what_it_shows(name: str) -> None:
    example = EXAMPLES[name]
    (row,) = [row for row in THEIRS if row[0] == version_of(example["installs"][0])]
    assert row[1] == f"`{example['example']}`"
    assert row[2] == str(len(example["roles"]))
    assert_says(row[3], row[4], example)


def test_there_is_no_row_without_an_agent() -> None:
    assert sorted(row[1] for row in OURS) == sorted(map(pin_of, EXPECTED))
    in_a_repository = [row for row in THEIRS if " at " in row[1]]
    assert len(THEIRS) == len(EXAMPLES) + len(in_a_repository)


def assert_says(roles: str, tools: str, expected: dict[str, Any]) -> None:
    assert roles.startswith("no") == (set(expected["roles"]) == {"-"})
    assert tools.startswith("no") == (expected["tools"] == [])
    assert ("of no call" in tools) == any("of no call" in tool for tool in expected["tools"])
