"""docs/frameworks.md says of each framework what tests/frameworks pins and expects, and nothing else; nothing is installed for that."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
AGENTS = ROOT / "tests" / "frameworks"
EXPECTED = tomllib.loads((AGENTS / "expected.toml").read_text())
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "frameworks.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| framework")
]


def pin_of(name: str) -> str:
    (file,) = AGENTS.glob(f"{name}_agent.*")
    found = re.search(r"^(?:#|//) dependencies = (\[.*\])$", file.read_text(), re.MULTILINE)
    assert found is not None, f"{file.name} pins nothing"
    package, version = re.fullmatch(r"(@?[^=@]+)(?:==|@)(.+)", json.loads(found[1])[0]).groups()  # type: ignore[union-attr]
    return f"{package.partition('[')[0]} {version}"


@pytest.mark.parametrize("name", EXPECTED)
def test_the_row_of_a_framework_says_what_its_agent_shows(name: str) -> None:
    (row,) = [row for row in ROWS if row[1] == pin_of(name)]
    assert row[3].startswith("no") == (set(EXPECTED[name]["roles"]) == {"-"})
    assert row[4].startswith("no") == (EXPECTED[name]["tools"] == [])
    assert ("of no call" in row[4]) == any("of no call" in tool for tool in EXPECTED[name]["tools"])


def test_there_is_no_row_without_an_agent() -> None:
    assert sorted(row[1] for row in ROWS) == sorted(map(pin_of, EXPECTED))
