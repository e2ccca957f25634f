"""docs/how-to/agents/harnesses.md says of each client what tests/clients pins, starts and expects, and nothing else; nothing is
installed for that."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLIENTS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "tests" / "clients" / "clients.toml").read_text())
PAGE = (ROOT / "docs" / "how-to" / "agents" / "harnesses.md").read_text()
HEAD = ("| harness", "| client", "|--")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(HEAD)
]


def version_of(name: str) -> str:
    client = CLIENTS[name]
    packages = [*client.get("pip", []), *client.get("npm", [])]
    if "command" not in client:
        (file,) = (ROOT / "tests" / "clients").glob(f"{name}_client.*")
        pins = re.search(r"^(?:#|//) dependencies = (\[.*\])$", file.read_text(), re.MULTILINE)
        assert pins is not None, f"{file.name} pins nothing"
        packages = json.loads(pins[1])
    package, version = re.fullmatch(r"(@?[^=@]+)(?:==|@)(.+)", packages[0]).groups()  # type: ignore[union-attr]
    return f"{package} {version}"


@pytest.mark.parametrize("name", CLIENTS)
def test_the_row_of_a_client_says_how_it_is_started_and_what_is_expected(name: str) -> None:
    client, version = CLIENTS[name], version_of(name)
    is_own = (
        (lambda row: row[1] == f"`{client['command']}`") if "command" in client else (lambda row: row[0] == version)
    )
    (row,) = filter(is_own, ROWS)
    assert row[0].endswith(version) and str(client["calls"]) in row
    if "command" in client:
        beside = [
            *(f"{key}={value}" for key, value in client.get("environment", {}).items()),
            *client.get("files", {}),
            client.get("recipe", ""),
        ]
        assert [text for text in beside if text not in row[2]] == []


def test_there_is_no_row_without_a_client() -> None:
    assert len(ROWS) == len(CLIENTS)
